import builtins
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import huggingface_hub.errors
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hasten.cli import estimate_memory
from hasten.cli.estimate_memory import (
    add_timm_hub_prefix,
    check_has_model,
    create_ascii_table,
    create_empty_model,
    estimate_command_parser,
    estimate_training_usage,
    gather_data,
    main,
    verify_on_hub,
)

# What the reference prints for the model below.
TABLE = """\
┌────────────────────────────────────────────────────┐
│           Memory Usage for loading `x/y`           │
├───────┬─────────────┬──────────┬───────────────────┤
│ dtype │Largest Layer│Total Size│Training using Adam│
├───────┼─────────────┼──────────┼───────────────────┤
│float32│   58.59 KB  │244.42 KB │     977.67 KB     │
│float16│   29.3 KB   │122.21 KB │     488.84 KB     │
│  int8 │   14.65 KB  │ 61.1 KB  │        N/A        │
│  int4 │   7.32 KB   │ 30.55 KB │        N/A        │
└───────┴─────────────┴──────────┴───────────────────┘
"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(100, 100), nn.Linear(100, 100)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(150, 100)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(100, 150)
        self.head.weight = self.emb.weight
        self.own = nn.Parameter(torch.ones(3, 7))
        self.register_buffer("pos", torch.arange(1000))
        self.register_buffer("scale", torch.ones(5000), persistent=False)


class Undivided(Model):
    _no_split_modules = ("Block",)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(model: nn.Module) -> nn.Module:
        monkeypatch.setattr(estimate_memory, "create_empty_model", lambda *_, **__: model)
        return model

    return use


def arguments(*words: str) -> Any:
    return estimate_command_parser().parse_args(words)


# -- the table -------------------------------------------------------------------------------------------------------


def test_the_table_is_that_of_the_reference(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model(Model())
    assert main(["x/y"]) == 0
    assert capsys.readouterr().out == TABLE + "55,571 parameters; the largest layer is emb.\n"


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_rows(model: Any, kind: torch.dtype) -> None:
    model(Undivided().to(kind))
    training = {"model": 250284, "optimizer": 500568, "gradients": 375426, "step": 500568}
    nothing = dict.fromkeys(training, -1)
    found = gather_data(arguments("x/y", "--dtypes", "float16", "int4"))
    assert found == [["float16", 40400, 125142, training], ["int4", 10100, 31285.5, nothing]]


def test_training() -> None:
    assert estimate_training_usage(1000, "float32") == {
        "model": 1000, "optimizer": 2000, "gradients": 1000, "step": 4000
    }  # fmt: skip
    assert estimate_training_usage(4001, "float16")["gradients"] == 6001
    assert estimate_training_usage(1000, "int8")["step"] == -1


def test_a_table_with_a_long_title() -> None:
    assert create_ascii_table(["a", "b"], [["1", "2"]], "A title") == "\n".join(
        ["┌─────────┐", "│ A title │", "├─┬───────┤", "│a│   b   │", "├─┼───────┤", "│1│   2   │", "└─┴───────┘"]
    )


# -- files, without any network ---------------------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **options: Any) -> Any:
        if name.partition(".")[0] in ("huggingface_hub", "transformers", "timm"):
            raise ImportError(f"no {name}")
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)


def tensors() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in Model().half().state_dict().items() if name != "head.weight"}


def put(folder: Path, form: str) -> Path:
    """Write the weights of a model in a form and return the path to give."""
    if form == "bin":
        torch.save(Model().half().state_dict(), folder / "pytorch_model.bin")
        return folder / "pytorch_model.bin"
    if form == "folder":
        save_file(tensors(), folder / "model.safetensors")
        return folder
    names = list(tensors())
    shards = {"model-00001-of-00002.safetensors": names[:4], "model-00002-of-00002.safetensors": names[4:]}
    for file, held in shards.items():
        save_file({name: tensors()[name] for name in held}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, held in shards.items() for name in held}}))
    return index


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("form", ["folder", "index", "bin"])
def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    path = put(tmp_path, form)
    assert [row[:3] for row in gather_data(arguments(str(path), "--dtypes", "float32", "int8"))] == [
        ["float32", 80800, 230284],
        ["int8", 20200, 57571],
    ]
    assert main([str(path), "--dtypes", "float32"]) == 0
    printed = capsys.readouterr().out
    assert "│float32│" in printed
    assert "55,571 parameters; the largest layer is layers.0.\n" in printed
    assert "108.54 KB float16" in printed
    assert "7.81 KB int64" in printed
    assert "packed" not in printed


def test_packed_weights_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(
        {"l.weight": torch.zeros(64, 64, dtype=torch.uint8), "l.scale": torch.ones(2)}, tmp_path / "q.safetensors"
    )
    assert main([str(tmp_path / "q.safetensors")]) == 0
    assert "may be packed or quantized weights" in capsys.readouterr().out


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["./nope"], "There is no file or folder ./nope."),
        (["weights.safetensors"], "There is no file or folder weights.safetensors."),
        (["."], "has no weights"),
        (["bad.safetensors"], "is not a readable safetensors file"),
        (["bert-base"], "pip install 'hasten[hub]'"),
    ],
)
def test_what_is_not_there_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if words[0].startswith("bad"):
        Path(words[0]).write_bytes(b"x" * 40)
    assert main(words) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


# -- libraries, mocked ------------------------------------------------------------------------------------------------


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def create_model(name: str, **options: Any) -> nn.Module:
        calls.append((name, options, torch.empty(0).device.type))
        return nn.Linear(2, 3)

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))
    return calls


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    def maker(kind: str) -> Any:
        def from_config(config: Any, **options: Any) -> nn.Module:
            fake.calls.append((kind, config.name, options, torch.empty(0).device.type))
            return nn.Linear(2, 3)

        return SimpleNamespace(from_config=from_config)

    def from_pretrained(name: str, **options: Any) -> Any:
        if fake.error is not None:
            raise fake.error
        return SimpleNamespace(name=name, auto_map=fake.auto_map)

    fake = SimpleNamespace(
        calls=[], error=None, auto_map=None, AutoModel=maker("AutoModel"), AutoModelForCausalLM=maker("AutoModelForCausalLM"),
        AutoConfig=SimpleNamespace(from_pretrained=from_pretrained),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "transformers", fake)
    return fake


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A Hub that knows one thing of every repository, and an empty cache."""
    fake = SimpleNamespace(info=SimpleNamespace(library_name="transformers"), error=None)

    def model_info(repo: str, token: Any = None) -> Any:
        if fake.error is not None:
            raise fake.error
        return fake.info

    monkeypatch.setattr(huggingface_hub, "model_info", model_info)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return fake


@pytest.mark.parametrize(
    ("name", "prefixed"),
    [
        ("resnet50", "resnet50"),
        ("timm/x", "hf-hub:timm/x"),
        ("hf-hub:timm/x", "hf-hub:timm/x"),
        ("hf_hub:a/b", "hf_hub:a/b"),
    ],
)
def test_names_for_timm(name: str, prefixed: str, timm: list[Any], hub: Any) -> None:
    assert add_timm_hub_prefix(name) == prefixed
    create_empty_model(name, "timm")
    assert timm == [(prefixed, {"pretrained": False}, "meta")]


def test_the_hub_names_the_library(timm: list[Any], hub: Any) -> None:
    hub.info.library_name = "timm"
    assert gather_data(arguments("timm/x", "--dtypes", "float32"))[0][:3] == ["float32", 24, 36]
    assert timm[0][0] == "hf-hub:timm/x"


@pytest.mark.parametrize(
    ("auto_map", "kind"),
    [
        (None, "AutoModel"),
        ({"AutoConfig": "c", "AutoModelForCausalLM": "m"}, "AutoModelForCausalLM"),
        ({"AutoModel": "m"}, "AutoModel"),
    ],
)
def test_transformers(transformers: Any, hub: Any, auto_map: Any, kind: str) -> None:
    transformers.auto_map = auto_map
    gather_data(arguments("a/b", "--trust-remote-code"))
    assert transformers.calls == [(kind, "a/b", {"trust_remote_code": True}, "meta")]


def test_a_folder_with_a_configuration_alone_is_built(transformers: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert gather_data(arguments(str(tmp_path), "--dtypes", "float32"))[0][:3] == ["float32", 24, 36]
    assert transformers.calls[0][1] == str(tmp_path)


def test_a_folder_for_timm(timm: list[Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architecture": "resnet50"}')
    gather_data(arguments(str(tmp_path)))
    assert timm[0][0] == f"local-dir:{tmp_path}"


@pytest.mark.parametrize(
    ("error", "library"),
    [
        (ValueError("Unrecognized model in a/b"), "transformers"),
        (huggingface_hub.errors.EntryNotFoundError("404"), "transformers"),
        (OSError("a/b does not appear to have a file named config.json"), "transformers"),
        (KeyError("architecture"), "timm"),
        (RuntimeError("Unknown model (x)"), "timm"),
        (ValueError("something else"), "unknown"),
    ],
)
def test_a_library_that_has_no_such_model(transformers: Any, hub: Any, error: Exception, library: str) -> None:
    assert check_has_model(error) == library
    transformers.error = error
    right = RuntimeError if library != "unknown" else ValueError
    with pytest.raises(right, match="with `transformers`, but it is no model" if library != "unknown" else "something"):
        create_empty_model("a/b", "transformers")


def hub_error(kind: Any) -> Exception:
    made: Exception = kind.__new__(kind)
    made.args = ("refused",)
    return made


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"error": hub_error(huggingface_hub.errors.GatedRepoError)}, OSError, "is gated"),
        ({"error": hub_error(huggingface_hub.errors.RepositoryNotFoundError)}, OSError, "does not exist on the Hub"),
        ({"error": OSError("no route")}, OSError, "cannot be asked for a/b"),
        ({"info": SimpleNamespace(library_name=None)}, ValueError, "does not have any library metadata on the Hub"),
        ({"info": SimpleNamespace(library_name="foo")}, ValueError, "Library `foo` is not supported"),
    ],
)
def test_the_hub_refuses(hub: Any, change: dict[str, Any], kind: type[Exception], message: str) -> None:
    hub.__dict__.update(change)
    with pytest.raises(kind, match=message):
        gather_data(arguments("a/b"))


def test_what_the_hub_knows(hub: Any) -> None:
    assert verify_on_hub("a/b") is hub.info
    hub.error = hub_error(huggingface_hub.errors.GatedRepoError)
    assert verify_on_hub("a/b") == "gated"
    hub.error = hub_error(huggingface_hub.errors.RepositoryNotFoundError)
    assert verify_on_hub("a/b") == "repo"


def without(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)


def test_a_missing_library_is_named(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "transformers")
    with pytest.raises(ImportError, match="pip install transformers"):
        gather_data(arguments("a/b", "--library_name", "transformers"))


def test_without_the_library_the_headers_on_the_hub_say_it(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "transformers")
    infos = {"layers.0.w": ("BF16", [4, 5]), "layers.0.b": ("F32", [5]), "n": ("F4", [8])}
    held = {name: SimpleNamespace(dtype=dtype, shape=shape) for name, (dtype, shape) in infos.items()}
    found = SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=held)})
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda name, token=None: found)
    assert gather_data(arguments("a/b", "--dtypes", "float32"))[0][:3] == ["float32", 100, 132]


def test_a_model_in_the_cache_needs_no_network(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.error = OSError("no route")
    without(monkeypatch, "transformers")
    snapshot = tmp_path / "cache" / "models--a--b" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text('{"model_type": "bert"}')
    put(snapshot, "folder")
    assert gather_data(arguments("a/b", "--dtypes", "float32"))[0][:3] == ["float32", 80800, 230284]

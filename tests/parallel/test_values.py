"""Models without values: read from files by each rank, taken from the first rank, or made unit by unit."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from hasten import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from tests.parallel.test_shard import loss_of, tokens
from tests.parallel.test_units import Block, Language
from tests.ranks import RankError, run_ranks


class Buffered(Language):
    """With buffers that are saved and buffers that are not."""

    def __init__(self, tied: bool = False, width: int = 7) -> None:
        super().__init__(2, tied, width)
        self.register_buffer("scale", torch.full((width,), 2.0))
        self.register_buffer("shift", torch.arange(float(width)), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) * self.scale + self.shift
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))

    def reset_parameters(self) -> None:
        self.shift.copy_(torch.arange(float(len(self.shift))))


def model_of(tied: bool, seed: int = 0) -> Buffered:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Buffered(tied)


def empty(tied: bool) -> Buffered:
    with torch.device("meta"):
        return Buffered(tied)


def plain(tied: bool, ranks: int) -> list[float]:
    model = model_of(tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(4):
        loss = sum(loss_of(model, tokens(rank, step)) / ranks for rank in range(ranks))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(one: Accelerator, model: Any, optimizer: Any) -> list[float]:
    losses = []
    for step in range(4):
        loss = loss_of(model, tokens(one.process_index, step))
        one.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(one.reduce(loss.detach(), "mean").item())
    return losses


def accelerator(copies: int = 1, **settings: Any) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"], **settings)
    one = Accelerator(cpu=True)
    mesh = ParallelismConfig(dp_replicate_size=copies, dp_shard_size=one.num_processes // copies)
    return Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=mesh if copies > 1 else None)


def write(folder: Path, layout: str, tied: bool, dtype: torch.dtype = torch.float32) -> Path:
    """The weights as other programs lay them out; tied ones once."""
    tensors = {name: tensor.to(dtype) for name, tensor in model_of(tied).state_dict().items()}
    if tied:
        del tensors["head.weight"]
    if layout == "hub":
        folder = folder / "models--a--b" / "snapshots" / "abc"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        save_file(tensors, folder / "model.safetensors")
        (folder.parents[1] / "refs").mkdir()
        (folder.parents[1] / "refs" / "main").write_text("abc")
        return folder.parents[1]
    folder.mkdir(exist_ok=True)
    if layout == "torch":
        torch.save(tensors, folder / "pytorch_model.bin")
        return folder / "pytorch_model.bin"
    if layout == "single":
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = list(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


# ---- from files ----


def from_files(paths: dict[str, str], tied: bool, copies: int, **settings: Any) -> list[Any]:
    found = []
    for path in paths.values():
        one = accelerator(copies, **settings)
        model = empty(tied)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = one.prepare(model, optimizer)
        names = one.load_weights(model, path, initialise=lambda module: module.reset_parameters())
        assert names == ([], [])
        assert (model.head.weight is model.embedding.weight) == tied
        assert all(isinstance(each, DTensor) and not each.is_meta for each in model.parameters())
        found.append(trained(one, model, optimizer))
        one.free_memory()
    return found


LAYOUTS = ["single", "sharded", "hub", "torch"]


@pytest.mark.parametrize(("ranks", "tied", "copies"), [(2, False, 1), (3, True, 1), (4, True, 2)])
def test_each_rank_reads_its_part_of_files(tmp_path: Path, ranks: int, tied: bool, copies: int) -> None:
    paths = {layout: str(write(tmp_path / layout, layout, tied)) for layout in LAYOUTS}
    for found in run_ranks(from_files, ranks, paths, tied, copies):
        for losses in found:
            assert losses == pytest.approx(plain(tied, ranks), abs=1e-5)


def test_shards_that_live_on_the_cpu(tmp_path: Path) -> None:
    paths = {"single": str(write(tmp_path / "x", "single", True))}
    for found in run_ranks(from_files, 2, paths, True, 1, cpu_offload=True):
        assert found[0] == pytest.approx(plain(True, 2), abs=1e-5)


def bytes_read(path: str) -> dict[str, Any]:
    """What each rank reads of the files, and how much of it at once."""
    from hasten.weights.safe_file import SafeFile

    one = accelerator(mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model = one.prepare(empty(True))
    kept, lengths = SafeFile._read_at, []

    def read_at(file: SafeFile, start: int, view: memoryview) -> None:
        lengths.append(len(view))
        kept(file, start, view)

    SafeFile._read_at = read_at  # type: ignore[method-assign]
    try:
        one.load_weights(model, path, initialise=lambda module: module.reset_parameters())
    finally:
        SafeFile._read_at = kept  # type: ignore[method-assign]
    own = sum(each.to_local().numel() for each in model.parameters()) * 2 + 7 * 2
    dtypes = {each.dtype for each in model.parameters()}
    return {"read": sum(lengths), "own": own, "dtypes": dtypes, "whole": model.norm.weight.full_tensor().tolist()}


def test_a_rank_reads_no_more_than_it_holds(tmp_path: Path) -> None:
    path = write(tmp_path / "x", "sharded", True, torch.bfloat16)
    for rank in run_ranks(bytes_read, 3, str(path)):
        assert rank["read"] == rank["own"]
        assert rank["dtypes"] == {torch.float32}  # stored for training, computed in bf16
        assert rank["whole"] == [1.0] * 7


def refused(folder: str) -> list[str]:
    one = accelerator()
    model = one.prepare(empty(False))
    tensors = model_of(False).state_dict()
    cases: dict[str, Any] = {
        "missing": ({name: each for name, each in tensors.items() if name != "norm.weight"}, {}),
        "unexpected": ({**tensors, "more": torch.ones(2)}, {"initialise": Buffered.reset_parameters}),
        "shape": ({**tensors, "norm.bias": torch.ones(3)}, {}),
        "buffers": (tensors, {}),
    }
    texts = []
    for name, (held, options) in cases.items():
        path = f"{folder}/{name}-{one.process_index}.safetensors"
        save_file(held, path)
        with pytest.raises((RuntimeError, ValueError)) as caught:
            one.load_weights(model, path, **options)
        texts.append(str(caught.value).replace(path, "FILE"))
        assert all(each.is_meta for each in model.parameters())  # nothing has happened
    with pytest.raises(FileNotFoundError) as absent:
        one.load_weights(model, f"{folder}/nothing")
    return [*texts, str(absent.value).replace(folder, "")]


def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    for missing, unexpected, shape, buffers, absent in run_ranks(refused, 2, str(tmp_path)):
        assert "FILE does not fit into Buffered" in missing
        assert "not in the files: norm.weight\n" in missing
        assert "not in the model: more" in unexpected
        assert "norm.bias: [3] in the files, [7] in the model" in shape
        assert "no values for shift of Buffered" in buffers
        assert "`initialise=" in buffers
        assert absent.startswith("/nothing does not exist")


def test_a_model_that_is_not_prepared(tmp_path: Path) -> None:
    path = write(tmp_path / "x", "sharded", False)
    one = Accelerator(cpu=True)
    model = empty(False)
    one.load_weights(model, path, initialise=Buffered.reset_parameters)
    for name, tensor in model_of(False).state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert torch.equal(model.shift, torch.arange(7.0))


# ---- from the first rank ----


def from_first(tied: bool, copies: int, others: str, **settings: Any) -> Any:
    one = accelerator(copies, cpu_ram_efficient_loading=True, **settings)
    model = model_of(tied) if one.is_main_process else empty(tied) if others == "meta" else model_of(tied, seed=5)
    if others == "other buffers" and not one.is_main_process:
        model.shift += 1
        model.scale += 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = one.prepare(model, optimizer)
    assert (model.head.weight is model.embedding.weight) == tied
    return trained(one, model, optimizer)


@pytest.mark.parametrize(
    ("ranks", "tied", "copies", "others"),
    [
        (2, False, 1, "meta"),
        (3, True, 1, "meta"),
        (4, True, 2, "meta"),
        (2, True, 1, "other values"),
        (2, False, 1, "other buffers"),
    ],
)
def test_every_rank_gets_the_values_of_the_first(ranks: int, tied: bool, copies: int, others: str) -> None:
    for losses in run_ranks(from_first, ranks, tied, copies, others):
        assert losses == pytest.approx(plain(tied, ranks), abs=1e-5)


def test_values_of_the_first_with_shards_on_the_cpu() -> None:
    for losses in run_ranks(from_first, 2, True, 1, "meta", cpu_offload=True, activation_checkpointing=True):
        assert losses == pytest.approx(plain(True, 2), abs=1e-5)


def other_model(kind: str) -> None:
    one = accelerator(cpu_ram_efficient_loading=True)
    if kind == "empty":
        model: nn.Module = empty(False)
    else:
        model = Buffered(False, width=7 if one.is_main_process else 6)
    one.prepare(model)


@pytest.mark.parametrize(
    ("kind", "text"), [("empty", "Load the model's weights on rank 0"), ("other", "rank 1 has another model")]
)
def test_models_that_can_not_be_spread(kind: str, text: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(other_model, 2, kind)
    assert len(caught.value.tracebacks) == 2
    assert all(text in each for each in caught.value.tracebacks.values())


def synchronised(first_is_empty: bool) -> tuple[list[float], list[float]]:
    one = accelerator(sync_module_states=True)
    model = empty(False) if first_is_empty and one.is_main_process else model_of(False, seed=one.process_index)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = one.prepare(model, optimizer)
    return trained(one, model, optimizer)


def test_modules_are_synchronised() -> None:
    for losses in run_ranks(synchronised, 2, False):
        assert losses == pytest.approx(plain(False, 2), abs=1e-5)


def unlike(kind: str) -> list[str]:
    rank = Accelerator(cpu=True).process_index
    one = accelerator()
    model: nn.Module = Buffered(False, width=6 + rank) if kind == "shape" else nn.ModuleDict({f"m{rank}": Block(3)})
    with pytest.raises(ValueError) as caught:
        one.prepare(model)
    return [str(caught.value)]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("shape", "share it, but embedding.weight is [10, 6] on rank 0 and [10, 7] on rank 1."),
        ("name", "m0.norm.weight is [3] on rank 0 and not there on rank 1."),
    ],
)
def test_models_that_are_not_alike_are_refused(kind: str, text: str) -> None:
    for (found,) in run_ranks(unlike, 2, kind):
        assert text in found


def loaded_on_one(path: str) -> str:
    one = accelerator()
    model = one.prepare(empty(False))
    rank = one.process_index
    with pytest.raises((RuntimeError, FileNotFoundError)) as caught:
        one.load_weights(model, path if rank else "/nothing", initialise=Buffered.reset_parameters)
    return str(caught.value)


def test_a_failure_to_load_is_an_error_of_all(tmp_path: Path) -> None:
    path = write(tmp_path / "x", "sharded", False)
    first, second = run_ranks(loaded_on_one, 2, str(path))
    assert first.startswith("/nothing does not exist")
    assert second.startswith("load_weights failed: rank 0 failed with FileNotFoundError: /nothing does not exist")


# ---- from a function ----


def initialised(tied: bool) -> Any:
    wholes: list[int] = []

    def set_values(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for name, parameter in module.named_parameters(recurse=False):
                parameter.fill_(0.1 if name == "weight" else 0.0)
        if isinstance(module, Buffered):
            module.scale.fill_(2.0)
            module.reset_parameters()
        wholes.append(sum(not isinstance(each, DTensor) and not each.is_meta for each in model.parameters()))

    one = accelerator(param_init_fn=set_values)
    model: Any = empty(tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = one.prepare(model, optimizer)
    assert (model.head.weight is model.embedding.weight) == tied
    values = {name: each.full_tensor().unique().tolist() for name, each in model.named_parameters()}
    return values, wholes, trained(one, model, optimizer)[-1] < 3


@pytest.mark.parametrize("tied", [False, True])
def test_values_are_made_unit_by_unit(tied: bool) -> None:
    for values, wholes, trains in run_ranks(initialised, 2, tied):
        for name, found in values.items():
            assert found == pytest.approx([0.1 if name.endswith("weight") else 0.0])
        assert max(wholes) == 6  # parameters of one layer
        assert trains


def left_empty() -> str:
    one = accelerator(param_init_fn=lambda module: None)
    with pytest.raises(ValueError, match="param_init_fn left") as caught:
        one.prepare(empty(False))
    return str(caught.value)


def test_a_function_that_sets_nothing() -> None:
    assert (
        run_ranks(left_empty, 2) == ["param_init_fn left weight, bias of a LayerNorm on the meta device. " + HINT] * 2
    )


HINT = (
    "It is called with each module and must give values to its own tensors, e.g. "
    '`module.to_empty(device="cpu", recurse=False)` and then `module.reset_parameters()`.'
)


# ---- from each its own ----


def warnings_of(seeds: list[int]) -> list[str]:
    texts: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    logger = logging.getLogger("hasten.parallel.shard")
    logger.addHandler(heard := Heard())
    one = accelerator()
    one.prepare(model_of(False, seeds[one.process_index]))
    logger.removeHandler(heard)
    return texts


def test_different_values_are_told_once() -> None:
    assert run_ranks(warnings_of, 2, [0, 0]) == [[], []]
    told, silent = run_ranks(warnings_of, 2, [0, 1])
    assert silent == []
    assert "different values for embedding.weight of Buffered" in told[0]


# ---- on one process ----


def test_on_one_process_the_same_script_runs(tmp_path: Path) -> None:
    path = write(tmp_path / "x", "single", True)
    one = accelerator()
    model = empty(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = one.prepare(model, optimizer)
    with pytest.raises(RuntimeError, match=r"are on the meta device and have no values. After `prepare` load them"):
        model(tokens(0, 0))
    one.load_weights(model, path, initialise=lambda module: module.reset_parameters())
    assert model.head.weight is model.embedding.weight
    assert trained(one, model, optimizer) == pytest.approx(plain(True, 1), abs=1e-6)


def replicated() -> str:
    with pytest.raises(ValueError) as caught:
        Accelerator(cpu=True).prepare(empty(False))
    return str(caught.value)


def test_nothing_can_not_be_replicated() -> None:
    assert run_ranks(replicated, 2)[1] == (
        "Rank 1: Buffered is on the meta device, so there is nothing to replicate. Load it before it is prepared: "
        "`accelerator.load_weights(model, path)`."
    )


def fill(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.fill_(0.5)


def test_on_one_process_a_function_makes_values_too() -> None:
    plugin = FullyShardedDataParallelPlugin(
        transformer_cls_names_to_wrap=["Block"], param_init_fn=fill, activation_checkpointing=True
    )
    one = Accelerator(cpu=True, fsdp_plugin=plugin)
    with torch.device("meta"):
        model = Language()
    model = one.prepare(model)
    assert all(bool((each == 0.5).all()) for each in model.parameters())
    assert one.explain(model).steps == ("activation checkpointing",)


def saved_without_values(call: str, folder: str) -> str:
    one = accelerator()
    model = one.prepare(empty(False))
    calls = {
        "get_state_dict": lambda: one.get_state_dict(model),
        "save_model": lambda: one.save_model(model, folder),
        "save_state": lambda: one.save_state(folder),
    }
    with pytest.raises(RuntimeError) as caught:
        calls[call]()
    return str(caught.value)


@pytest.mark.parametrize("call", ["get_state_dict", "save_model", "save_state"])
def test_what_has_no_values_is_not_saved(call: str, tmp_path: Path) -> None:
    for text in run_ranks(saved_without_values, 2, call, str(tmp_path)):
        assert "are on the meta device and have no values" in text
        assert "accelerator.load_weights(model, path)" in text
    assert list(tmp_path.iterdir()) == []

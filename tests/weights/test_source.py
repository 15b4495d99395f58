import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hasten.weights.source import Source, find_weights

WHOLE = torch.arange(12.0).reshape(4, 3)


def safe(path: Path, **tensors: torch.Tensor) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path


def cached(root: Path, main: bool = True, revisions: tuple[str, ...] = ("abc",)) -> Path:
    """A folder as the Hugging Face cache has it."""
    model = root / "models--me--small"
    for revision in revisions:
        safe(model / "snapshots" / revision / "model.safetensors", a=WHOLE)
    if main:
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text("abc\n")
    return model


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_file_is_read_in_parts(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"w{suffix}"
    if suffix == ".bin":
        torch.save({"a": WHOLE, "b": torch.tensor(2)}, path)
    else:
        safe(path, a=WHOLE, b=torch.tensor(2))
    with Source(path) as source:
        assert sorted(source) == ["a", "b"]
        assert ("a" in source, "c" in source) == (True, False)
        assert (source.shape("a"), source.dtype("b")) == ((4, 3), torch.int64)
        part, converted, number = torch.zeros(2, 2), torch.zeros(1, 3, dtype=torch.bfloat16), torch.tensor(0)
        source.read_into("a", part, (1, 1))
        source.read_into("a", converted, (3, 0))
        source.read_into("b", number, ())
    assert part.tolist() == [[4, 5], [7, 8]]
    assert converted.tolist() == [[9, 10, 11]]
    assert number.item() == 2


def test_what_is_found_in_a_folder(tmp_path: Path) -> None:
    other = safe(tmp_path / "other.safetensors", a=WHOLE)
    assert find_weights(tmp_path) == other
    (tmp_path / "config.json").write_text("{}")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "other.safetensors"}}))
    assert find_weights(tmp_path) == index
    with Source(tmp_path) as source:
        assert list(source) == ["a"]
        assert source.shape("a") == (4, 3)
    usual = safe(tmp_path / "model.safetensors", b=WHOLE)
    assert find_weights(tmp_path) == usual


def test_folders_of_the_cache(tmp_path: Path) -> None:
    model = cached(tmp_path / "1", revisions=("abc", "def"))
    assert find_weights(model) == model / "snapshots" / "abc" / "model.safetensors"
    single = cached(tmp_path / "2", main=False)
    assert find_weights(single) == single / "snapshots" / "abc" / "model.safetensors"
    with pytest.raises(FileNotFoundError, match=r"holds 2 revisions.*: abc, def"):
        find_weights(cached(tmp_path / "3", main=False, revisions=("abc", "def")))


def test_names_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    errors = pytest.importorskip("huggingface_hub.errors")
    model = cached(tmp_path)
    found = {"me/small": str(model / "snapshots" / "abc")}

    def snapshot(name: str, local_files_only: bool) -> str:
        assert local_files_only
        if name not in found:
            raise errors.LocalEntryNotFoundError("not there")
        return found[name]

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    assert find_weights("me/small") == model / "snapshots" / "abc" / "model.safetensors"
    with pytest.raises(FileNotFoundError, match="Download it first: `hf download me/large`"):
        find_weights("me/large")


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing does not exist; give a folder"):
        find_weights(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"has no weights: .* It has: config.json"):
        find_weights(tmp_path)
    for name in ("x.safetensors", "y.safetensors"):
        safe(tmp_path / name, a=WHOLE)
    with pytest.raises(
        FileNotFoundError, match=r"several files of weights and no index .* x.safetensors, y.safetensors"
    ):
        find_weights(tmp_path)


def test_damaged_indices_and_files(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(RuntimeError, match="is not an index of weights: it has no `weight_map`"):
        Source(index)
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors", "b": "x.safetensors"}}))
    safe(tmp_path / "x.safetensors", c=WHOLE)
    with Source(index) as source:
        with pytest.raises(FileNotFoundError, match=r"gone.safetensors does not exist, but .*index.json names it"):
            source.shape("a")
        with pytest.raises(RuntimeError, match=r"says that .*x.safetensors holds 'b', but it does not"):
            source.shape("b")
    torch.save([1, 2], tmp_path / "list.bin")
    with Source(tmp_path / "list.bin") as source, pytest.raises(RuntimeError, match="does not hold tensors by name"):
        list(source)

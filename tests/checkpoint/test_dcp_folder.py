import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from hasten.checkpoint import dcp
from hasten.checkpoint.dcp_folder import Folder, is_folder
from hasten.weights.write import FolderWriter
from hasten.world import process
from tests.checkpoint.test_dcp import write_alone
from tests.ranks import run_ranks


def test_what_is_in_a_folder(tmp_path):
    write_alone(tmp_path)
    folder = Folder(tmp_path / "shards")
    skeleton = folder.skeleton()
    assert skeleton["more"] == [{"rate": 0.5}, {"betas": (1, 2)}]
    assert {name: (tuple(form.shape), form.dtype, form.is_meta) for name, form in skeleton["model"].items()} == {
        "a.b": ((2, 3), torch.float32, True),
        "n": ((), torch.int64, True),
    }
    target = torch.zeros(2, 3)
    folder.fill({folder.keys()["model", "a.b"]: target})
    assert torch.equal(target, torch.arange(6.0).reshape(2, 3))
    assert is_folder(tmp_path / "shards")
    assert not is_folder(tmp_path)


class Evil:
    def __reduce__(self) -> Any:
        return print, ("code runs",)


def test_metadata_runs_no_code(tmp_path, capsys):
    write_alone(tmp_path)
    (tmp_path / "shards/.metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(RuntimeError, match=r"builtins\.print"):
        Folder(tmp_path / "shards")
    assert capsys.readouterr().out == ""
    (tmp_path / "shards/.metadata").write_bytes(b"\x80")
    with pytest.raises(RuntimeError, match="damaged"):
        Folder(tmp_path / "shards")


def test_values_run_no_code(tmp_path):
    with FolderWriter(tmp_path) as writer:
        dcp.write(writer, "shards", {"model": {"evil": Evil()}}, {}, None)
    with pytest.raises(pickle.UnpicklingError):
        Folder(tmp_path / "shards").skeleton()


WHOLE = torch.arange(7 * 6 * 2.0).reshape(7, 6, 2)


def moved(folder: str, old: Placement, new: Placement) -> tuple[bool, int]:
    """Save divided in one way and load in another; whether it is the same, and how many parts were read with a copy."""
    world = process.start(cpu=True)
    mesh = init_device_mesh("cpu", (world.size,))
    state: dict[str, Any] = {
        "x": distribute_tensor(WHOLE, mesh, [old]),
        "half": distribute_tensor(WHOLE.bfloat16(), mesh, [old]),
    }
    with FolderWriter(Path(folder)) as writer:
        dcp.write(writer, "shards", state, {}, world)
    copied = 0
    read_data = FileSystemReader.read_data

    def counted(self: Any, plan: Any, planner: Any) -> Any:
        nonlocal copied
        copied += len(plan.items)
        return read_data(self, plan, planner)

    FileSystemReader.read_data = counted  # type: ignore[method-assign]
    try:
        targets = {
            name: distribute_tensor(torch.zeros_like(WHOLE, dtype=each.dtype), mesh, [new])
            for name, each in state.items()
        }
        Folder(Path(folder, "shards")).fill(dict(targets))
        same = all(torch.equal(each.full_tensor(), WHOLE.to(each.dtype)) for each in targets.values())
        other = torch.zeros(7, 6, 2, dtype=torch.float64)
        Folder(Path(folder, "shards")).fill({"half": other})  # another type: torch converts
        return same and torch.equal(other, WHOLE.double()), copied
    finally:
        FileSystemReader.read_data = read_data  # type: ignore[method-assign]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("old", "new", "straight"),
    [
        (Shard(0), Shard(0), True),
        (Shard(0), Replicate(), True),
        (Replicate(), Shard(0), True),
        (Shard(1), Shard(0), False),
        (Shard(0), Shard(1), False),
        (Shard(2), Shard(2), None),
    ],
)
def test_any_division_loads_as_any_other(tmp_path, ranks, old, new, straight):
    found = run_ranks(moved, ranks, str(tmp_path), old, new)
    assert all(same for same, _ in found)
    conversions = ranks if old != Replicate() else 1
    if straight is not None:
        assert all(copied <= conversions for _, copied in found) == straight, "whole rows go straight into memory"


def test_files_that_end_too_early(tmp_path):
    write_alone(tmp_path)
    file = tmp_path / "shards/__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises((RuntimeError, ValueError, EOFError)):
        Folder(tmp_path / "shards").fill({"model.a.b": torch.zeros(2, 3)})

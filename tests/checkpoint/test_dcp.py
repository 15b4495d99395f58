from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hasten.checkpoint import dcp
from hasten.checkpoint.dcp_folder import Folder
from hasten.weights.write import FolderWriter
from hasten.world import process
from hasten.world.process import World
from tests.ranks import run_ranks


def state_of(value: float) -> dict[str, Any]:
    return {
        "model": {"a.b": torch.arange(6.0).reshape(2, 3) + value, "n": torch.tensor(3)},
        "more": [{"rate": 0.5}, {"betas": (1, 2)}],
    }


def write_alone(folder: Path, aliases: Any = None) -> None:
    with FolderWriter(folder) as writer:
        dcp.write(writer, "shards", state_of(0.0), aliases or {}, None)
    assert set(writer.written) == {"shards/__0_0.distcp"}


def test_one_process_alone_writes_what_torch_reads(tmp_path):
    write_alone(tmp_path)
    target = {"model": {"a.b": torch.zeros(2, 3), "n": torch.tensor(0)}, "more": [{"rate": 0.0}, {"betas": None}]}
    with pytest.warns(UserWarning, match="single process"):
        torch_checkpoint.load(target, checkpoint_id=tmp_path / "shards", no_dist=True)
    assert torch.equal(target["model"]["a.b"], state_of(0.0)["model"]["a.b"])
    assert target["model"]["n"] == 3
    assert target["more"] == state_of(0.0)["more"]


def test_other_names_are_listed_and_written_once(tmp_path):
    write_alone(tmp_path, {("model", "tied"): ("model", "a.b")})
    target = {"model": {"tied": torch.zeros(2, 3)}}
    with pytest.warns(UserWarning, match="single process"):
        torch_checkpoint.load(target, checkpoint_id=tmp_path / "shards", no_dist=True)
    assert torch.equal(target["model"]["tied"], torch.arange(6.0).reshape(2, 3))
    places = Folder(tmp_path / "shards").metadata.storage_data
    at = {index.fqn: (info.relative_path, info.offset) for index, info in places.items()}
    assert at["model.tied"] == at["model.a.b"]


def divided(folder: str, axes: tuple[int, ...]) -> tuple[list[int], int, list[bool]]:
    world = process.start(cpu=True)
    mesh = init_device_mesh("cpu", axes, mesh_dim_names=("copies", "shards")[-len(axes) :])
    placements = [Replicate(), Shard(0)][-len(axes) :]
    whole = torch.arange(4 * 64 * 1000.0).reshape(4, 64, 1000)
    tensors = {str(index): distribute_tensor(whole[index], mesh, placements) for index in range(4)}
    plans = []
    for number in range(3):
        if number == 2:
            tensors["new"] = distribute_tensor(torch.ones(5), mesh, placements)
        with FolderWriter(Path(folder, str(number))) as writer:
            writer.folder.mkdir(exist_ok=True)
            dcp.write(writer, "shards", {"model": tensors, "plain": torch.ones(3)}, {}, world)
        plans.append(world.attached["sharded saves"]["shards"].final)
    read = distribute_tensor(torch.zeros(64, 1000), mesh, placements)
    Folder(Path(folder, "2", "shards")).fill({"model.3": read})
    assert isinstance(read, DTensor)
    assert torch.equal(read.full_tensor(), whole[3])
    sizes = [path.stat().st_size for path in Path(folder, "0", "shards").glob("*.distcp")]
    return sizes, whole.nbytes, [plans[0].items is plans[1].items, plans[1].items is plans[2].items]


@pytest.mark.parametrize(("ranks", "axes"), [(2, (2,)), (4, (4,)), (4, (2, 2))])
def test_each_process_writes_its_share_and_the_plan_is_kept(tmp_path, ranks, axes):
    sizes, total, kept = run_ranks(divided, ranks, str(tmp_path), axes)[0]
    assert max(sizes) <= total / ranks + 8000
    assert len(sizes) == ranks
    assert kept == [True, False]


def late(folder: str) -> str:
    world: World = process.start(cpu=True)
    state = {"model": {"x": torch.ones(3), "y": _Unsavable() if world.rank else 1}}
    with pytest.raises(Exception, match="can not be planned") as error, FolderWriter(Path(folder)) as writer:
        dcp.write(writer, "shards", state, {}, world)
    return type(error.value).__name__


class _Unsavable(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        raise ValueError("can not be planned")


def test_one_that_can_not_plan_keeps_nobody_waiting(tmp_path):
    assert run_ranks(late, 2, str(tmp_path)) == ["RuntimeError", "ValueError"]

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hasten.checkpoint import own_file
from hasten.checkpoint.own_file import OwnFile, pack, topology_of
from hasten.checkpoint.sidecar import Topology
from hasten.world import process
from tests.ranks import run_ranks

WHOLE = torch.arange(10.0).reshape(5, 2)


def written(folder: str) -> list[object]:
    """What the file of this process holds, and that it reads back, also where the same tensor has two names."""
    world = process.start(cpu=True)
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp",))
    divided = distribute_tensor(WHOLE, mesh, [Shard(0)])
    state = {
        "a": divided,
        "tied": divided,
        "b": torch.tensor(3),
        "more": [{"c": 1.5}],
        "short": distribute_tensor(torch.ones(1), mesh, [Shard(0)]),
    }
    path = Path(folder) / f"{world.rank}.bin"
    torch.save(pack(state), path)
    file = OwnFile(path)
    assert file.at(("a",)).data_ptr() == file.at(("tied",)).data_ptr()
    skeleton = file.skeleton()
    assert (skeleton["a"].shape, skeleton["a"].is_meta, skeleton["more"]) == ((5, 2), True, [{"c": 1.5}])
    target = distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)])
    number = torch.tensor(0)
    file.read({("a",): target, ("b",): number})
    assert torch.equal(target.full_tensor(), WHOLE)
    assert number == 3
    for other in (distribute_tensor(WHOLE, mesh, [Replicate()]), distribute_tensor(WHOLE, mesh, [Shard(1)]), WHOLE):
        with pytest.raises(ValueError, match="holds a as another division"):
            file.read({("a",): other})
    model = nn.Linear(2, 2)
    assert topology_of([model]) == Topology()
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(1, 2), mesh, [Shard(0)]))
    assert topology_of([model, model]) == Topology(f"dp {world.size}", str(world.rank))
    return [tuple(file.at(("a",)).shape), file.shards["a",].start, file.shards["short",].shape]


def test_parts_and_where_they_belong(tmp_path):
    found = run_ranks(written, 2, str(tmp_path))
    assert found == [[(3, 2), (0, 0), (1,)], [(2, 2), (3, 0), (1,)]]
    whole = torch.full((5, 2), -1.0)
    counts = [OwnFile(tmp_path / f"{rank}.bin").read_into_whole(("a",), whole) for rank in range(2)]
    assert torch.equal(whole, WHOLE)
    assert counts == [6, 4]
    number = torch.tensor(0)
    assert OwnFile(tmp_path / "0.bin").read_into_whole(("b",), number) == 1
    assert number == 3
    assert OwnFile(tmp_path / "1.bin").read_into_whole(("short",), torch.ones(1)) == 0


def test_other_files_are_refused(tmp_path):
    torch.save({"a": 1}, tmp_path / "other.bin")
    with pytest.raises(RuntimeError, match="is not the file of one process"):
        OwnFile(tmp_path / "other.bin")
    with pytest.raises(FileNotFoundError):
        OwnFile(tmp_path / "none.bin")
    torch.save({own_file._STATE: {"a": torch.ones(4)}, own_file._SHARDS: {}}, tmp_path / "cut.bin")
    (tmp_path / "cut.bin").write_bytes((tmp_path / "cut.bin").read_bytes()[:-30])
    with pytest.raises(RuntimeError, match="damaged"):
        OwnFile(tmp_path / "cut.bin")

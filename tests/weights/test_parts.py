from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hasten.weights.parts import copy_own_part, own_part
from tests.ranks import run_ranks

WHOLE = torch.arange(35.0).reshape(7, 5)


def test_a_plain_tensor_is_its_own_part() -> None:
    tensor = torch.zeros(7, 5, dtype=torch.float64)
    local, starts = own_part(tensor)
    assert (local.data_ptr(), starts) == (tensor.data_ptr(), (0, 0))
    copy_own_part(tensor, WHOLE)
    assert torch.equal(tensor.float(), WHOLE)


def parts() -> list[Any]:
    found = []
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    spread: list[Any] = [(line, [Shard(0)]), (line, [Shard(1)]), (square, [Replicate(), Shard(0)])]
    spread += [(square, [Shard(0), Shard(1)]), (square, [Shard(0), Shard(0)])]
    for mesh, placements in spread:
        tensor = distribute_tensor(torch.zeros(7, 5), mesh, placements)
        copy_own_part(tensor, WHOLE)
        found.append((own_part(tensor)[1], torch.equal(tensor.full_tensor(), WHOLE)))
    return found


def test_every_way_of_dividing() -> None:
    results = run_ranks(parts, 4)
    assert all(right for result in results for _, right in result)
    assert [[starts for starts, _ in result][:3] for result in results] == [
        [(0, 0), (0, 0), (0, 0)],
        [(2, 0), (0, 2), (4, 0)],
        [(4, 0), (0, 4), (0, 0)],
        [(6, 0), (0, 5), (4, 0)],
    ]

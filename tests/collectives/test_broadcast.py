from typing import Any

import pytest
import torch

from hasten.collectives.broadcast import broadcast
from tests.collectives.data import Counted, Pair, leaves, message, start, tree
from tests.ranks import run_ranks


def test_a_process_alone_gets_its_argument_back():
    data = {"a": "text"}
    assert broadcast(data) is data


def broadcast_tree(source: int, rows: int) -> bool:
    world = start()
    data = tree(world.rank, rows)
    before = leaves(data)
    result = broadcast(data, from_process=source)
    assert result is not data
    assert all(one is other for one, other in zip(leaves(result), before, strict=True))
    return all(torch.equal(one, other) for one, other in zip(before, leaves(tree(source, rows)), strict=True))


@pytest.mark.parametrize(("source", "rows"), [(0, 32), (2, 32), (1, 320)])
def test_tensors_are_overwritten_in_place(source: int, rows: int):
    assert all(run_ranks(broadcast_tree, 3, source, rows))


def broadcast_views() -> list[Any]:
    rank = start().rank
    grid = (torch.arange(6) * (rank + 1)).view(2, 3)
    parameter = torch.nn.Parameter(torch.tensor([1.0 + rank]))
    large = torch.full((600, 1000), float(rank))
    whole = torch.full((2**19,), float(rank))
    empty, flag, number = torch.zeros(0, 2), torch.tensor(rank == 1), torch.tensor(1j * rank)
    data = Pair(grid.t(), [parameter, large.t(), whole, empty, flag, number])
    broadcast(data, 1)
    with torch.inference_mode():
        inside = torch.tensor([rank])
        broadcast(inside, 1)
    results = [grid, parameter.detach(), flag, number]
    return [*[each.tolist() for each in results], bool((large == 1).all()), bool((whole == 1).all()), inside.tolist()]


def test_views_parameters_and_large_tensors():
    expected = [[[0, 2, 4], [6, 8, 10]], [2.0], True, 1j, True, True, [1]]
    assert run_ranks(broadcast_views, 2) == [expected] * 2


def in_another_order() -> list[int]:
    rank = start().rank
    items = {"a": torch.tensor(rank), "b": torch.tensor(10 + rank)}
    result = broadcast(items if rank == 0 else dict(reversed(items.items())))
    return [int(result["a"]), int(result["b"])]


def test_dictionaries_are_matched_by_key_not_by_order():
    assert run_ranks(in_another_order, 2) == [[0, 10]] * 2


def count_collectives() -> list[Any]:
    rank = start().rank
    found = []
    for data in (
        tree(rank),
        tree(rank, rows=320),
        torch.zeros(2**18),
        [torch.zeros(2**18), torch.zeros(3), torch.zeros(2**18)],
    ):
        with Counted() as counted:
            broadcast(data)
        found.append(len(counted.calls))
    return found


def test_number_of_collectives():
    assert run_ranks(count_collectives, 2) == [[1, 2, 2, 4]] * 2


def disagree() -> list[str]:
    rank = start().rank
    found = [
        message(lambda: broadcast(torch.zeros(2 + rank))),
        message(lambda: broadcast(torch.zeros(2), from_process=rank)),
    ]
    try:
        broadcast(torch.zeros(2), from_process=2)
    except ValueError as error:
        found.append(str(error))
    return found


def test_disagreement_raises_the_same_error_everywhere():
    first, second = run_ranks(disagree, 2)
    assert first == second
    assert "`broadcast` needs the same structure, dtypes and shapes" in first[0]
    assert "rank 1: broadcast(from_process=1)" in first[1]
    assert first[2] == "from_process=2: it must be a rank from 0 to 1."

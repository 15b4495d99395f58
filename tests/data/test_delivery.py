from typing import Any

import numpy
import pytest
import torch

from hasten.data.delivery import Delivery, Package, unpack
from hasten.world.process import start
from tests.ranks import RankError, run_ranks


def packed(item: Any) -> Any:
    package = Package(item)
    buffer = torch.full((package.nbytes + 7,), 255, dtype=torch.uint8)
    package.write(buffer)
    return unpack(buffer)


TENSORS = [
    torch.arange(6.0).view(2, 3),
    torch.arange(6).view(2, 3).t(),
    torch.tensor(True),
    torch.empty(0, 3, dtype=torch.float64),
    torch.tensor([1 + 2j, 3j]).conj(),
    torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
    torch.arange(10, dtype=torch.int8)[::3],
]


@pytest.mark.parametrize("tensor", TENSORS)
def test_tensors_arrive_as_they_were(tensor: torch.Tensor):
    result = packed({"x": [tensor, "text"], "y": tensor})
    for found in (result["x"][0], result["y"]):
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor.resolve_conj())
    assert result["x"][1] == "text"


def test_other_things_arrive_as_they_were():
    item = {"none": None, "words": ["a", "b"], "array": numpy.arange(3), "set": {1}, "bytes": b"\x00"}
    result = packed(item)
    assert result.pop("array").tolist() == [0, 1, 2]
    assert result == {"none": None, "words": ["a", "b"], "set": {1}, "bytes": b"\x00"}


def test_tensors_that_are_more_than_values_are_pickled():
    parameter = torch.nn.Parameter(torch.ones(2))
    sparse = torch.eye(2).to_sparse()
    result = packed([parameter, sparse, torch.ones(2, requires_grad=True)])
    assert type(result[0]) is torch.nn.Parameter
    assert result[1].layout is torch.sparse_coo
    assert result[2].requires_grad


def exchange() -> list[Any]:
    world = start(cpu=True)
    delivery = Delivery(world)
    if world.rank:
        received = []
        while (item := delivery.receive()) is not None:
            received.append(item)
        return received
    delivery.send([Package(("short", torch.ones(1))), Package(("long", torch.ones(1000)))], 5)
    delivery.send([Package(rank) for rank in (1, 2)], 0)
    delivery.send_end()
    return []


def test_each_rank_gets_its_own():
    _, one, two = run_ranks(exchange, 3)
    assert [(one[0][0][0], len(one[0][0][1]), one[0][1]), one[1]] == [("short", 1, 5), (1, 0)]
    assert [(two[0][0][0], len(two[0][0][1]), two[0][1]), two[1]] == [("long", 1000, 5), (2, 0)]


class Local(Exception):
    def __init__(self, one: int, two: int) -> None:  # can be pickled, but not unpickled
        super().__init__("only one")


def fail(kind: str) -> Any:
    world = start(cpu=True)
    delivery = Delivery(world)
    if world.rank:
        return delivery.receive()
    delivery.send_error(KeyError("lost") if kind == "plain" else Local(1, 2))
    return None


@pytest.mark.parametrize(("kind", "text"), [("plain", "KeyError: 'lost'"), ("local", "RuntimeError: Local: only one")])
def test_errors_are_raised_on_the_other_ranks(kind: str, text: str):
    with pytest.raises(RankError) as caught:
        run_ranks(fail, 2, kind)
    assert text in caught.value.tracebacks[1]
    assert 0 not in caught.value.tracebacks

from typing import Any

import pytest
import torch
from benchmarks.counts import Operations

from hasten.data.delivery import Delivery
from hasten.data.package import Package
from hasten.world.process import start
from tests.ranks import RankError, run_ranks


def exchange() -> list[Any]:
    world = start(cpu=True)
    delivery = Delivery(world)
    if world.rank:
        received = []
        while (item := delivery.receive()) is not None:
            received.append(item)
        return received
    delivery.send(delivery.message([Package(("short", torch.ones(1))), Package(("long", torch.ones(1000)))], 5))
    delivery.send(delivery.message([Package(rank) for rank in (1, 2)], 0))
    delivery.send_end()
    return []


def test_each_rank_gets_its_own():
    _, one, two = run_ranks(exchange, 3)
    assert [(one[0][0][0], len(one[0][0][1]), one[0][1]), one[1]] == [("short", 1, 5), (1, 0)]
    assert [(two[0][0][0], len(two[0][0][1]), two[0][1]), two[1]] == [("long", 1000, 5), (2, 0)]


def scatters(sizes: list[int]) -> list[int]:
    """How many collectives each delivery of so many bytes takes, and the end."""
    world = start(cpu=True)
    delivery, counts = Delivery(world), []
    for size in [*sizes, None]:
        with Operations() as operations:
            if world.rank:
                received = delivery.receive()
                assert received is None if size is None else len(received[0]) == size
            elif size is None:
                delivery.send_end()
            else:
                package = Package(torch.zeros(size, dtype=torch.uint8))
                delivery.send(delivery.message([package] * (world.size - 1), 0))
        counts.append(operations.collectives)
    return counts


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([100_000] * 3, [2, 1, 1, 1]),
        ([100, 3_000, 0], [1, 1, 1, 1]),
        ([50_000, 60_000, 20_000, 59_000], [2, 2, 1, 1, 1]),  # about the same size
        ([100_000, *[10] * 9, 80_000], [2, *[1] * 9, 2, 1]),  # the large one is forgotten
    ],
)
def test_a_delivery_is_one_scatter_if_its_size_is_expected(sizes: list[int], expected: list[int]):
    assert run_ranks(scatters, 3, sizes) == [expected] * 3


def memory(kept: bool) -> int:
    """How many places ten batches had."""
    world = start(cpu=True)
    delivery, batches, places = Delivery(world), [], set()
    for number in range(10):
        if not world.rank:
            delivery.send(delivery.message([Package({"x": torch.full((5000,), number)})], 0))
            continue
        batches.append(delivery.receive()[0]["x"][1:])
        places.add(batches[-1].data_ptr())
        if not kept:
            batches.clear()
    assert [batch.unique().tolist() for batch in batches] == [[number] for number in range(len(batches))]
    return len(places)


def test_memory_is_used_again_when_nothing_in_it_is_alive():
    assert run_ranks(memory, 2, True)[1] == 10
    assert run_ranks(memory, 2, False)[1] == 1


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

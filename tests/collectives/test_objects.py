from typing import Any

import pytest
import torch

from hasten.collectives.objects import broadcast_object_list, gather_object
from tests.collectives.data import Counted, message, start
from tests.ranks import run_ranks


def test_a_process_alone_gets_its_argument_back():
    for data in ([1, 2], {"a": 1}, "text", 5):
        assert gather_object(data) is data
        assert broadcast_object_list(data) is data


def gather_many() -> list[Any]:
    rank = start().rank
    given = [[rank, "x"], (rank,), {rank}, [[rank], [rank, rank]], torch.tensor([rank, rank]), iter_free(rank)]
    single = [{"a": rank}, "text", b"bytes", rank, None, torch.tensor(rank)]
    return [gather_object(each) for each in [*given, *single]]


def iter_free(rank: int) -> list[Any]:
    return [{"boxes": [0] * rank}]


def test_items_are_joined_and_what_is_no_list_counts_as_one():
    for result in run_ranks(gather_many, 2):
        assert result[:4] == [[0, "x", 1, "x"], [0, 1], [0, 1], [[0], [0, 0], [1], [1, 1]]]
        assert result[4:] == [
            [0, 0, 1, 1],
            [{"boxes": []}, {"boxes": [0]}],
            [{"a": 0}, {"a": 1}],
            ["text", "text"],
            [b"bytes", b"bytes"],
            [0, 1],
            [None, None],
            [0, 1],
        ]


def gather_large() -> list[Any]:
    rank = start().rank
    found = []
    for length in (100, 20_000, 1_000_000 if rank == 2 else 100):
        with Counted() as counted:
            result = gather_object([f"{rank}" * length])
        found.append(([text[0] for text in result], [len(text) for text in result], counted.calls, sum(counted.bytes)))
    return found


def test_long_pickles_take_another_collective_and_one_long_one_does_not_fill_everyones_memory():
    for small, middle, skewed in run_ranks(gather_large, 4):
        assert small[:2] == (["0", "1", "2", "3"], [100] * 4)
        assert middle[:2] == (["0", "1", "2", "3"], [20_000] * 4)
        assert skewed[:2] == (["0", "1", "2", "3"], [100, 100, 1_000_000, 100])
        assert [len(found[2]) for found in (small, middle, skewed)] == [1, 2, 3]
        assert skewed[2][2] == "broadcast"
        assert skewed[3] < 1_050_000


def broadcast_lists() -> list[Any]:
    rank = start().rank
    short, long = [rank, {"x": rank}], ["x" * (rank * 30_000), None]
    kept = short[1]
    result = broadcast_object_list(short, from_process=1)
    assert result is short
    assert (short[1] is kept) == (rank == 1)
    broadcast_object_list(long, 1)
    return [short, len(long[0])]


def test_lists_are_overwritten_in_place():
    assert run_ranks(broadcast_lists, 2) == [[[1, {"x": 1}], 30_000]] * 2


def disagree() -> list[str]:
    rank = start().rank
    found = [
        message(lambda: broadcast_object_list([1] * (1 + rank))),
        message(lambda: gather_object([lambda: 0] if rank else [1])),
    ]
    for call in (lambda: broadcast_object_list((1,)), lambda: broadcast_object_list([1], from_process=-1)):
        try:
            call()
        except (TypeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    assert gather_object([rank]) == [0, 1]
    return found


def test_errors_are_the_same_everywhere():
    first, second = run_ranks(disagree, 2)
    assert first == second
    assert "rank 0: broadcast_object_list(length=1, from_process=0)" in first[0]
    assert "`gather_object` could not run, so no process took part in it.\n  rank 1: " in first[1]
    assert "pickle" in first[1]
    assert first[2].startswith("TypeError: `broadcast_object_list` overwrites the items of a list in place")
    assert first[3] == "ValueError: from_process=-1: it must be a rank from 0 to 1."


def unpicklable_everywhere() -> str:
    start()
    with pytest.raises(Exception, match="pickle") as caught:
        gather_object([lambda: 0])
    return caught.typename


def test_an_object_that_nobody_can_pickle_raises_pickles_own_error():
    assert set(run_ranks(unpicklable_everywhere, 2)) <= {"AttributeError", "PicklingError"}

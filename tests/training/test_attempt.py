import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hasten.training.attempt import alone, together
from hasten.world import process
from tests.ranks import run_ranks

TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB"


def failing(error: Exception) -> Callable[[], Any]:
    def call() -> None:
        raise error

    return call


@pytest.mark.parametrize("attempt", [alone, together])
def test_in_one_process_memory_that_runs_out_is_told_apart(attempt: Callable[..., Any]):
    assert attempt(lambda: 3) == (3, None)
    error = torch.OutOfMemoryError(TEXT)
    assert attempt(failing(error)) == (None, error)
    with pytest.raises(KeyError):
        attempt(failing(KeyError(1)))


def attempts() -> list[tuple[Any, str]]:
    rank = process.start().rank
    found = []
    for lacking in ([], [0], [0, 1], []):
        result, error = together(failing(RuntimeError(f"{TEXT} on {rank}")) if rank in lacking else lambda: rank)
        found.append((result, str(error)))
    return found


def test_memory_that_runs_out_anywhere_runs_out_everywhere():
    first = f"{TEXT} on 0"
    told = f"rank 0 ran out of memory (RuntimeError: {first})"
    both = f"{told}; rank 1 ran out of memory (RuntimeError: {TEXT} on 1)."
    assert run_ranks(attempts, 3) == [
        [(0, "None"), (None, first), (None, first), (0, "None")],
        [(1, "None"), (None, f"{told}."), (None, f"{TEXT} on 1"), (1, "None")],
        [(2, "None"), (None, f"{told}."), (None, both), (2, "None")],
    ]


def fail(kind: str) -> tuple[str, str, str]:
    world = process.start(timeout=timedelta(seconds=1))

    def call() -> None:
        if world.rank == 0 and kind != "one":
            raise RuntimeError(TEXT)
        if world.rank == 1:
            if kind == "exchange":
                dist.all_reduce(torch.ones(1))
            time.sleep({"one": 0, "later": 0.3, "never": 4.0}[kind])
            raise KeyError("mine")

    try:
        together(call)
    except Exception as error:
        return type(error).__name__, str(error), repr(error.__cause__)
    raise AssertionError


ADVICE = (
    "Processes can reduce their batch size together only in a function that exchanges nothing: see `synchronize` of "
)


def test_an_error_of_one_process_ends_the_others_at_once():
    assert run_ranks(fail, 2, "one") == [
        ("RuntimeError", "Rank 0: rank 1 failed (KeyError: 'mine'), so the attempt failed for all.", "None"),
        ("KeyError", "'mine'", "None"),
    ]


def test_an_error_that_may_come_from_another_ones_lack_of_memory_says_so():
    lacking = repr(RuntimeError(TEXT))
    first, second = run_ranks(fail, 2, "later")
    assert (first[0], first[2]) == ("RuntimeError", lacking)
    assert first[1].startswith(
        "Rank 0: rank 1 failed (KeyError: 'mine'), so the attempt failed for all. They probably waited for this one, which ran "
        f"out of memory. {ADVICE}"
    )
    assert (second[0], second[2]) == ("RuntimeError", "KeyError('mine')")
    assert second[1].startswith(
        f"Rank 1 failed, probably because it waited for others: rank 0 ran out of memory (RuntimeError: {TEXT}). {ADVICE}"
    )


def test_the_wait_for_one_that_does_not_end_has_a_limit():
    first, _ = run_ranks(fail, 2, "never")
    assert (first[0], first[2]) == ("RuntimeError", repr(RuntimeError(TEXT)))
    assert first[1].startswith(
        "Rank 0 waited for ranks [1] for 1 s, its process group's timeout. They probably wait for this one, which ran out of "
        "memory."
    )


def test_an_exchange_inside_ends_for_all_with_the_reason():
    for _, text, _ in run_ranks(fail, 2, "exchange", fresh=True):
        assert "ran out of memory" in text
        assert ADVICE in text

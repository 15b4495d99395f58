"""Dispatch that reads ahead: the same batches as without, and nothing left behind."""

import gc
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hasten.data.loader import prepare_data_loader
from hasten.data.skip import skip_first_batches
from hasten.world.process import start
from tests.data.scenarios import FORK, Numbers, Stream, generator
from tests.data.test_resume import Augmented, DrawingStream, ShuffledStream, differences, indexed
from tests.ranks import RankError, run_ranks

READER = "hasten-read-ahead"
AHEAD = {"dispatch_batches": True, "put_on_device": True, "read_ahead": True}


def dispatched(loader: DataLoader[Any], **settings: Any) -> Any:
    start(cpu=True)
    return prepare_data_loader(loader, **{**AHEAD, **settings})


def is_reading() -> bool:
    return any(thread.name == READER for thread in threading.enumerate())


class Watched(Stream):
    """Numbers that come slowly now and then; notes in which threads they were read."""

    def __init__(self, size: int = 11) -> None:
        super().__init__(size)
        self.threads: list[str] = []
        self.is_open = False

    def __iter__(self) -> Iterator[int]:
        self.is_open = True
        try:
            for number in super().__iter__():
                if number % 4 == 3:
                    time.sleep(0.01)
                self.threads.append(threading.current_thread().name)
                yield number
        finally:
            self.is_open = False


# ---- the same batches ----


def flipped(data: Any, rows: slice, process_index: int, num_processes: int) -> Any:
    return data[rows].flip(0)


LOADERS: dict[str, tuple[Callable[[], DataLoader[Any]], dict[str, Any]]] = {
    "stream": (lambda: DataLoader(Watched(19), batch_size=2), {}),
    "short stream": (lambda: DataLoader(Watched(1), batch_size=2), {}),
    "no samples": (lambda: DataLoader(Watched(0), batch_size=2), {}),
    "drop_last": (lambda: DataLoader(Watched(19), batch_size=2, drop_last=True), {}),
    "split": (lambda: DataLoader(Watched(20), batch_size=6), {"split_batches": True}),
    "slice_fn": (lambda: DataLoader(Watched(20), batch_size=2), {"slice_fn_for_dispatch": flipped}),
    "shuffle": (lambda: DataLoader(Numbers(19), batch_size=2, shuffle=True), {}),
    "seedable": (
        lambda: DataLoader(Numbers(19), batch_size=2, shuffle=True),
        {"use_seedable_sampler": True, "data_seed": 1},
    ),
    "workers": (lambda: DataLoader(Numbers(19), batch_size=2, num_workers=2, multiprocessing_context=FORK), {}),
}


def passes(read_ahead: bool) -> dict[str, Any]:
    """Two whole passes, one that is left, and one that skips, of each loader; the loop draws, too."""
    found = {}
    for name, (build, settings) in LOADERS.items():
        torch.manual_seed(3)
        loader = dispatched(build(), **settings, read_ahead=read_ahead)
        log = []
        for each, limit in ((loader, 99), (loader, 2), (loader, 99), (skip_first_batches(loader, 1), 99)):
            for batch in itertools.islice(each, limit):
                log.append((batch.tolist(), each.end_of_dataloader, each.remainder, torch.rand(()).item()))
        found[name] = log
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_batches_are_the_same(ranks: int):
    assert run_ranks(passes, ranks, True) == run_ranks(passes, ranks, False)


def test_also_in_one_process():
    assert passes(True) == passes(False)


RESUMED = {
    "shuffle": lambda: indexed(shuffle=True),
    "stream": lambda: DataLoader(ShuffledStream(), batch_size=3),
    "reading draws": lambda: indexed(Augmented(10), shuffle=True),
    "own place": lambda: DataLoader(Placed(10), batch_size=3),
    "own generator": lambda: indexed(shuffle=True, generator=generator(1)),
}


def all_differences() -> dict[str, list[str]]:
    warnings.simplefilter("ignore")
    return {kind: differences(build, AHEAD, every=2) for kind, build in RESUMED.items()}


def test_a_resumed_run_sees_what_an_uninterrupted_one_sees():
    assert run_ranks(all_differences, 2, timeout=80) == [{kind: [] for kind in RESUMED}] * 2


# ---- where it is read ----


def where() -> list[str]:
    loader = dispatched(DataLoader(Watched(12), batch_size=2))
    list(loader)
    return ["thread" if name == READER else "loop" for name in loader.dataset.threads]


def test_from_the_third_step_on_the_thread_reads():
    assert run_ranks(where, 2) == [["loop"] * 8 + ["thread"] * 4, []]


def numbers_that_draw() -> Any:
    loader = dispatched(DataLoader(DrawingStream(), batch_size=1))
    with pytest.warns(UserWarning, match="read_ahead.*draws from the process's random generators"):
        return [is_reading() for _ in loader]


def order_with_a_generator() -> Any:
    loader = dispatched(DataLoader(Numbers(12), batch_size=1, shuffle=True, generator=generator(1)))
    with pytest.warns(UserWarning, match="generator of its own.*use_seedable_sampler"):
        return [is_reading() for _ in loader]


class Placed(Stream):
    """A stream that knows its place."""

    place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < self.size:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def stream_with_a_place() -> Any:
    loader = dispatched(DataLoader(Placed(12), batch_size=1), use_stateful_dataloader=True)
    with pytest.warns(UserWarning, match="asked for its state.*resume='order'"):
        return [is_reading() for _ in loader]


@pytest.mark.parametrize("function", [numbers_that_draw, order_with_a_generator, stream_with_a_place])
def test_what_would_make_a_difference_is_read_in_the_loop_and_said(function: Callable[[], Any]):
    start(cpu=True)
    assert not any(function())


# ---- leaving ----


def left(how: str) -> list[Any]:
    """What is open and read when the loop has been left in its third step, and after that."""
    data = Watched(400)
    loader = dispatched(DataLoader(data, batch_size=2))
    if how == "collect":
        iterator = iter(loader)
        for _ in range(4):
            next(iterator)
        running = is_reading()
        del iterator
        gc.collect()
    else:
        running = leave(loader, how)
    read = len(data.threads)
    time.sleep(0.02)
    return [running, is_reading(), data.is_open, len(data.threads) - read]


def leave(loader: Any, how: str) -> bool:
    try:
        for step, _ in enumerate(loader):
            if step == 3 and how == "break":
                return is_reading()
            if step == 3:
                raise KeyError(is_reading())
    except KeyError as error:
        return bool(error.args[0])
    return False


@pytest.mark.parametrize("how", ["break", "error", "collect"])
def test_a_loop_that_is_left_leaves_nothing(how: str):
    assert run_ranks(left, 2, how) == [[True, False, False, 0], [False, False, False, 0]]
    start(cpu=True)
    assert left(how) == [True, False, False, 0]


class Broken(Stream):
    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            if number == self.size - 1:
                raise KeyError(f"page {number}")
            yield number


def read_broken(size: int) -> None:
    seen = []
    try:
        for batch in dispatched(DataLoader(Broken(size), batch_size=1)):
            seen.append(batch.tolist())
    finally:
        assert len(seen) == max(0, (size - 1) // 3 - 1)  # the step before the broken one has not been handed out
        assert not is_reading()


@pytest.mark.parametrize("size", [1, 4, 7, 10, 13])
def test_the_readers_error_is_raised_on_every_rank(size: int):
    with pytest.raises(RankError) as caught:
        run_ranks(read_broken, 3, size)
    assert sorted(caught.value.tracebacks) == [0, 1, 2]
    assert all(f"KeyError: 'page {size - 1}'" in text for text in caught.value.tracebacks.values())

"""Dispatch to 2 ranks: batches of 1 MB over a bare scatter of the same bytes, and how much of a slow reader's time is seen."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.measure import RAW, Benchmark, Figure, Part, Wrong, find, main, take_turns

RANKS = 2
ROWS = 64
LARGE, SMALL = 1 << 20, 1 << 14  # bytes of a batch
STEPS, TURNS = 80, 15
SLOW_STEPS, SLOW_TURNS = 60, 6
BUSY_S = 5e-3  # of the slow reader for a step, and of the body

Batch = dict[str, torch.Tensor]


class Stream(IterableDataset[Batch]):
    """Whole batches, made beforehand; each is named by its number. Reading one takes `delay_s`."""

    def __init__(self, nbytes: int, steps: int, delay_s: float = 0.0) -> None:
        self.data = torch.randn(RANKS * 2, ROWS, nbytes // 4 // ROWS)
        self.steps = steps
        self.numbers = torch.arange(RANKS * steps).view(-1, 1).repeat(1, ROWS)
        self.delay_s = delay_s

    def __iter__(self) -> Iterator[Batch]:
        for index, number in enumerate(self.numbers):
            if self.delay_s:
                time.sleep(self.delay_s)
            yield {"number": number, "x": self.data[index % len(self.data)]}


def as_it_is(batch: Batch) -> Batch:
    return batch


class Bare:
    """The scatter by hand: from buffers into a buffer, all of which are there."""

    def __init__(self, nbytes: int) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.parts = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(RANKS)]

    def epoch(self) -> None:
        for _ in range(STEPS):
            dist.scatter(self.buffer, self.parts if dist.get_rank() == 0 else None, src=0)


def prepared(library: str, stream: Stream, read_ahead: bool = False) -> Any:
    """The library's loader that dispatches the stream; only hasten reads ahead."""
    configuration: Any = find(library, "DataLoaderConfiguration")
    settings = {"read_ahead": True} if read_ahead else {}
    accelerator = importlib.import_module(library).Accelerator(
        cpu=True, dataloader_config=configuration(dispatch_batches=True, **settings)
    )
    assert accelerator.num_processes == RANKS
    return accelerator.prepare(DataLoader(stream, batch_size=None, collate_fn=as_it_is))


def run(loader: Any, body_s: float = 0.0) -> None:
    for _ in loader:
        if body_s:
            time.sleep(body_s)


def check(loader: Any, stream: Stream) -> None:
    """Each rank must get its own batches, whole."""
    batches = list(loader)
    mine = stream.numbers[dist.get_rank() :: RANKS]
    if not torch.equal(torch.stack([batch["number"] for batch in batches]), mine):
        raise Wrong(f"rank {dist.get_rank()} got other batches than its own")
    if any(batch["x"].shape != stream.data.shape[1:] for batch in batches):
        raise Wrong("a batch is not whole")


def _measure(
    library: str, stream: Stream, key: str, ideal: Callable[[], object], body_s: float, ahead: bool
) -> dict[str, float]:
    loader = None if library == RAW else prepared(library, stream, ahead and library == "hasten")  # it joins the ranks
    if loader is not None:
        check(loader, stream)
    number = SLOW_TURNS if body_s else TURNS
    turns = take_turns(ideal, ideal if loader is None else lambda: run(loader, body_s), number, before=dist.barrier)
    return {f"{key}_ratio": turns.ratio, f"{key}_us": turns.library_s / stream.steps * 1e6}


def _large(library: str, key: str, ahead: bool) -> dict[str, float]:
    return _measure(library, Stream(LARGE, STEPS), key, Bare(LARGE).epoch, 0.0, ahead)


def large(library: str) -> dict[str, float]:
    return _large(library, "large", False)


def large_ahead(library: str) -> dict[str, float]:
    return _large(library, "large_ahead", True)


def _slow(library: str, key: str, ahead: bool) -> dict[str, float]:
    """Reader and body take the same time: half of their sum is the best that can be."""
    stream = Stream(SMALL, SLOW_STEPS, BUSY_S / RANKS)

    def reader_alone() -> None:
        for _ in range(RANKS * SLOW_STEPS):
            time.sleep(stream.delay_s)

    return _measure(library, stream, key, reader_alone, BUSY_S, ahead)


def slow(library: str) -> dict[str, float]:
    return _slow(library, "slow", False)


def slow_ahead(library: str) -> dict[str, float]:
    return _slow(library, "slow_ahead", True)


def _figures() -> list[Figure]:
    mega, busy = f"{LARGE >> 20} MB batches", f"reader and body of {BUSY_S * 1e3:g} ms"
    return [
        Figure(f"{mega}: over a bare scatter", "large_ratio", 1.3),
        Figure(f"{mega}: us per step", "large_us", digits=0),
        Figure(f"{mega}, read ahead: over a bare scatter", "large_ahead_ratio"),
        Figure(f"{mega}, read ahead: us per step", "large_ahead_us", digits=0),
        Figure(f"{busy}: over the slower one", "slow_ratio"),
        Figure(f"{busy}: us per step", "slow_us", digits=0),
        Figure(f"{busy}, read ahead: over the slower one", "slow_ahead_ratio", 1.3),
        Figure(f"{busy}, read ahead: us per step", "slow_ahead_us", digits=0),
    ]


BENCHMARK = Benchmark(
    "benchmarks.dispatch",
    f"Dispatch by rank 0 to {RANKS} ranks; accelerate can not read ahead",
    _figures(),
    [
        Part("large", large, ranks=RANKS),
        Part("large_ahead", large_ahead, ranks=RANKS),
        Part("slow", slow, ranks=RANKS),
        Part("slow_ahead", slow_ahead, ranks=RANKS),
    ],
)

if __name__ == "__main__":
    main(BENCHMARK)

"""A prepared loader over the plain one, and over a DistributedSampler loader on 2 ranks: time per batch, without any work."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from benchmarks.measure import RAW, Benchmark, Figure, Part, Wrong, main, take_turns

BATCH = 8
BATCHES = 242
TURNS = 40


class Plain:
    """The loader by hand: shuffled, shared between the ranks by a DistributedSampler that is told the epoch."""

    def __init__(self, dataset: Dataset, ranks: int) -> None:
        self._sampler: DistributedSampler | None = DistributedSampler(dataset) if ranks > 1 else None
        self._loader = DataLoader(dataset, batch_size=BATCH, shuffle=self._sampler is None, sampler=self._sampler)
        self._epoch = 0

    def epoch(self) -> list[torch.Tensor]:
        if self._sampler is not None:
            self._sampler.set_epoch(self._epoch)
            self._epoch += 1
        return run(self._loader)


def run(loader: Iterable) -> list[torch.Tensor]:
    return [index for index, _ in loader]


def prepared(library: str, dataset: Dataset, ranks: int) -> Iterable:
    accelerator = importlib.import_module(library).Accelerator(cpu=True)
    assert accelerator.num_processes == ranks
    return accelerator.prepare(DataLoader(dataset, batch_size=BATCH, shuffle=True))


def check(batches: list[torch.Tensor], ranks: int) -> None:
    """All ranks together must have had every sample once."""
    mine = torch.cat(batches)
    everything = [mine]
    if ranks > 1:
        everything = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(everything, mine)
    if not torch.equal(torch.cat(everything).sort().values, torch.arange(ranks * BATCHES * BATCH)):
        raise Wrong("an epoch of the prepared loader is not every sample once")


def _measure(library: str, ranks: int, prefix: str) -> dict[str, float]:
    samples = ranks * BATCHES * BATCH
    dataset = TensorDataset(torch.arange(samples), torch.randn(samples, 16))
    loader = None if library == RAW else prepared(library, dataset, ranks)  # it joins the ranks
    by_hand, another = Plain(dataset, ranks), Plain(dataset, ranks)

    def by_library() -> list[torch.Tensor]:
        return another.epoch() if loader is None else run(loader)

    check(by_library(), ranks)
    turns = take_turns(by_hand.epoch, by_library, TURNS, before=dist.barrier if ranks > 1 else None)
    check(by_library(), ranks)
    return turns.values(prefix, BATCHES)


def one(library: str) -> dict[str, float]:
    return _measure(library, 1, "one")


def two(library: str) -> dict[str, float]:
    return _measure(library, 2, "two")


BENCHMARK = Benchmark(
    "benchmarks.loader",
    f"Prepared loader, shuffled, {BATCHES} batches of {BATCH} per rank",
    [
        Figure("1 process: over the plain loader", "one_ratio", 1.02, 3),
        Figure("1 process: us per batch", "one_us", digits=1),
        Figure("1 process: extra us per batch", "one_extra_us", digits=1),
        Figure("2 ranks: over a DistributedSampler loader", "two_ratio", 1.05, 3),
        Figure("2 ranks: us per batch", "two_us", digits=1),
        Figure("2 ranks: extra us per batch", "two_extra_us", digits=1),
    ],
    [Part("one", one), Part("two", two, ranks=2)],
)

if __name__ == "__main__":
    main(BENCHMARK)

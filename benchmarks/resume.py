"""The first batch of a loader that is resumed after 10 and after 1,000,000 batches, over that of a plain loader from the start."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.measure import RAW, Benchmark, Figure, Part, Wrong, main, take_turns

SAMPLES = 2_000_000
PLACES = (10, 1_000_000)
TURNS = 7


class Numbers(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def first_batch(loader: Any) -> int:
    return int(next(iter(loader)))


def skipping(library: str, place: int) -> float:
    plain = DataLoader(Numbers(), batch_size=1, shuffle=True)
    loader, skip = plain, None
    if library != RAW:
        accelerator = importlib.import_module(library).Accelerator(cpu=True)
        loader, skip = accelerator.prepare(plain), accelerator.skip_first_batches

    def resumed() -> int:
        torch.manual_seed(0)
        return first_batch(loader if skip is None else skip(loader, place))

    def by_hand() -> int:
        torch.manual_seed(0)
        return first_batch(plain)

    if skip is not None:
        torch.manual_seed(0)
        if resumed() not in range(SAMPLES):
            raise Wrong("the resumed loader gives something else")
    return take_turns(by_hand, resumed, TURNS).ratio


def resume(library: str) -> dict[str, float]:
    few, many = (skipping(library, place) for place in PLACES)
    return {"few": few, "many": many, "growth": many / few}


BENCHMARK = Benchmark(
    "benchmarks.resume",
    f"The first batch after skipping, {SAMPLES:,} shuffled samples",
    [
        Figure("after 10 batches: over the first batch of a plain loader", "few"),
        Figure("after 1,000,000 batches: over the same", "many"),
        Figure("1,000,000 over 10 batches", "growth", 1.1),
    ],
    [Part("resume", resume)],
)

if __name__ == "__main__":
    main(BENCHMARK)

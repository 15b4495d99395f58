"""A prepared DDP loop over one by hand, on 2 gloo ranks: AdamW, clipping, and `no_sync` while accumulating."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from benchmarks.loops import prepared_loop, raw_loop, same_weights
from benchmarks.measure import Benchmark, Part, Turns, Wrong, main, step_figures, take_turns

RANKS = 2
BATCHES = 30
WIDTH = 256
TURNS = 30
PAIRS = 4  # models: where their memory happens to lie makes a step up to 5 % faster or slower


def _measure(library: str, prefix: str, accumulation: int) -> dict[str, float]:

    shape: dict[str, Any] = {"width": WIDTH, "adam": True, "ddp": True}
    both = []
    for _ in range(PAIRS):
        prepared = prepared_loop(library, BATCHES * RANKS, accumulation, **shape)
        raw = raw_loop(BATCHES * RANKS, accumulation, **shape)
        prepared.epoch()
        raw.epoch()
        if not same_weights(raw.model, prepared.model, 1e-5):
            raise Wrong("the prepared loop and the loop by hand end with different weights")
        both.append(take_turns(raw.epoch, prepared.epoch, TURNS, before=dist.barrier))
    turns = Turns([t for each in both for t in each.ideal], [t for each in both for t in each.library])
    return turns.values(prefix, BATCHES)


def plain(library: str) -> dict[str, float]:
    return _measure(library, "plain", 1)


def accumulate4(library: str) -> dict[str, float]:
    return _measure(library, "accumulate4", 4)


BENCHMARK = Benchmark(
    "benchmarks.ddp_step",
    f"DDP loop on 2 gloo ranks: 16-{WIDTH}-1 MLP, AdamW, clipping, {BATCHES} batches of 8 per rank",
    [*step_figures("plain", "plain", 1.03), *step_figures("accumulate4", "accumulate 4", 1.03)],
    [Part("plain", plain, ranks=RANKS), Part("accumulate4", accumulate4, ranks=RANKS)],
)

if __name__ == "__main__":
    main(BENCHMARK)

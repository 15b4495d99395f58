"""The prepared loop over the same loop by hand: time, Python calls, ATen operations and host syncs per step."""

from __future__ import annotations

from benchmarks.counts import Operations, count_calls
from benchmarks.loops import prepared_loop, raw_loop, same_weights
from benchmarks.measure import Benchmark, Figure, Part, Wrong, main, step_figures, take_turns

BATCHES = 242
TURNS = 25


def _measure(library: str, prefix: str, accumulation: int = 1, bf16: bool = False) -> dict[str, float]:

    raw = raw_loop(BATCHES, accumulation, bf16)
    prepared = prepared_loop(library, BATCHES, accumulation, bf16)
    turns = take_turns(raw.epoch, prepared.epoch, TURNS)
    calls, ideal_calls = count_calls(prepared.epoch), count_calls(raw.epoch)
    with Operations() as operations:
        prepared.epoch()
    with Operations() as ideal_operations:
        raw.epoch()
    if not same_weights(raw.model, prepared.model):
        raise Wrong("the prepared loop and the loop by hand end with different weights")
    values = {
        "calls": (calls.python - ideal_calls.python) / BATCHES,
        "builtins": (calls.builtin - ideal_calls.builtin) / BATCHES,
        "aten": (operations.aten - ideal_operations.aten) / BATCHES,
        "syncs": (operations.syncs - ideal_operations.syncs) / BATCHES,
    }
    return turns.values(prefix, BATCHES) | {f"{prefix}_{key}": value for key, value in values.items()}


def plain(library: str) -> dict[str, float]:
    return _measure(library, "plain")


def accumulate4(library: str) -> dict[str, float]:
    return _measure(library, "accumulate4", accumulation=4)


def bf16(library: str) -> dict[str, float]:
    return _measure(library, "bf16", bf16=True)


def _figures(prefix: str, label: str) -> list[Figure]:
    return [
        *step_figures(prefix, label, 1.06),
        Figure(f"{label}: extra Python calls per step", f"{prefix}_calls", 60, 1),
        Figure(f"{label}: extra calls of built-ins per step", f"{prefix}_builtins", digits=1),
        Figure(f"{label}: extra ATen operations per step", f"{prefix}_aten", 0, 3),
        Figure(f"{label}: extra host syncs per step", f"{prefix}_syncs", 0, 3),
    ]


BENCHMARK = Benchmark(
    "benchmarks.prepared_loop",
    "Prepared loop: 16-16-1 MLP, SGD, clipping, scheduler, 242 batches of 8",
    [*_figures("plain", "plain"), *_figures("accumulate4", "accumulate 4"), *_figures("bf16", "bf16")],
    [Part("plain", plain), Part("accumulate4", accumulate4), Part("bf16", bf16)],
)

if __name__ == "__main__":
    main(BENCHMARK)

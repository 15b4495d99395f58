"""Accelerator.clip_grad_norm_ over torch's foreach form, for 200 parameters."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from benchmarks.counts import Operations, count_calls
from benchmarks.measure import RAW, Benchmark, Figure, Part, Wrong, main, take_turns

PARAMETERS = 200
CALLS = 20
TURNS = 60


def measure(library: str) -> dict[str, float]:

    torch.manual_seed(0)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(32, 32)) for _ in range(PARAMETERS)])
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    own = None
    if library != RAW:
        accelerator = importlib.import_module(library).Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        own = accelerator.clip_grad_norm_
    parameters = list(model.parameters())

    def fill() -> None:
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, 1e-3 * index)

    def ideal(times: int = CALLS) -> torch.Tensor:
        for _ in range(times):
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        return norm

    def by_library(times: int = CALLS) -> torch.Tensor:
        if own is None:
            return ideal(times)
        for _ in range(times):
            norm = own(parameters, 1.0)
        return norm

    def clipped(clip: Callable[[int], torch.Tensor]) -> tuple[float, torch.Tensor]:
        fill()
        norm = clip(1).item()
        return norm, torch.stack([each.grad for each in parameters if each.grad is not None])

    (norm, gradients), (own_norm, own_gradients) = clipped(ideal), clipped(by_library)
    if norm != own_norm or not torch.equal(gradients, own_gradients):
        raise Wrong(f"norm {own_norm} instead of {norm}, or other gradients")
    with Operations() as operations:
        by_library(1)
    with Operations() as ideal_operations:
        ideal(1)
    calls, ideal_calls = count_calls(lambda: by_library(1)), count_calls(lambda: ideal(1))
    turns = take_turns(ideal, by_library, TURNS)
    return {
        "ratio": turns.ratio,
        "us": turns.library_s / CALLS * 1e6,
        "extra_us": (turns.library_s - turns.ideal_s) / CALLS * 1e6,
        "calls": calls.python - ideal_calls.python,
        "operations": operations.aten - ideal_operations.aten,
    }


BENCHMARK = Benchmark(
    "benchmarks.clipping",
    f"clip_grad_norm_ of {PARAMETERS} parameters of 32x32",
    [
        Figure("over torch's foreach", "ratio", 1.01, 3),
        Figure("us per call", "us", digits=1),
        Figure("extra us per call", "extra_us", digits=1),
        Figure("extra Python calls", "calls", digits=0),
        Figure("extra ATen operations", "operations", 0, 0),
    ],
    [Part("clip", measure)],
)

if __name__ == "__main__":
    main(BENCHMARK)

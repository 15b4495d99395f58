"""LocalSGD: averaging a model's parameters over one flat all-reduce by hand, on 2 ranks. DiLoCo: a round over one by hand."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.counts import Operations
from benchmarks.measure import RAW, Benchmark, Figure, Part, Turns, Wrong, main, take_turns

RANKS = 2
TURNS = 30
PAIRS = 3  # models: where their memory happens to lie makes a difference
MODELS = {"8MB": (362, 16), "80KB": (36, 16)}  # width and number of layers; a weight and a bias in each
HOME = {"hasten": "hasten.training.local_sgd", "accelerate": "accelerate.local_sgd"}
RATE, MOMENTUM = 0.7, 0.9


def network(kind: str) -> nn.Module:
    width, layers = MODELS[kind]
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


@torch.no_grad()
def disturb(model: nn.Module) -> None:
    """Let the copies of a model differ between ranks, but not the models of one rank."""
    for number, parameter in enumerate(model.parameters()):
        parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 7 + number + dist.get_rank())


@torch.no_grad()
def all_reduce_flat(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The means of tensors, by one all-reduce of all of them."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    flat.div_(RANKS)
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


class ByHand:
    """What LocalSGD does at a step that averages, without any library."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())

    @torch.no_grad()
    def step(self) -> None:
        torch._foreach_copy_(self.parameters, all_reduce_flat(self.parameters))


class RoundByHand:
    """A round of DiLoCo by hand: pseudo-gradients, one all-reduce, torch's SGD, and the result into the model."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.outer = [nn.Parameter(parameter.detach().clone()) for parameter in self.parameters]
        self.optimizer = torch.optim.SGD(self.outer, lr=RATE, momentum=MOMENTUM, nesterov=True)

    @torch.no_grad()
    def step(self) -> None:
        ways = [outer - parameter for outer, parameter in zip(self.outer, self.parameters, strict=True)]
        for outer, mean in zip(self.outer, all_reduce_flat(ways), strict=True):
            outer.grad = mean
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch._foreach_copy_(self.parameters, self.outer)


def compare(by_hand: Any, by_library: Any, models: tuple[nn.Module, nn.Module]) -> Turns:
    """Check that both leave the same parameters, then time them in turns."""
    for model in models:
        disturb(model)
    by_hand.step()
    by_library.step()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        if not torch.allclose(one, other, rtol=1e-6):
            raise Wrong("the parameters differ from those averaged by hand")
    return take_turns(by_hand.step, by_library.step, TURNS, before=dist.barrier)


def count(stepper: Any) -> int:
    with Operations() as operations:
        stepper.step()
    return operations.collectives


def joined(prefix: str, turns: list[Turns], collectives: int) -> dict[str, float]:
    all_turns = Turns([t for each in turns for t in each.ideal], [t for each in turns for t in each.library])
    return {
        f"{prefix}_ratio": all_turns.ratio,
        f"{prefix}_us": all_turns.library_s * 1e6,
        f"{prefix}_count": collectives,
    }


def start(library: str) -> Any:
    return None if library == RAW else importlib.import_module(library).Accelerator(cpu=True)


def average(library: str) -> dict[str, float]:
    accelerator = start(library)
    values: dict[str, float] = {}
    for kind in MODELS:
        turns = []
        for _ in range(PAIRS):
            ideal, model = network(kind), network(kind)
            if accelerator is None:
                turns.append(compare(ByHand(ideal), stepper := ByHand(model), (ideal, model)))
                continue
            prepared = accelerator.prepare(model)
            with importlib.import_module(HOME[library]).LocalSGD(accelerator, prepared, 1) as stepper:
                turns.append(compare(ByHand(ideal), stepper, (ideal, model)))
                collectives = count(stepper)
        values |= joined(kind, turns, count(stepper) if accelerator is None else collectives)
    return values


def diloco(library: str) -> dict[str, float]:
    accelerator = start(library)
    if library == "accelerate":  # it has no DiLoCo
        return {}
    turns = []
    for _ in range(PAIRS):
        torch.manual_seed(0)
        ideal = network("8MB")
        model = copy.deepcopy(ideal)
        by_hand = RoundByHand(ideal)
        if accelerator is None:
            turns.append(compare(by_hand, stepper := RoundByHand(model), (ideal, model)))
            continue
        kind = importlib.import_module("hasten.training.diloco").DiLoCo
        with kind(accelerator, accelerator.prepare(model), 1, outer_lr=RATE, outer_momentum=MOMENTUM) as stepper:
            turns.append(compare(by_hand, stepper, (ideal, model)))
            collectives = count(stepper)
    return joined("diloco", turns, count(stepper) if accelerator is None else collectives)


def _figures(prefix: str, label: str, bar: float | None) -> list[Figure]:
    return [
        Figure(f"{label}: time over by hand", f"{prefix}_ratio", bar),
        Figure(f"{label}: us", f"{prefix}_us", digits=0),
        Figure(f"{label}: collectives", f"{prefix}_count", 2, 0),
    ]


BENCHMARK = Benchmark(
    "benchmarks.local_sgd",
    "Averaging the 32 parameters of a model on 2 gloo ranks, over one flat all-reduce",
    [
        *_figures("8MB", "LocalSGD, 8 MB", 1.1),
        *_figures("80KB", "LocalSGD, 80 KB", None),
        *_figures("diloco", "DiLoCo round, 8 MB", 1.1),
    ],
    [Part("average", average, ranks=RANKS), Part("diloco", diloco, ranks=RANKS)],
)

if __name__ == "__main__":
    main(BENCHMARK)

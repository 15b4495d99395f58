"""Collectives of a nested dict of 20 tensors on 2 ranks over one coalesced collective by hand; how many are made."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.counts import Operations
from benchmarks.measure import RAW, Benchmark, Figure, Part, Wrong, find, main, take_turns

RANKS = 2
CALLS = 10
TURNS = 40
SHAPE = (32, 4)
Tree = Any
Operation = Callable[[Tree], Tree]


def tree(rank: int, rows: int = SHAPE[0]) -> Tree:
    """The data of one rank: 5 dicts of 4 tensors."""
    generator = torch.Generator().manual_seed(rank)
    shape = (rows, SHAPE[1])
    return {f"part{i}": {f"leaf{j}": torch.randn(shape, generator=generator) for j in range(4)} for i in range(5)}


def leaves(data: Tree) -> list[torch.Tensor]:
    return [each for part in data.values() for each in leaves(part)] if isinstance(data, dict) else [data]


def rebuild(data: Tree, new: list[torch.Tensor]) -> Tree:
    """The structure of `data` around the leaves `new`, which it takes from the front of the list."""
    if not isinstance(data, dict):
        return new.pop(0)
    return {key: rebuild(part, new) for key, part in data.items()}


def gather_by_hand(data: Tree) -> Tree:
    parts = leaves(data)
    flat = torch.cat([part.reshape(-1) for part in parts])
    everything = flat.new_empty(RANKS * flat.numel())
    dist.all_gather_single(everything, flat)
    pieces = everything.view(RANKS, -1).split([part.numel() for part in parts], dim=1)
    return rebuild(data, [piece.reshape(-1, *part.shape[1:]) for piece, part in zip(pieces, parts, strict=True)])


def reduce_by_hand(data: Tree) -> Tree:
    parts = leaves(data)
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(flat)
    pieces = flat.split([part.numel() for part in parts])
    return rebuild(data, [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)])


def broadcast_by_hand(data: Tree) -> Tree:
    parts = leaves(data)
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.broadcast(flat, 0)
    if dist.get_rank() != 0:
        pieces = flat.split([part.numel() for part in parts])
        torch._foreach_copy_(parts, [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)])
    return data


def pad_by_hand(data: Tree) -> Tree:
    parts = leaves(data)
    rows = torch.tensor([part.shape[0] for part in parts])
    everyone = rows.new_empty(RANKS * len(parts))
    dist.all_gather_single(everyone, rows)
    longest = everyone.view(RANKS, -1).amax(0).tolist()
    padded = []
    for part, wanted in zip(parts, longest, strict=True):
        if part.shape[0] == wanted:
            padded.append(part)
            continue
        new = part.new_zeros(wanted, *part.shape[1:])
        new[: part.shape[0]] = part
        padded.append(new)
    return rebuild(data, padded)


def gather_one(data: torch.Tensor) -> torch.Tensor:
    everything = data.new_empty(RANKS * data.shape[0], *data.shape[1:])
    dist.all_gather_single(everything, data)
    return everything


def reduce_one(data: torch.Tensor) -> torch.Tensor:
    result = data.clone()
    dist.all_reduce(result)
    return result


def same(one: Tree, other: Tree) -> bool:
    pairs = zip(leaves(one), leaves(other), strict=True)
    return all(mine.shape == yours.shape and torch.equal(mine, yours) for mine, yours in pairs)


def count(operation: Operation, data: Tree) -> int:
    """Collectives in one call."""

    with Operations() as operations:
        operation(data)
    return operations.collectives


def operations(library: str) -> dict[str, Operation]:
    """The library's own functions, by the name of their row; empty for raw PyTorch."""
    if library == RAW:
        return {}
    accelerator = importlib.import_module(library).Accelerator(cpu=True)
    assert accelerator.num_processes == RANKS
    return {
        "gather": accelerator.gather,
        "gather_for_metrics": accelerator.gather_for_metrics,
        "reduce": accelerator.reduce,
        "broadcast": find(library, "broadcast"),
        "pad": accelerator.pad_across_processes,
        "gather_8MB": accelerator.gather,
        "reduce_8MB": accelerator.reduce,
    }


def cases() -> dict[str, tuple[Operation, Tree, int]]:
    """By the name of its row: the operation by hand, this rank's data, calls per turn."""
    rank = dist.get_rank()
    data = tree(rank)
    large = torch.full((2 << 20,), float(rank + 1))
    return {
        "gather": (gather_by_hand, data, CALLS),
        "gather_for_metrics": (gather_by_hand, data, CALLS),
        "reduce": (reduce_by_hand, data, CALLS),
        "broadcast": (broadcast_by_hand, data, CALLS),
        "pad": (pad_by_hand, tree(rank, SHAPE[0] - rank), CALLS),
        "gather_8MB": (gather_one, large, 1),
        "reduce_8MB": (reduce_one, large, 1),
    }


def measure(library: str) -> dict[str, float]:
    own = operations(library)
    values: dict[str, float] = {}
    for name, (by_hand, given, calls) in cases().items():
        by_library = own.get(name, by_hand)
        if not same(by_hand(given), by_library(given)):
            raise Wrong(f"{name} differs from the same collective by hand")

        def repeat(run: Operation, given: Tree = given, calls: int = calls) -> None:
            for _ in range(calls):
                run(given)

        turns = take_turns(lambda: repeat(by_hand), lambda: repeat(by_library), TURNS, before=dist.barrier)  # noqa: B023
        values |= {f"{name}_ratio": turns.ratio, f"{name}_us": turns.library_s / calls * 1e6}
        values[f"{name}_count"] = count(by_library, given)
    return values


def _figures() -> list[Figure]:
    figures = []
    for name in ("gather", "gather_for_metrics", "reduce", "broadcast", "pad"):
        figures.append(Figure(f"{name}: time over one coalesced collective", f"{name}_ratio", 1.4))
        figures.append(Figure(f"{name}: us", f"{name}_us", digits=0))
        figures.append(Figure(f"{name}: collectives", f"{name}_count", 2, 0))
    for name in ("gather_8MB", "reduce_8MB"):
        figures.append(Figure(f"{name}: time over one bare collective", f"{name}_ratio", 1.05))
        figures.append(Figure(f"{name}: us", f"{name}_us", digits=0))
        figures.append(Figure(f"{name}: collectives", f"{name}_count", 2, 0))
    return figures


BENCHMARK = Benchmark(
    "benchmarks.collectives",
    "Collectives of a nested dict of 20 tensors of 32x4, on 2 gloo ranks",
    _figures(),
    [Part("collectives", measure, ranks=RANKS)],
)

if __name__ == "__main__":
    main(BENCHMARK)

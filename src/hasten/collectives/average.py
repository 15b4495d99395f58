"""Average: the mean over the processes of many tensors, in one collective per dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hasten.collectives.wire import Form, Wire, copy_all, wire_of
from hasten.world.process import World


@torch.no_grad()
def average_(
    tensors: Mapping[str, torch.Tensor], operation: str, *, world: World | None = None, **arguments: Any
) -> None:
    """As `average`, but into the tensors themselves, whatever their strides."""
    wire = wire_of(world)
    if wire is not None:
        leaves, plan = wire.plan(_Plan, operation, dict(tensors), **arguments)
        copy_all(leaves, plan.run(leaves), wire.is_away(leaves))


@torch.no_grad()
def average(
    tensors: Mapping[str, torch.Tensor], operation: str, *, world: World | None = None, **arguments: Any
) -> dict[str, torch.Tensor]:
    """The mean of tensors over all processes, element by element.

    The processes first agree on the call and on names, dtypes and shapes, in one small exchange of fixed size. Then the tensors of
    each dtype travel as one: while they do, a copy of them exists.

    Args:
        tensors: by name; floating-point or complex, the same on every process.
        operation: what this is done for, as errors name it.
        world: the processes to average over; by default all.
        arguments: of the operation, which all processes must give alike.

    Returns:
        The means, by name: those of one dtype are views of one tensor. On one process the tensors themselves.

    Raises:
        TypeError: a tensor of whole numbers, or a DTensor.
        DistributedOperationException: the processes do not bring the same, or not for the same operation.
    """
    wire = wire_of(world)
    if wire is None:
        return dict(tensors)
    leaves, plan = wire.plan(_Plan, operation, dict(tensors), **arguments)
    means = plan.run(leaves)
    if wire.is_away(leaves):
        means = [mean.to(leaf.device) for mean, leaf in zip(means, leaves, strict=True)]
    return dict(zip(tensors, means, strict=True))


class _Plan:
    def __init__(self, wire: Wire, form: Form) -> None:
        groups: dict[torch.dtype, list[int]] = {}
        # In the order of the names, which is the same on all processes.
        for name, index in sorted((name, index) for index, name in enumerate(form.names)):
            dtype = form.leaves[index].dtype
            if not (dtype.is_floating_point or dtype.is_complex):
                raise TypeError(f"{form.operation}: {name} ({dtype}) has no mean, since its values are whole numbers.")
            groups.setdefault(dtype, []).append(index)
        self.wire, self.statement = wire, form.statement()
        self.groups = list(groups.values())

    def run(self, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        """The means, on the wire's device."""
        flats = self.wire.prepare(
            self.statement.operation,
            lambda: [_Flat(self.wire, [leaves[index] for index in group]) for group in self.groups],
        )
        self.wire.meet(self.statement, meanwhile=lambda: _fill(flats))
        means = list(leaves)
        for group, flat in zip(self.groups, flats, strict=True):
            for index, mean in zip(group, flat.exchange(), strict=True):
                means[index] = mean
        return means


class _Flat:
    """Tensors of one dtype, one behind the other."""

    def __init__(self, wire: Wire, tensors: list[torch.Tensor]) -> None:
        self.wire, self.dtype = wire, tensors[0].dtype
        self.shapes = [tensor.shape for tensor in tensors]
        is_byte = self.dtype.is_floating_point and self.dtype.itemsize == 1
        wide = torch.float32 if is_byte else self.dtype  # no backend sums 8 bits
        self.parts = [tensor.reshape(-1).to(wire.device, wide) for tensor in tensors]
        self.flat = torch.empty(sum(part.numel() for part in self.parts), dtype=wide, device=wire.device)

    def fill(self) -> None:
        torch.cat(self.parts, out=self.flat)
        self.parts = []

    def exchange(self) -> list[torch.Tensor]:
        flat, size = self.flat, self.wire.size
        # The sum of halves may overflow where their mean does not.
        early = flat.is_floating_point() and flat.itemsize == 2
        if early:
            flat.div_(size)
        self.wire.all_reduce(flat, dist.ReduceOp.SUM)
        if not early:
            flat.div_(size)
        pieces = flat.to(self.dtype).split([shape.numel() for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


def _fill(flats: list[_Flat]) -> None:
    for flat in flats:
        flat.fill()

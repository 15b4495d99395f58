"""Ragged: every process gets the tensors of all as they are, whatever their shapes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch

from hasten.collectives.layout import Layout
from hasten.collectives.nested import refill
from hasten.collectives.parcels import ALONE_BYTES
from hasten.collectives.wire import Form, Wire
from hasten.world.agreement import Statement

_ALIGNMENT = 16
_WASTE = 64 << 20  # bytes that padding may take without a second thought


def gather_ragged(tensor: Any, wire: Wire) -> Any:
    """A structure with the list of all processes' tensors in place of each tensor; see `gather`."""
    leaves, plan = wire.plan(_Ragged, "gather", tensor, sized=False, ragged=True)
    return refill(tensor, iter(plan.run(leaves)))


class _Ragged:
    """A gather of tensors whose shapes differ. The shapes travel in the frames, and so do the tensors if they are small."""

    def __init__(self, wire: Wire, form: Form) -> None:
        self.wire, self.names = wire, form.names
        self.dtypes = [leaf.dtype for leaf in form.leaves]
        self.order = sorted(range(len(form.names)), key=form.names.__getitem__)
        told = [(form.names[index], str(self.dtypes[index]).removeprefix("torch."), "any") for index in self.order]
        self.statement = Statement(form.operation, form.arguments, tuple(told), site=form.site)
        self.away = wire.is_away(form.leaves)

    def run(self, leaves: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """For each leaf the tensors of all processes, in rank order, each in memory of its own."""
        wire = self.wire
        own, shapes = wire.prepare("gather", lambda: (Layout(self.names, leaves), self._shapes(leaves)))
        start = _aligned(len(shapes))
        if start + own.nbytes <= wire.capacity:
            packed = wire.body[start : start + own.nbytes]
        else:
            packed = torch.empty(own.nbytes, dtype=torch.uint8, device=wire.device)
        wire.pack("gather", own.views(packed), leaves, self.away)
        told = [bytes(body) for body in wire.talk(self.statement, shapes)]
        layouts = [own if body == shapes else self._layout(body) for body in told]
        ends = [_aligned(len(body)) + layout.nbytes for body, layout in zip(told, layouts, strict=True)]
        if max(ends) <= wire.capacity:
            rows = [
                body[end - layout.nbytes : end] for body, layout, end in zip(wire.bodies, layouts, ends, strict=True)
            ]
        else:
            rows = self._exchange(packed, [layout.nbytes for layout in layouts])
        pieces = zip(*(layout.views(row) for layout, row in zip(layouts, rows, strict=True)), strict=True)
        return [[piece.to(leaf.device, copy=True) for piece in each] for leaf, each in zip(leaves, pieces, strict=True)]

    def _shapes(self, leaves: list[torch.Tensor]) -> bytes:
        numbers = [number for index in self.order for number in (leaves[index].dim(), *leaves[index].shape)]
        return struct.pack(f"<{len(numbers)}q", *numbers)

    def _layout(self, told: bytes) -> Layout:
        """How another process has packed its tensors, from the shapes that it has told."""
        numbers = iter(struct.unpack(f"<{len(told) // 8}q", told))
        examples: dict[int, torch.Tensor] = {}
        for index in self.order:
            shape = [next(numbers) for _ in range(next(numbers))]
            examples[index] = torch.empty(shape, dtype=self.dtypes[index], device="meta")
        return Layout(self.names, [examples[index] for index in range(len(examples))])

    def _exchange(self, packed: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """The packed bytes of all processes, whose sizes all of them know."""
        wire, longest = self.wire, max(sizes)
        straight = wire.fills_rows and longest >= ALONE_BYTES
        if straight or wire.size * longest > max(2 * sum(sizes), _WASTE):
            rows = [packed if rank == wire.rank else packed.new_empty(size) for rank, size in enumerate(sizes)]
            if straight:
                wire.fill_rows(rows, packed)
            else:
                for rank, row in enumerate(rows):
                    wire.broadcast(row, rank)
            return rows
        sent = packed.new_empty(longest)
        sent[: packed.numel()] = packed
        received = packed.new_empty(wire.size, longest)
        wire.gather_into(received.view(-1), sent)
        return [row[:size] for row, size in zip(received, sizes, strict=True)]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

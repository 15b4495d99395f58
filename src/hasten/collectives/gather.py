"""Gather: every process gets the tensors of all, concatenated along their first dimension."""

from __future__ import annotations

from typing import Any

import torch

from hasten.collectives.layout import Layout, flatten
from hasten.collectives.nested import refill
from hasten.collectives.parcels import Parcels, as_bytes
from hasten.collectives.ragged import gather_ragged
from hasten.collectives.wire import Form, Wire, wire_of
from hasten.world.process import World


def gather(tensor: Any, *, ragged: bool = False, world: World | None = None) -> Any:
    """Gather a nested structure of tensors from all processes.

    All tensors travel in one collective if they are small (16 KB in all), in two if they are not; tensors of 1 MB and more
    travel one by one, uncopied (under gloo, among up to 8 processes of one machine, each straight to each). The processes
    first agree on names, dtypes and shapes.

    Args:
        tensor: any nesting of containers around dense tensors; the same names and dtypes on every process, and the same shapes
            unless `ragged`.
        ragged: shapes, and numbers of dimensions, may differ between the processes.
        world: the processes to gather from; by default all.

    Returns:
        The same structure; a tensor of shape `(n, ...)` becomes one of `(processes * n, ...)`, in rank order, detached and
        contiguous; one without dimension becomes one of shape `(processes,)`. A process alone gets its argument back.
        With `ragged`, in place of each tensor the list of every process's tensor, in rank order and of its own shape, detached,
        contiguous and in memory of its own, on one process too.

    Raises:
        TypeError: a leaf is not a dense tensor.
        DistributedOperationException: the processes do not hold the same; the same error on every one.
        MissingProcessError: some process did not come before the timeout of the group; the error says which, and where the
            others wait.

    Example:
        >>> gather({"loss": loss, "labels": labels})  # on 2 processes, of shapes () and (8,)
        {'loss': tensor of shape (2,), 'labels': tensor of shape (16,)}
        >>> gather({"boxes": boxes}, ragged=True)  # of shape (3, 4) on rank 0, (0, 4) on rank 1
        {'boxes': [tensor of shape (3, 4), tensor of shape (0, 4)]}
    """
    wire = wire_of(world)
    if ragged:
        return _alone(tensor) if wire is None else gather_ragged(tensor, wire)
    return tensor if wire is None else gather_as("gather", tensor, wire)


def _alone(tensor: Any) -> Any:
    """What a ragged gather of one process returns."""
    leaves, _ = flatten("gather", tensor)
    return refill(tensor, iter([[leaf.detach().clone(memory_format=torch.contiguous_format)] for leaf in leaves]))


def gather_as(operation: str, tensor: Any, wire: Wire, **arguments: Any) -> Any:
    """As `gather`, on behalf of the function `operation` with `arguments` that must be the same on every process."""
    leaves, plan = wire.plan(_plan, operation, tensor, **arguments)
    results = plan.run(leaves)
    if plan.away:
        results = [result.to(leaf.device) for result, leaf in zip(results, leaves, strict=True)]
    return refill(tensor, iter(results))


def _plan(wire: Wire, form: Form) -> _InFrame | _Beside:
    layout = Layout(form.names, form.leaves)
    return _InFrame(wire, form, layout) if layout.nbytes <= wire.capacity else _Beside(wire, form)


class _InFrame:
    """A gather whose tensors travel in the frames themselves."""

    def __init__(self, wire: Wire, form: Form, layout: Layout) -> None:
        self.wire, self.statement = wire, form.statement()
        self.away = wire.is_away(form.leaves)
        self.sent = layout.views(wire.body)
        self.pieces = _by_leaf([layout.views(body) for body in wire.bodies])

    def run(self, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        self.wire.pack(self.statement.operation, self.sent, leaves, self.away)
        self.wire.meet(self.statement)
        # One storage for each result: whoever keeps one of them keeps nothing else alive.
        return [torch.cat(pieces) for pieces in self.pieces]


class _Beside:
    """A gather whose tensors follow the frames."""

    def __init__(self, wire: Wire, form: Form) -> None:
        self.wire, self.statement = wire, form.statement()
        self.away = wire.is_away(form.leaves)
        self.parcels = Parcels(form.names, form.leaves)

    def run(self, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        wire, parcels, layout, name = self.wire, self.parcels, self.parcels.layout, self.statement.operation
        packed = torch.empty(layout.nbytes, dtype=torch.uint8, device=wire.device)
        wire.pack(name, layout.views(packed), [leaves[index] for index in parcels.together], self.away)
        alone = wire.prepare(name, lambda: [_Alone(wire, leaves[index]) for index in parcels.alone])
        wire.meet(self.statement, meanwhile=lambda: _begin(alone))
        results: dict[int, torch.Tensor] = {}
        if parcels.together:
            received = packed.new_empty(wire.size, packed.numel())
            wire.gather_into(received.view(-1), packed)
            pieces = _by_leaf([layout.views(row) for row in received])
            results.update(zip(parcels.together, map(torch.cat, pieces), strict=True))
        for index, each in zip(parcels.alone, alone, strict=True):
            results[index] = each.exchange()
        return [results[index] for index in range(len(leaves))]


def _begin(alone: list[_Alone]) -> None:
    for each in alone:
        each.begin()


class _Alone:
    """The gather of one large tensor, uncopied."""

    def __init__(self, wire: Wire, leaf: torch.Tensor) -> None:
        self.wire, self.sent = wire, wire.ready(leaf)
        self.result = self.sent.new_empty((wire.size * leaf.shape[0], *leaf.shape[1:]))
        self.rows = as_bytes(self.result).view(wire.size, -1)

    def begin(self) -> None:
        """What can be done before anything is sent."""
        if self.wire.fills_rows:
            self.rows[self.wire.rank].copy_(as_bytes(self.sent))

    def exchange(self) -> torch.Tensor:
        if self.wire.fills_rows:
            self.wire.fill_rows(self.rows, as_bytes(self.sent))
        else:
            self.wire.gather_into(self.rows.view(-1), as_bytes(self.sent))
        return self.result


def _by_leaf(rows: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """For each leaf its views in all rows, with a dimension to join them along."""
    return [[piece.view(1) if piece.dim() == 0 else piece for piece in pieces] for pieces in zip(*rows, strict=True)]

"""Broadcast: every process gets the values of one."""

from __future__ import annotations

from typing import Any

import torch

from hasten.collectives.layout import Layout
from hasten.collectives.nested import refill
from hasten.collectives.parcels import Parcels, as_bytes
from hasten.collectives.wire import Form, Wire, copy_all, wire_of
from hasten.world.process import World


def broadcast(tensor: Any, from_process: int = 0, *, world: World | None = None) -> Any:
    """Overwrite the tensors of a nested structure, on every process, by those of one process.

    Collectives as in `gather`.

    Args:
        tensor: any nesting of containers around dense tensors; the same names, dtypes and shapes on every process.
        from_process: the rank whose values all get.
        world: the processes to send to; by default all.

    Returns:
        The same structure with the same tensors, now equal everywhere.

    Raises:
        TypeError: a leaf is not a dense tensor.
        ValueError: there is no process `from_process`.
        DistributedOperationException: the processes do not hold the same; the same error on every one.
    """
    wire = wire_of(world)
    if wire is None:
        return tensor
    wire.check_source(from_process)
    leaves, plan = wire.plan(_plan, "broadcast", tensor, from_process=from_process)
    plan.run(leaves)
    return refill(tensor, iter(leaves))


def _plan(wire: Wire, form: Form) -> _InFrame | _Beside:
    layout = Layout(form.names, form.leaves)
    return _InFrame(wire, form, layout) if layout.nbytes <= wire.capacity else _Beside(wire, form)


class _InFrame:
    """A broadcast whose tensors travel in the source's frame."""

    def __init__(self, wire: Wire, form: Form, layout: Layout) -> None:
        self.wire, self.statement = wire, form.statement()
        self.away = wire.is_away(form.leaves)
        source = form.arguments["from_process"]
        self.sends = wire.rank == source
        self.sent = layout.views(wire.body)
        self.received = layout.views(wire.bodies[source])

    def run(self, leaves: list[torch.Tensor]) -> None:
        if self.sends:
            self.wire.pack("broadcast", self.sent, leaves, self.away)
        self.wire.meet(self.statement)
        if not self.sends:
            copy_all(leaves, self.received, self.away)


class _Beside:
    """A broadcast whose tensors follow the frames."""

    def __init__(self, wire: Wire, form: Form) -> None:
        self.wire, self.statement = wire, form.statement()
        self.away = wire.is_away(form.leaves)
        self.source = form.arguments["from_process"]
        self.parcels = Parcels(form.names, form.leaves)

    def run(self, leaves: list[torch.Tensor]) -> None:
        wire, parcels, sends = self.wire, self.parcels, self.wire.rank == self.source
        together = [leaves[index] for index in parcels.together]
        packed = torch.empty(parcels.layout.nbytes, dtype=torch.uint8, device=wire.device)
        views = parcels.layout.views(packed)
        if sends:
            wire.pack("broadcast", views, together, self.away)
        alone = wire.prepare("broadcast", lambda: [wire.ready(leaves[index]) for index in parcels.alone])
        wire.meet(self.statement)
        if together:
            wire.broadcast(packed, self.source)
            if not sends:
                copy_all(together, views, self.away)
        for index, sent in zip(parcels.alone, alone, strict=True):
            wire.broadcast(as_bytes(sent), self.source)
            if not sends and sent.data_ptr() != leaves[index].data_ptr():
                copy_all([leaves[index]], [sent], self.away)

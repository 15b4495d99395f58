"""What one process has to write of a run, as plain states: taken at one moment, written then or later."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class Picture:
    """The states that one process writes. Their order is that of the objects.

    Args:
        weights, optimizers, schedulers, custom, exchange_orders: what is the same on all processes, where this one writes it.
        scaler: the same, or None.
        divided_weights, divided_optimizers: by name, with DTensors, of which each process has a part.
        buffers: for each of the divided weights, the names that processes may hold different values of.
        whole: the divided ones have been made whole: on the main process, and empty on the others.
        random: the random states of this process, and the number of micro-batches.
        positions: of its data loaders, by their numbers.
    """

    weights: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    custom: list[Any] = field(default_factory=list)
    exchange_orders: list[Any] = field(default_factory=list)
    scaler: Any = None
    divided_weights: list[Any] = field(default_factory=list)
    divided_optimizers: list[Any] = field(default_factory=list)
    buffers: list[frozenset[str]] = field(default_factory=list)
    whole: bool = False
    random: dict[str, Any] = field(default_factory=dict)
    positions: dict[int, Any] = field(default_factory=dict)

    def copied(self, safe: bool) -> Picture:
        """The same in the memory of the host, which nothing changes any more.

        Args:
            safe: whole weights will be written as safetensors, which hold tensors only.
        """
        from hasten.checkpoint.staging import Staging

        staging = Staging()
        own_files = ("optimizers", "schedulers", "custom", *(() if safe else ("weights",)))
        parts: dict[str, Any] = {name: [staging.for_file(state) for state in getattr(self, name)] for name in own_files}
        parts["positions"] = {index: staging.for_file(state) for index, state in self.positions.items()}
        for each in fields(self):
            if each.name not in parts:
                parts[each.name] = staging.copied(getattr(self, each.name))
        return Picture(**parts)

"""How a model has been divided, as data that prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hasten.parallel.units import Unit

_SHOWN = 5


@dataclass(frozen=True)
class Division:
    """What was applied to a model that is sharded.

    Args:
        units: what is gathered together, inner units first; the model itself comes last.
        frees: whether whole parameters are freed after the forward pass; a number: kept in shards of so many ranks; None: torch's
            choice.
        computed: the format of parameters in passes; None for that in which they are stored.
        reduced: the format in which gradients are summed; None for that of the passes.
        whole: the names of parameters that every rank keeps whole.
        frozen: the names of parameters that are not trained.
        offloads: whether shards are kept in the memory of the host.
        prefetch: units that are gathered ahead, in the forward and in the backward pass.
    """

    units: tuple[Unit, ...]
    frees: bool | int | None = True
    computed: torch.dtype | None = None
    reduced: torch.dtype | None = None
    whole: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    offloads: bool = False
    prefetch: tuple[int, int] = (0, 0)

    def lines(self) -> Iterator[str]:
        """What is worth knowing, a line each."""
        yield from map(str, self.units)
        yield f"whole parameters are {self._kept()}"
        if self.computed is not None or self.reduced is not None:
            computed, reduced = (_name(each) for each in (self.computed, self.reduced or self.computed))
            yield f"computed in {computed}, gradients summed in {reduced}"
        if self.whole:
            yield f"whole on every process: {_some(self.whole)}"
        if self.frozen:
            yield f"not trained: {_some(self.frozen)}"
        if self.offloads:
            yield "shards and gradients in the memory of the host"
        if any(self.prefetch):
            yield f"gathered ahead: {self.prefetch[0]} units in the forward pass, {self.prefetch[1]} in the backward pass"

    def _kept(self) -> str:
        if self.frees is False:
            return "kept from the forward to the backward pass"
        if self.frees is True or self.frees is None:
            return "freed after the forward pass, and gathered again for the backward pass"
        return f"kept in shards of {self.frees} processes from the forward to the backward pass"


def _name(dtype: torch.dtype | None) -> str:
    return "the format of storage" if dtype is None else str(dtype).removeprefix("torch.")


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more

"""The wire of a world: frames, and what functions on tensors prepare once for each form of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

import torch

from hasten.collectives.layout import flatten, paths
from hasten.collectives.nested import ONLY_TENSORS
from hasten.world import process, torch_private
from hasten.world.agreement import Statement
from hasten.world.arrivals import call_site
from hasten.world.frames import Frames
from hasten.world.process import World

P = TypeVar("P")

_PLANS = 64
# What the form of a tensor is: all that plans depend on.
_SIZED = attrgetter("shape", "dtype", "device")
_UNSIZED = attrgetter("ndim", "dtype", "is_nested")
_DTENSOR = (
    "`{}` got a DTensor, which is spread over the processes already. Pass `tensor.full_tensor()` for the whole, or "
    "`tensor.to_local()` for this process's part."
)


@dataclass(frozen=True)
class Form:
    """A call of a collective on tensors: all that it has in common with the next call on a structure of the same form."""

    operation: str
    arguments: dict[str, Any]
    site: str | None
    names: list[str]
    leaves: list[torch.Tensor]

    def statement(self) -> Statement:
        """That this process brings tensors of these names, dtypes and shapes."""
        told = sorted(
            (name, str(leaf.dtype).removeprefix("torch."), str(list(leaf.shape)))
            for name, leaf in zip(self.names, self.leaves, strict=True)
        )
        return Statement(self.operation, self.arguments, tuple(told), site=self.site)


class Wire(Frames):
    """Frames for functions on tensors: sending a structure of a known form allocates nothing that is only sent.

    Args:
        world, staged: as for `Frames`.
    """

    def __init__(self, world: World, staged: bool | None = None) -> None:
        super().__init__(world, staged)
        self._plans: dict[Any, Any] = {}

    def plan(
        self, build: Callable[[Wire, Form], P], operation: str, data: Any, *, sized: bool = True, **arguments: Any
    ) -> tuple[list[torch.Tensor], P]:
        """The tensors of a nested structure, and what `build` has prepared for structures of its form.

        An error of this process (a leaf of a wrong type, say) is told to the others, so that none of them waits for it.

        Args:
            build: makes it, once for each form.
            sized: whether the shapes are part of the form, or the numbers of dimensions only.
            arguments: those of the operation that all processes must give alike.
        """
        try:
            leaves, trace = flatten(operation, data)
            site = call_site() if self.debug else None
            key = (
                operation,
                *arguments.values(),
                site,
                *trace,
                *map(_SIZED if sized else _UNSIZED, leaves),
            )
            plan: P | None = self._plans.get(key)
            if plan is None:
                with torch.inference_mode(False):
                    plan = build(self, Form(operation, arguments, site, paths(data), leaves))
                if len(self._plans) >= _PLANS:
                    del self._plans[next(iter(self._plans))]
                self._plans[key] = plan
            if any(hasattr(kind, "full_tensor") for kind in set(map(type, leaves)) - ONLY_TENSORS):
                raise TypeError(_DTENSOR.format(operation))
        except Exception as error:
            self.fail(operation, error)
        return leaves, plan

    def prepare(self, operation: str, make: Callable[[], P]) -> P:
        """What `make` returns. If it fails, the other processes learn of it and none waits for this one."""
        try:
            return make()
        except Exception as error:
            self.fail(operation, error)

    def pack(self, operation: str, into: list[torch.Tensor], leaves: list[torch.Tensor], away: bool) -> None:
        """Copy tensors, some of which may be `away` on another device, into views of what will be sent."""
        try:
            copy_all(into, leaves, away)
        except Exception as error:
            self.fail(operation, error)

    def ready(self, leaf: torch.Tensor) -> torch.Tensor:
        """A tensor as a collective can take it: detached, contiguous, on the wire's device; copied only if it must be."""
        return leaf.detach().to(self.device).resolve_conj().resolve_neg().contiguous()

    def is_away(self, leaves: list[torch.Tensor]) -> bool:
        """Whether some tensors lie on another device than the wire's."""
        return any(leaf.device != self.device for leaf in leaves)

    def check_source(self, from_process: int) -> None:
        """Raise if there is no process of that rank."""
        if not 0 <= from_process < self.size:
            raise ValueError(f"from_process={from_process}: it must be a rank from 0 to {self.size - 1}.")


def copy_all(into: list[torch.Tensor], tensors: list[torch.Tensor], away: bool) -> None:
    """Overwrite tensors by others of the same shapes, whatever their strides, and devices if some are `away`."""
    with torch.no_grad():
        if away:
            for target, tensor in zip(into, tensors, strict=True):
                target.copy_(tensor)
        elif tensors:  # torch refuses empty lists
            torch_private.copy_each(into, tensors)


def wire_of(world: World | None) -> Wire | None:
    """The wire of a world (by default this process's own); None where nothing has to be sent.

    It is made at the first exchange and lives as long as the world.
    """
    world = world or process.current()
    if world.size == 1:
        return None
    wire = world.attached.get("frames")
    if not isinstance(wire, Wire):
        wire = world.attached["frames"] = Wire(world)
    return wire

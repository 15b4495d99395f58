"""The order in which a model is prepared, as plain code, and the record of what was done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hasten.parallel.replicate import first_dtensor
from hasten.protocols import Engine, Transform
from hasten.world.process import World


@dataclass(frozen=True)
class Recipe:
    """What is done to a model: its world, its engine, and the transforms before and after the engine."""

    world: World
    engine: Engine
    before: Sequence[Transform] = ()
    after: Sequence[Transform] = ()


@dataclass(frozen=True)
class Plan:
    """What was done to one model. Prints as a table; the fields hold the same as data.

    `parameter_bytes` and `gradient_bytes` are those of this rank, in bytes; `dtypes` counts elements; `details` is what the engine
    adds as data: for a sharded model a `hasten.parallel.division.Division`.
    """

    model: str
    engine: str
    steps: tuple[str, ...]
    world_size: int
    device: str
    mesh: dict[str, int]
    dtypes: dict[str, int]
    ties: tuple[tuple[str, ...], ...]
    parameter_bytes: int
    gradient_bytes: int
    buffer_bytes: int = 0
    notes: tuple[str, ...] = field(default=())
    details: Any = None

    def __str__(self) -> str:
        rows = [
            ("model", self.model),
            ("engine", f"{self.engine} on {self.world_size} rank{'s' if self.world_size > 1 else ''}, {self.device}"),
            ("mesh", " x ".join(f"{axis}={size}" for axis, size in self.mesh.items()) or "none"),
            ("steps", " > ".join(self.steps)),
            ("elements", ", ".join(f"{count:,} {dtype}" for dtype, count in self.dtypes.items()) or "none"),
            ("ties", "; ".join(" = ".join(group) for group in self.ties) or "none"),
            (
                "bytes per rank",
                f"{self.parameter_bytes:,} parameters, {self.gradient_bytes:,} gradients, {self.buffer_bytes:,} buffers",
            ),
        ]
        rows += [("note", note) for note in self.notes]
        return "\n".join(f"{name:<15} {value}" for name, value in rows)


class Plans(list[Plan]):
    """The plans of several models; prints them one below the other."""

    def __str__(self) -> str:
        return "\n\n".join(map(str, self)) or "nothing has been prepared yet"


def prepare(model: torch.nn.Module, recipe: Recipe, place: bool, evaluation: bool) -> tuple[torch.nn.Module, list[str]]:
    """Prepare a model: transforms on the plain module, then its device, then the engine, then what must see the whole.

    Returns the prepared model and the names of the steps that were taken.

    Args:
        model: the user's model; changed in place where a step can.
        recipe: the steps.
        place: move the model to the world's device; DTensors are never moved.
        evaluation: the model is not trained, so that nothing is exchanged.
    """
    steps: list[str] = []
    for transform in recipe.before:
        model = transform.apply(model)
        steps.append(transform.name)
    empty = any(parameter.is_meta for parameter in model.parameters())  # what gives it values also places it
    if place and not recipe.engine.moves_models and not empty and first_dtensor(model) is None:
        model = model.to(recipe.world.device)
        steps.append(f"to {recipe.world.device}")
    kind = type(model)
    wrapped = recipe.engine.wrap(model, evaluation)
    if type(wrapped) is not kind:
        steps.append(type(wrapped).__name__)
    for transform in recipe.after:
        wrapped = transform.apply(wrapped)
        steps.append(transform.name)
    return wrapped, steps


def describe(model: torch.nn.Module, recipe: Recipe, steps: Sequence[str]) -> Plan:
    """The plan of a prepared model, as the model is now."""
    from hasten.weights import names

    dtypes: Counter[str] = Counter()
    parameter_bytes = gradient_bytes = 0
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        dtypes[str(parameter.dtype).removeprefix("torch.")] += local.numel()
        parameter_bytes += local.numel() * local.element_size()
        gradient_bytes += local.numel() * local.element_size() if parameter.requires_grad else 0
    world = recipe.world
    return Plan(
        model=names.class_name(model),
        engine=recipe.engine.name,
        steps=tuple(steps),
        world_size=world.size,
        device=str(world.device),
        mesh=recipe.engine.axes,
        dtypes=dict(dtypes),
        ties=tuple(tuple(group) for group in names.find_ties(model)),
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        notes=tuple(recipe.engine.notes(model)),
        details=recipe.engine.details(model),
    )

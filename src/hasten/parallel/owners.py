"""Optimizers that need whole matrices: each parameter has an owner, to whom its shards travel for the time of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from hasten.world import torch_private


def sharded_axis(parameter: Any) -> int | None:
    """The axis of its mesh over which a parameter is divided; None if every rank has it whole.

    Raises:
        NotImplementedError: it is divided over several axes, or otherwise than in equal pieces.
    """
    if not isinstance(parameter, DTensor):
        return None
    axes = [axis for axis, placement in enumerate(parameter.placements) if type(placement) is not Replicate]
    if len(axes) > 1 or any(type(parameter.placements[axis]) is not Shard for axis in axes):
        raise NotImplementedError(
            f"A parameter of shape {tuple(parameter.shape)} has the placements {parameter.placements}. Optimizers that do not work "
            "on DTensors can have parameters that are divided along one axis of the mesh only."
        )
    return axes[0] if axes else None


class WholeParameters:
    """Lets an optimizer see whole parameters while it steps: each rank those that it owns, with their gradients.

    On the other ranks a parameter has no gradient meanwhile, which optimizers leave alone. Parameters and gradients go to their
    owners in one collective per format, the new values come back in one. A rank holds whole copies of its own parameters, and of
    their gradients, during the step only; the state of a parameter lives on its owner. Copies of shards (HSDP) step each by
    themselves.
    """

    name = "whole parameters, each on its owner"

    def __init__(self) -> None:
        self.owners: dict[Any, int] = {}
        self._loads: dict[dist.ProcessGroup, list[int]] = {}

    def give(self, owners: Mapping[Any, int]) -> None:
        """Let parameters have these owners, e.g. those of a run that is resumed; all ranks must call this with the same."""
        self.owners, self._loads = dict(owners), {}
        for parameter, owner in owners.items():
            if (axis := sharded_axis(parameter)) is not None:
                mesh = parameter.device_mesh
                loads = self._loads.setdefault(mesh.get_group(axis), [0] * mesh.size(axis))
                loads[owner] += parameter.numel()

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Choose owners for the parameters that have none, and let go of the state of those that other ranks own.

        The largest are given away first, each to the rank that has least; who has an owner keeps it. All ranks must call this:
        state that is divided is gathered.
        """
        spread = _spread(optimizer)
        for parameter, axis in sorted(spread, key=lambda pair: -pair[0].numel()):
            if parameter not in self.owners:
                mesh = parameter.device_mesh
                loads = self._loads.setdefault(mesh.get_group(axis), [0] * mesh.size(axis))
                self.owners[parameter] = owner = loads.index(min(loads))
                loads[owner] += parameter.numel()
        kept = [(parameter, axis) for parameter, axis in spread if optimizer.state.get(parameter)]
        places = [
            (parameter, key)
            for parameter, _ in kept
            for key, value in optimizer.state[parameter].items()
            if isinstance(value, DTensor) and sharded_axis(value) is not None
        ]
        wholes = gather(
            [optimizer.state[parameter][key] for parameter, key in places],
            [self.owners[parameter] for parameter, _ in places],
        )
        for (parameter, key), whole in zip(places, wholes, strict=True):
            optimizer.state[parameter][key] = whole
        for parameter, axis in kept:
            owned = self.owners[parameter] == parameter.device_mesh.get_local_rank(axis)
            state = optimizer.state[parameter] if owned else {}
            optimizer.state[parameter] = {
                key: value.to_local() if isinstance(value, DTensor) else value for key, value in state.items()
            }

    def divide_state(self, optimizer: Any) -> None:
        """Turn the state into DTensors, the same on all ranks, e.g. to save it; the next step takes it back.

        What has the shape of its parameter is divided as that is; everything else every rank gets. All ranks must call this.
        """
        self.settle(optimizer)
        spread = _spread(optimizer)
        told = _told(optimizer, spread)
        wholes: list[Tensor | None] = []
        targets: list[Any] = []
        owners: list[int] = []
        for number, (parameter, axis) in enumerate(spread):
            own, state = optimizer.state.get(parameter) or {}, {}
            for key, form in told.get(number, {}).items():
                if not isinstance(form, Form):
                    state[key] = own.get(key, form)
                elif form.shape == parameter.shape:
                    state[key] = torch.empty_like(parameter, dtype=form.dtype, requires_grad=False)
                    wholes.append(own.get(key))
                    targets.append(state[key])
                    owners.append(self.owners[parameter])
                else:
                    state[key] = _to_all(own.get(key), form, parameter, axis, self.owners[parameter])
            if state:
                optimizer.state[parameter] = state
        scatter(wholes, targets, owners)

    @contextmanager
    def around(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Inside, the optimizer holds whole parameters; afterwards the shards have their new values."""
        self.settle(optimizer)
        moved = [each for each in _listed(optimizer) if each in self.owners and each.grad is not None]
        gradients = [parameter.grad.redistribute(placements=parameter.placements) for parameter in moved]
        owners = [self.owners[parameter] for parameter in moved]
        found = gather([*moved, *gradients], [*owners, *owners])
        wholes = {
            parameter: _with_gradient(value, gradient)
            for parameter, value, gradient in zip(moved, found[: len(moved)], found[len(moved) :], strict=True)
            if value is not None
        }
        del found, gradients
        others = [parameter for parameter in moved if parameter not in wholes]
        with standing_in(optimizer, wholes, others):
            yield
        scatter([wholes[parameter].detach() if parameter in wholes else None for parameter in moved], moved, owners)
        # Whether there is a state must be the same on all ranks: where there is none, torch takes a step before it loads one.
        for parameter in moved:
            optimizer.state.setdefault(parameter, {})


def _listed(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _spread(optimizer: torch.optim.Optimizer) -> list[tuple[Any, int]]:
    """The parameters that are divided, and the axis of each."""
    return [(each, axis) for each in _listed(optimizer) if (axis := sharded_axis(each)) is not None]


class Form(NamedTuple):
    """What a tensor looks like."""

    shape: torch.Size
    dtype: torch.dtype


def _form(value: Tensor) -> Any:
    # A single number travels by itself; on the CPU, since a pickle would put it onto the sender's device.
    return value.cpu() if value.numel() == 1 else Form(value.shape, value.dtype)


def _told(optimizer: torch.optim.Optimizer, spread: Sequence[tuple[Any, int]]) -> dict[int, dict[str, Any]]:
    """For the number of each parameter that has a state: forms of its tensors, and its other values, from the owner."""
    own: dict[dist.ProcessGroup, dict[int, dict[str, Any]]] = {}
    for number, (parameter, axis) in enumerate(spread):
        told = own.setdefault(parameter.device_mesh.get_group(axis), {})
        if state := optimizer.state.get(parameter):
            told[number] = {key: _form(value) if isinstance(value, Tensor) else value for key, value in state.items()}
    found: dict[int, dict[str, Any]] = {}
    for group, told in own.items():
        everybody: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everybody, told, group=group)
        for each in everybody:
            found |= each
    return found


def _to_all(whole: Tensor | None, form: Form, parameter: Any, axis: int, owner: int) -> DTensor:
    """A tensor of another shape than its parameter, from the owner to every rank."""
    mesh = parameter.device_mesh
    if whole is None:
        whole = torch.empty(form.shape, dtype=form.dtype, device=parameter.to_local().device)
    whole = whole.contiguous()
    dist.broadcast(whole, group=mesh.get_group(axis), group_src=owner)
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _with_gradient(value: Tensor, gradient: Tensor | None) -> nn.Parameter:
    parameter = nn.Parameter(value)
    parameter.grad = gradient
    return parameter


@contextmanager
def standing_in(
    optimizer: torch.optim.Optimizer, stand_ins: dict[Any, nn.Parameter], others: Sequence[Any] = ()
) -> Iterator[None]:
    """Inside, an optimizer holds other tensors, under their own state; `others` have no gradient."""
    state, groups = optimizer.state, [(group, group["params"]) for group in optimizer.param_groups]
    hidden = [(parameter, parameter.grad) for parameter in others]
    try:
        for parameter, _ in hidden:
            parameter.grad = None
        for parameter, other in stand_ins.items():
            if parameter in state:
                state[other] = state.pop(parameter)
        for group, parameters in groups:
            group["params"] = [stand_ins.get(parameter, parameter) for parameter in parameters]
        yield
    finally:
        for group, parameters in groups:
            group["params"] = parameters
        for parameter, other in stand_ins.items():
            if other in state:
                state[parameter] = state.pop(other)
        for parameter, gradient in hidden:
            parameter.grad = gradient


# -- moving ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def gather(tensors: Sequence[DTensor], owners: Sequence[int]) -> list[Tensor | None]:
    """Each tensor as a whole on its owner, and None elsewhere; one collective per format and set of ranks."""
    found: list[Tensor | None] = [None] * len(tensors)
    for route in _routes(tensors, owners):
        for index, whole in route.gather().items():
            found[index] = whole
    return found


@torch.no_grad()
def scatter(wholes: Sequence[Tensor | None], tensors: Sequence[DTensor], owners: Sequence[int]) -> None:
    """Write what the owners have into the shards of all ranks; one collective per format and set of ranks."""
    for route in _routes(tensors, owners):
        route.scatter(wholes)


def _routes(tensors: Sequence[DTensor], owners: Sequence[int]) -> list[_Route]:
    routes: dict[Any, _Route] = {}
    for index, (tensor, owner) in enumerate(zip(tensors, owners, strict=True)):
        axis = sharded_axis(tensor)
        assert axis is not None
        group = tensor.device_mesh.get_group(axis)
        local = tensor.to_local()
        route = routes.setdefault((group, local.dtype, local.device), _Route(group))
        shapes = pieces(tuple(tensor.shape), tensor.placements[axis].dim, dist.get_world_size(group))  # type: ignore[attr-defined]
        route.add(index, owner, local, shapes, tensor.placements[axis].dim)  # type: ignore[attr-defined]
    return list(routes.values())


@lru_cache(maxsize=4096)
def pieces(shape: tuple[int, ...], dim: int, count: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of the pieces into which a tensor is divided over `count` ranks; the last ones may be empty."""
    length, step = shape[dim], -(-shape[dim] // count)
    sizes = [min(step, max(0, length - step * index)) for index in range(count)]
    return tuple((*shape[:dim], size, *shape[dim + 1 :]) for size in sizes)


class _Route:
    """Shards of one format among the same ranks, which are moved together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._for_owners: list[list[tuple[int, Tensor]]] = [[] for _ in range(self.size)]
        self._mine: list[tuple[int, tuple[tuple[int, ...], ...], int]] = []

    def add(self, index: int, owner: int, local: Tensor, shapes: tuple[tuple[int, ...], ...], dim: int) -> None:
        """Take one more tensor along: its place in the list, this rank's shard, the shapes of all, and where they meet."""
        self._for_owners[owner].append((index, local))
        if owner == self.rank:
            self._mine.append((index, shapes, dim))

    def _locals(self) -> list[Tensor]:
        return [local for owned in self._for_owners for _, local in owned]

    def _counts(self) -> tuple[list[int], list[int]]:
        """How many elements each owner, and each rank, has of what the other has."""
        for_owners = [sum(local.numel() for _, local in owned) for owned in self._for_owners]
        of_ranks = [sum(math.prod(shapes[rank]) for _, shapes, _ in self._mine) for rank in range(self.size)]
        return for_owners, of_ranks

    def gather(self) -> dict[int, Tensor]:
        """The whole tensors that this rank owns, by their place in the list."""
        for_owners, of_ranks = self._counts()
        flat = torch.cat([local.reshape(-1) for local in self._locals()])
        found = flat.new_empty(sum(of_ranks))
        dist.all_to_all_single(found, flat, of_ranks, for_owners, group=self.group)
        parts = found.split([math.prod(shapes[rank]) for rank in range(self.size) for _, shapes, _ in self._mine])
        wholes = {}
        for place, (index, shapes, dim) in enumerate(self._mine):
            own = parts[place :: len(self._mine)]
            wholes[index] = torch.cat([part.view(shape) for part, shape in zip(own, shapes, strict=True)], dim)
        return wholes

    def scatter(self, wholes: Sequence[Tensor | None]) -> None:
        """Write the whole tensors into the shards."""
        for_owners, of_ranks = self._counts()
        local = self._locals()
        cut = [_cut(wholes[index], shapes, dim) for index, shapes, dim in self._mine]
        flat = [parts[rank].reshape(-1) for rank in range(self.size) for parts in cut]
        sent = torch.cat(flat) if flat else local[0].new_empty(0)
        found = sent.new_empty(sum(for_owners))
        dist.all_to_all_single(found, sent, for_owners, of_ranks, group=self.group)
        parts = found.split([each.numel() for each in local])
        torch_private.copy_each(local, [part.view(each.shape) for part, each in zip(parts, local, strict=True)])


def _cut(whole: Tensor | None, shapes: tuple[tuple[int, ...], ...], dim: int) -> Sequence[Tensor]:
    assert whole is not None
    return whole.split([shape[dim] for shape in shapes], dim)

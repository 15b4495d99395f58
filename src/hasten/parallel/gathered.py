"""Whole parameters for a while: inside, a sharded model is an ordinary module with plain tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hasten.collectives.broadcast import broadcast
from hasten.parallel.methods import registered
from hasten.weights.parts import copy_own_part
from hasten.weights.whole import AT_ONCE, gather_whole, own_name
from hasten.world import torch_private
from hasten.world.frames import frames_of
from hasten.world.process import World

_SHOWN = 3


@contextmanager
def gathered(
    model: nn.Module, world: World, writeback: bool = False, dtype: torch.dtype | None = None
) -> Iterator[nn.Module]:
    """Let a model have whole parameters inside; see `Accelerator.gathered`."""
    units = _units(model, world, writeback, dtype)
    try:
        for unit in units:
            unit.gather("gathered", writeback, dtype)
        yield model
        for unit in units:
            unit.check(writeback)
    except BaseException:
        for unit in units:
            unit.put_back()
        raise
    for unit in units:
        unit.finish(writeback)


def gathered_units(
    model: nn.Module, world: World, writeback: bool = False, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, dict[str, nn.Parameter]]]:
    """Let one unit of a model after the other have whole parameters; see `Accelerator.gathered_units`."""
    for unit in _units(model, world, writeback, dtype):
        if not unit.places:
            continue
        try:
            yield unit.name, unit.gather("gathered_units", writeback, dtype)
            unit.check(writeback)
        except BaseException:
            unit.put_back()
            raise
        unit.finish(writeback)


def _check(model: nn.Module, world: World, writeback: bool, dtype: torch.dtype | None) -> None:
    if writeback and dtype is not None:
        raise ValueError(
            f"gathered(writeback=True, dtype={dtype}): values that are kept must not be rounded on their way. Leave `dtype` out."
        )
    busy = [name for name, module in _sharded(model) if not torch_private.is_resting(module)]
    if busy:
        raise RuntimeError(
            f"Rank {world.rank}: parameters can not be gathered while {busy[0] or type(model).__name__!r} is in a forward or "
            "backward pass. Gather them before or after it; after an error in a pass call `model.reset_iter_state()` first."
        )


def _sharded(model: nn.Module) -> list[tuple[str, Any]]:
    return [(own_name(name), module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def _units(model: nn.Module, world: World, writeback: bool, dtype: torch.dtype | None) -> list[_Unit]:
    """Each sharded module with the modules beneath it that are in no inner one; a plain model is one unit."""
    _check(model, world, writeback, dtype)
    for _, module in _sharded(model):
        module.reshard()  # also what a forward pass without a backward pass has left whole
    units = {
        name: _Unit(own_name(name), world, [module] if isinstance(module, FSDPModule) else [])
        for name, module in model.named_modules()
        if module is model or isinstance(module, FSDPModule)
    }
    homes: dict[int, _Unit] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                unit = homes.setdefault(id(parameter), _home(units, name))
                unit.add(own_name(f"{name}.{key}" if name else key), module, key)
    return list(units.values())  # one without parameters has hooks all the same


def _home(units: dict[str, _Unit], name: str) -> _Unit:
    while name not in units:
        name = name.rpartition(".")[0]
    return units[name]


class _Unit:
    """Parameters that are whole together, wherever in the model they are found, so that ties hold.

    Args:
        name: of the unit's module.
        world: the ranks.
        sharded: the unit's module, if it is sharded.
    """

    def __init__(self, name: str, world: World, sharded: list[Any]) -> None:
        self.name = name
        self.world = world
        self.sharded = sharded
        self.before: dict[int, Any] = {}
        self.names: dict[int, str] = {}
        self.places: dict[int, list[tuple[nn.Module, str]]] = {}
        self.inside: dict[int, nn.Parameter] = {}
        self.versions: dict[int, int] = {}
        self.methods: list[tuple[nn.Module, str, Any]] = []
        self.hooks: list[tuple[dict[Any, Any], list[tuple[Any, Any]]]] = []

    def add(self, name: str, module: nn.Module, key: str) -> None:
        """Take a parameter in, with one place where the model has it."""
        parameter = module._parameters[key]
        self.before[id(parameter)] = parameter
        self.names.setdefault(id(parameter), name)
        self.places.setdefault(id(parameter), []).append((module, key))

    def gather(self, operation: str, writeback: bool, dtype: torch.dtype | None) -> dict[str, nn.Parameter]:
        """Put whole parameters into the modules; returns them by name."""
        divided = {key: value for key, value in self.before.items() if isinstance(value, DTensor)}
        if divided and self.world.size > 1:
            frames_of(self.world).agree(operation, unit=self.name, writeback=writeback, dtype=str(dtype))
        self.inside = dict(self.before)
        # Tensors made in inference mode could not tell whether they were changed.
        with torch.inference_mode(False):
            wholes = gather_whole(list(divided.values()), self.world, dtype)
            for key, whole in zip(divided, wholes, strict=True):
                self.inside[key] = nn.Parameter(whole, requires_grad=self.before[key].requires_grad)
        self._set(self.inside)
        self._silence()
        self.versions = {key: parameter._version for key, parameter in self.inside.items()}
        return {self.names[key]: parameter for key, parameter in self.inside.items()}

    def _set(self, parameters: dict[int, Any]) -> None:
        for key, places in self.places.items():
            for module, name in places:
                module._parameters[name] = parameters[key]

    def _silence(self) -> None:
        """Take away what gathers and frees, from `forward` and from methods like it: there is nothing to gather."""
        for module in self.sharded:
            for name, plain in registered(module).items():
                self.methods.append((module, name, module.__dict__[name]))
                module.__dict__[name] = plain
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                held = list(hooks.items())
                self.hooks.append((hooks, held))
                for key, hook in held:
                    if torch_private.is_sharding_hook(hook):
                        del hooks[key]

    def put_back(self) -> None:
        """Let the modules have their shards again."""
        if self.inside:
            self._set(self.before)
        for hooks, held in self.hooks:
            present = dict(hooks)
            order = [(key, hook) for key, hook in held if key in present or torch_private.is_sharding_hook(hook)]
            added = [(key, hook) for key, hook in present.items() if all(key != other for other, _ in held)]
            hooks.clear()
            hooks.update([*order, *added])
        for module, name, method in self.methods:
            module.__dict__[name] = method
        self.hooks, self.methods, self.inside = [], [], {}

    def check(self, writeback: bool) -> None:
        """Raise if something was done inside that would be lost, or can not be kept.

        Raises:
            ValueError: the message says what.
        """
        inside = self.inside.items()
        if lost := [self.names[key] for key, each in inside if each is not self.before[key] and each.grad is not None]:
            raise ValueError(
                f"Rank {self.world.rank}: a backward pass inside gave gradients to whole parameters ({_some(lost)}), which are not "
                "averaged over the ranks and end here. Run it outside; other methods than `forward` are made known with "
                "`accelerator.register_forward_method(model, name)`."
            )
        found = {key: [module._parameters.get(name) for module, name in places] for key, places in self.places.items()}
        replaced = {key for key, each in inside if any(now is not each for now in found[key])}
        changed = [self.names[key] for key, each in inside if key in replaced or each._version != self.versions[key]]
        if changed and not writeback:
            raise ValueError(
                f"Rank {self.world.rank}: parameters were changed inside ({_some(changed)}), but changes are not kept. Pass "
                "`writeback=True`."
            )
        reshaped = {key for key, each in inside if each.shape != self.before[key].shape}
        for key in replaced | reshaped:
            self.inside[key] = self._replacement(key, found[key])

    def _replacement(self, key: int, found: list[nn.Parameter | None]) -> nn.Parameter:
        """The parameter that the user has put in the place of a whole one."""
        first, shape = found[0], self.before[key].shape
        if first is None or any(each is not first for each in found) or first.shape != shape:
            raise ValueError(
                f"Rank {self.world.rank}: {self.names[key]} can be kept only as a tensor of the shape {list(shape)}, "
                f"the same one in each of the {len(found)} places where the model has it. Change it in place, "
                "or reshape the model before it is prepared."
            )
        return first

    def finish(self, writeback: bool) -> None:
        """Keep the values of rank 0, if they are to be kept, and let the modules have their shards again."""
        inside = self.inside
        self.put_back()
        if not writeback or not inside:
            return
        for module in self.sharded:
            torch_private.spoil_graphs(module)
        with torch.no_grad():
            for keys in self._together(inside):
                values = {self.names[key]: inside[key].detach() for key in keys}
                found = broadcast(values, from_process=0, world=self.world)
                for key in keys:
                    copy_own_part(self.before[key], found[self.names[key]])

    def _together(self, inside: dict[int, nn.Parameter]) -> Iterator[list[int]]:
        group: list[int] = []
        filled = 0
        for key, parameter in inside.items():
            if group and filled + parameter.nbytes > AT_ONCE:
                yield group
                group, filled = [], 0
            group.append(key)
            filled += parameter.nbytes
        if group:
            yield group


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")

"""Where the values of a model come from that is sharded: its own, a function, or those that one process has."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hasten.collectives.broadcast import broadcast
from hasten.collectives.objects import broadcast_object_list, gather_object
from hasten.weights.parts import copy_own_part
from hasten.world.process import World

_PLAIN = (torch.Tensor, nn.Parameter)
_TOGETHER = 64 << 20  # bytes that travel in one exchange; a larger tensor travels alone
_SHOWN = 5
_LOOKED_AT = 8  # elements of a tensor

# Shape and type of each tensor, and whether it has values.
_Told = dict[str, tuple[list[int], torch.dtype, bool]]


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give memory, with no values in it, to the tensors of a model that are on the meta device: to shards their size.

    The tensors stay the objects that they are, so that ties and optimizers keep them.
    """
    empty = {id(tensor): tensor for _, tensor in _tensors(model) if tensor.is_meta}
    for tensor in empty.values():
        _become(tensor, torch.empty_like(tensor, device=device))
    if empty and any(isinstance(module, FSDPModule) for module in model.modules()):
        model._apply(lambda tensor: tensor)  # sharded modules look at their tensors again


class Initialisation:
    """Gives values to modules on the meta device, when the unit that they are in is about to be sharded.

    Args:
        model: the model.
        function: is called with each module that has tensors on the meta device, and gives them memory and values, e.g.
            `module.to_empty(device="cpu", recurse=False)` and `module.reset_parameters()`. Each rank must draw the same.
    """

    def __init__(self, model: nn.Module, function: Callable[[nn.Module], Any]) -> None:
        self._model = model
        self._function = function
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self._ties = [group for group in names.values() if len(group) > 1]

    def apply(self, modules: Iterable[nn.Module]) -> None:
        """Give values to some modules and to what is beneath them; what was tied stays tied.

        Raises:
            ValueError: the function left a tensor without values.
        """
        within = {id(each): each for module in modules for each in module.modules()}
        empty = [module for module in within.values() if _own_empty(module)]
        for module in empty:
            self._function(module)
            if left := _own_empty(module):
                raise ValueError(
                    f"param_init_fn left {', '.join(left)} of a {type(module).__name__} on the meta device. It is called with each "
                    'module and must give values to its own tensors, e.g. `module.to_empty(device="cpu", recurse=False)` and '
                    "then `module.reset_parameters()`."
                )
        for first, *others in self._ties if empty else ():
            parameter = self._model.get_parameter(first)
            for name in others:
                owner, _, key = name.rpartition(".")
                setattr(self._model.get_submodule(owner), key, parameter)


def _own_empty(module: nn.Module) -> list[str]:
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return [name for name, tensor in own if tensor.is_meta]


def find_different(model: nn.Module, world: World) -> str | None:
    """The first parameter or buffer of which ranks have different values, looking at a few of each; None if there is none.

    Call it on every rank. What is exchanged does not grow with the model unless something differs.

    Raises:
        ValueError: ranks have different tensors; names one of them, on every rank.
    """
    own = {
        name: (str(list(tensor.shape)), b"" if tensor.is_meta else _sample(tensor)) for name, tensor in _tensors(model)
    }
    digest = hashlib.blake2b(repr(own).encode(), digest_size=16).digest()
    if len(set(gather_object([digest], world=world))) == 1:
        return None
    told: list[Any] = [own]
    broadcast_object_list(told, world=world)
    found = gather_object([_difference(told[0], own, world.rank)], world=world)
    if problem := next((problem for _, problem in found if problem), None):
        raise ValueError(f"The processes must build the same model to share it, but {problem}")
    return next((name for name, _ in found if name), None)


_Seen = dict[str, tuple[str, bytes]]  # shape and sample of each tensor


def _difference(first: _Seen, own: _Seen, rank: int) -> tuple[str | None, str | None]:
    """A tensor whose values differ from those of rank 0, and what is wrong if they are not even of one shape."""
    for name in {**first, **own}:
        shapes = [seen[name][0] if name in seen else "not there" for seen in (first, own)]
        if shapes[0] != shapes[1]:
            return name, f"{name} is {shapes[0]} on rank 0 and {shapes[1]} on rank {rank}."
    return next(
        (name for name, (_, sample) in own.items() if sample and first[name][1] not in (b"", sample)), None
    ), None


def _sample(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _LOOKED_AT)]
    return flat[:_LOOKED_AT].contiguous().cpu().view(torch.uint8).numpy().tobytes()


class ValuesOfFirst:
    """The values that the model of rank 0 has, and those of the other ranks need not have.

    Making it takes the values away, so that the model can be sharded without memory; `spread` then gives each rank its part.

    Args:
        model: the same model on every rank; its parameters are on the meta device afterwards. Parameters that are more than a
            tensor (quantized ones) are left alone.
        world: the ranks.

    Raises:
        ValueError: rank 0 has no values either, or another rank has another model. On every rank.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self.world = world
        own = _tell(model)
        told: list[Any] = [own]
        broadcast_object_list(told, world=world)
        self._told: _Told = told[0]
        problems = gather_object([_problem(self._told, own, world.rank)], world=world)
        if found := [problem for problem in problems if problem]:
            raise ValueError(f"cpu_ram_efficient_loading gives every rank the values of rank 0, but {found[0]}")
        self._values: dict[str, torch.Tensor] = {}
        for name, parameter in _tensors(model):
            if isinstance(parameter, nn.Parameter):
                values = _become(parameter, torch.empty_like(parameter, dtype=self._told[name][1], device="meta"))
                self._values[name] = values.detach()
            elif world.is_main:
                self._values[name] = parameter
        if not world.is_main:
            self._values.clear()

    def spread(self, model: nn.Module, device: torch.device) -> None:
        """Fill a model, now sharded, with the values: each rank gets what it holds. Call it on every rank, once.

        No rank but the first ever holds more than its part and one exchange, which is the largest tensor or 64 MiB.
        """
        materialise(model, device)
        targets = dict(_tensors(model))
        with torch.no_grad():
            for names in self._exchanges():
                whole = {name: self._whole(name) for name in names}
                broadcast(whole, world=self.world)
                for name, tensor in whole.items():
                    copy_own_part(targets[name], tensor)

    def _whole(self, name: str) -> torch.Tensor:
        shape, dtype, _ = self._told[name]
        return self._values.pop(name).contiguous() if self.world.is_main else torch.empty(shape, dtype=dtype)

    def _exchanges(self) -> Iterator[list[str]]:
        names: list[str] = []
        size = 0
        for name, (shape, dtype, _) in self._told.items():
            own = torch.Size(shape).numel() * dtype.itemsize
            if names and size + own > _TOGETHER:
                yield names
                names, size = [], 0
            names.append(name)
            size += own
        if names:
            yield names


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, each once, that are no more than a tensor."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if type(tensor) in _PLAIN or isinstance(tensor, DTensor):
            yield name, tensor


def _become(tensor: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Let a tensor be another one and stay the same object; returns one that is what it was."""
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, tensor.requires_grad)
    new.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, new)
    return new


def _tell(model: nn.Module) -> _Told:
    return {name: (list(tensor.shape), tensor.dtype, not tensor.is_meta) for name, tensor in _tensors(model)}


def _problem(first: _Told, own: _Told, rank: int) -> str | None:
    """Why a rank can not take over what the first one has."""
    empty = [name for name, (_, _, has_values) in first.items() if not has_values]
    if empty:
        return f"there {_some(empty)} on the meta device. Load the model's weights on rank 0."
    different = [name for name in {**first, **own} if first.get(name, ())[:1] != own.get(name, ())[:1]]
    if different:
        return (
            f"rank {rank} has another model: {_some(different)} not there on both, or of another shape. Build the same model on "
            "all ranks."
        )
    return None


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return f"{shown} {'are' if len(names) > 1 else 'is'}"

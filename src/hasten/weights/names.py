"""Which tensors share memory, and which names of shared memory a file should hold."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

_PUT_IN_FRONT = ("FSDP", "Recomputed")  # of the name of a class, by a class made of it


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Device, address and bytes of a tensor's storage: equal for tensors that share memory.

    Tensors on the meta device have no memory: their address is always 0.
    """
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


@dataclass(frozen=True)
class _Extent:
    """The bytes that a tensor occupies in its memory, and whether it uses every one of them."""

    memory: tuple[Any, ...]
    start: int
    end: int
    view: tuple[Any, ...]
    dense: bool

    def covers(self, other: _Extent) -> bool:
        """Whether everything in `other` can be found in this one. Both lie in the same memory."""
        if self.view == other.view:
            return True
        return self.dense and self.start <= other.start and other.end <= self.end


def _extent(tensor: torch.Tensor) -> _Extent:
    try:
        memory = id_tensor_storage(tensor)
    except (RuntimeError, NotImplementedError):  # a subclass that has no memory of its own
        memory = tensor.device, 0, 0
    view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
    if memory[1] == 0 or tensor.numel() == 0:
        # Nothing to share but the object itself.
        return _Extent((id(tensor),), 0, 1, view, dense=True)
    size = tensor.element_size()
    span = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * size
    return _Extent(memory, start, start + int(span) * size, view, dense=span == tensor.numel())


def _overlapping(extents: Mapping[str, _Extent]) -> list[list[str]]:
    """Names of tensors with bytes in common; every name is in exactly one group, groups and names keep their order."""
    by_memory: dict[tuple[Any, ...], list[str]] = {}
    for name, extent in extents.items():
        by_memory.setdefault(extent.memory, []).append(name)
    groups: list[list[str]] = []
    for names in by_memory.values():
        end = -1
        for name in sorted(names, key=lambda name: extents[name].start):
            if extents[name].start >= end:
                groups.append([])
            groups[-1].append(name)
            end = max(end, extents[name].end)
    order = {name: place for place, name in enumerate(extents)}
    return sorted((sorted(group, key=order.__getitem__) for group in groups), key=lambda group: order[group[0]])


def shared_names(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Groups of two and more names whose tensors have bytes in common, in the order of the mapping."""
    return [
        group for group in _overlapping({name: _extent(tensor) for name, tensor in tensors.items()}) if len(group) > 1
    ]


def class_name(module: torch.nn.Module) -> str:
    """The name of the class that a module had before it was prepared: sharding and recomputation put one of theirs in front."""
    kind = type(module)
    while len(kind.__bases__) == 2 and kind.__name__ in (
        f"{word}{kind.__bases__[1].__name__}" for word in _PUT_IN_FRONT
    ):
        kind = kind.__bases__[1]
    return kind.__name__


def find_ties(model: torch.nn.Module) -> list[list[str]]:
    """Groups of qualified names of a model's parameters and buffers that are the same memory.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    >>> model[1].weight = model[0].weight
    >>> find_ties(model)
    [['0.weight', '1.weight']]
    """
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    return shared_names(tensors)


def without_shared(state_dict: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What a file must hold so that nothing is lost, and which other name stands for each one left out.

    A name is left out only if all its values are found in a tensor that stays: halves of one tensor both stay. Of equal
    tensors the first stays. The mapping itself is not changed.

    Returns:
        The tensors that stay, in their order, and a dictionary from each name that goes to the one that stands for it.

    Raises:
        TypeError: a value is not a tensor.
    """
    others = [f"{name!r} ({type(value).__name__})" for name, value in state_dict.items() if not torch.is_tensor(value)]
    if others:
        raise TypeError(
            f"safetensors files hold tensors only, but these entries are something else: {', '.join(others)}. Remove them, make "
            "them tensors, or use `safe_serialization=False`."
        )
    extents = {name: _extent(tensor) for name, tensor in state_dict.items()}
    stands_for: dict[str, str] = {}
    for group in _overlapping(extents):
        kept: list[str] = []
        # The sort is stable, so of equally large tensors the first stays.
        for name in sorted(group, key=lambda name: extents[name].start - extents[name].end):
            holder = next((other for other in kept if extents[other].covers(extents[name])), None)
            if holder is None:
                kept.append(name)
            else:
                stands_for[name] = holder
    return {name: tensor for name, tensor in state_dict.items() if name not in stands_for}, stands_for


def clean_state_dict_for_safetensors(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dictionary that safetensors can hold: without names that repeat another one's memory, and contiguous.

    Leaving names out is logged as a warning, for the file alone does not show the ties. Unlike the reference, this leaves
    the given dictionary as it is, keeps parts of one tensor that do not repeat each other, and keeps empty tensors.

    Raises:
        TypeError: a value is not a tensor.
    """
    kept, stands_for = without_shared(state_dict)
    if stands_for:
        warn_of_ties(stands_for)
    return {name: tensor.contiguous() for name, tensor in kept.items()}


def warn_of_ties(names: Iterable[str]) -> None:
    """Say which names a file leaves out, since their tensors are in it under others."""
    logger.warning(
        "Removed shared tensor %s while saving. This should be OK, but check by verifying that you don't receive any "
        "warning while reloading",
        set(names),
    )

"""Layout: where the tensors of a nested structure lie when they travel together as bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hasten.collectives.nested import ONLY_TENSORS, children, dataclass_values, is_dataclass_instance, unsupported
from hasten.world.agreement import key_text

_Tensor = torch.Tensor
_ALIGNMENT = 16  # bytes: the largest element, complex128


def flatten(name: str, data: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """The tensors of a nested structure in order, and a hashable trace of the containers around them.

    Args:
        name: of the function on whose behalf this is done, for the error.

    Raises:
        TypeError: a leaf is not a tensor.
    """
    leaves: list[torch.Tensor] = []
    trace: list[Any] = []
    try:
        _collect(data, leaves, trace)
    except _Stray as stray:
        raise unsupported(name, stray.leaf, _path_of(data, stray.leaf)) from None
    return leaves, trace


class _Stray(Exception):
    def __init__(self, leaf: object) -> None:
        self.leaf = leaf


def _path_of(data: Any, leaf: object) -> str:
    """The path of an object that is not a tensor."""
    return next((path for path, item in _walk(data) if item is leaf), "")


def _collect(data: Any, leaves: list[torch.Tensor], trace: list[Any]) -> None:
    if isinstance(data, _Tensor):
        leaves.append(data)
        return
    if isinstance(data, dict):
        trace.append(tuple(data))
        items: Any = list(data.values())
    elif isinstance(data, (tuple, list)):
        trace.append(len(data))
        items = data
    elif isinstance(data, Mapping):
        trace.append(tuple(data))
        items = [data[key] for key in data]
    elif is_dataclass_instance(data):
        fields = dataclass_values(data)
        trace += (".", tuple(fields))
        items = list(fields.values())
    else:
        raise _Stray(data)
    if set(map(type, items)) == ONLY_TENSORS:
        trace.append(True)
        leaves += items
        return
    for item in items:
        trace.append(isinstance(item, _Tensor))
        _collect(item, leaves, trace)


def paths(data: Any) -> list[str]:
    """How to reach each tensor of a nested structure, e.g. `['loss'][0]`, in the order of `flatten`."""
    return [path for path, _ in named_tensors(data)]


def named_tensors(data: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a nested structure with their paths; what else is in it does not count."""
    return [(path or "the tensor", item) for path, item in _walk(data) if isinstance(item, _Tensor)]


def _walk(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path."""
    inner = None if isinstance(data, _Tensor) else children(data)
    if inner is None:
        yield path, data
        return
    by_field = not isinstance(data, (Mapping, tuple, list))
    for key, item in inner:
        yield from _walk(item, path + (f".{key}" if by_field else f"[{key_text(key)}]"))


@dataclass(frozen=True)
class Place:
    """Where one tensor lies in the packed bytes."""

    dtype: torch.dtype
    shape: torch.Size
    start: int
    nbytes: int

    def within(self, packed: torch.Tensor) -> torch.Tensor:
        """This tensor as a view of the packed bytes."""
        return packed[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Run:
    """All tensors of one dtype: they lie one after the other without gaps."""

    dtype: torch.dtype
    start: int
    nbytes: int
    members: tuple[int, ...]

    def within(self, packed: torch.Tensor) -> torch.Tensor:
        """This run as a view of the packed bytes of one process, or of all (one row each)."""
        return packed[..., self.start : self.start + self.nbytes].view(self.dtype)


class Layout:
    """The places of some tensors in one buffer of bytes.

    Processes that hold the same names, dtypes and shapes have the same layout, whatever the order of their dictionaries.

    Args:
        names: the path of each tensor.
        tensors: examples; their dtypes and shapes count.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        order = sorted(range(len(tensors)), key=lambda index: (str(tensors[index].dtype), names[index]))
        placed: dict[int, Place] = {}
        runs: list[Run] = []
        start = 0
        for index in order:
            tensor = tensors[index]
            nbytes = tensor.numel() * tensor.element_size()
            if runs and runs[-1].dtype is tensor.dtype:
                last = runs[-1]
                runs[-1] = Run(last.dtype, last.start, last.nbytes + nbytes, (*last.members, index))
            else:
                start = -(-start // _ALIGNMENT) * _ALIGNMENT
                runs.append(Run(tensor.dtype, start, nbytes, (index,)))
            placed[index] = Place(tensor.dtype, tensor.shape, start, nbytes)
            start += nbytes
        self.places = tuple(placed[index] for index in range(len(tensors)))
        self.runs = tuple(runs)
        self.nbytes = start

    def views(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Each tensor as a view of the packed bytes (one dimension), in the order of the tensors."""
        return [place.within(packed) for place in self.places]

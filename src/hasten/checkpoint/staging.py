"""Copies of states in the memory of the host: what they were when the copy was made, whatever training does afterwards."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from hasten.weights.whole import is_divided
from hasten.weights.write import serialized
from hasten.world import torch_private

_AS_THEY_ARE = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


class _NotPlain(Exception):
    """Something in a state is of a type that is not copied here."""


class Staging:
    """Copies nested states; what is shared in the original, tensors' memory included, is shared in the copy, and copied once."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._copies: dict[int, Any] = {}
        self._kept: list[Any] = []  # what has been copied must not give its identity to something new

    def copied(self, state: Any) -> Any:
        """A copy of dictionaries, lists and tuples with tensors; DTensors stay what they are, over copies of their local parts.

        Anything else in it is copied by `copy.deepcopy`.
        """
        return self._copied(state, copy.deepcopy)

    def for_file(self, state: Any) -> Any:
        """What is written later by `torch.save`: a copy, or where that might not be the same to the bit, the file's content."""
        try:
            return self._copied(state, _refuse)
        except (_NotPlain, RecursionError):
            return serialized(state)

    def _copied(self, state: Any, other: Callable[[Any], Any]) -> Any:
        if type(state) in _AS_THEY_ARE:
            return state
        if id(state) not in self._copies:
            self._kept.append(state)
            self._copies[id(state)] = self._new(state, other)
        return self._copies[id(state)]

    def _new(self, state: Any, other: Callable[[Any], Any]) -> Any:
        if is_divided(state):
            return torch_private.with_local(state, self._copied(state.to_local().detach(), other))
        if type(state) in (torch.Tensor, torch.nn.Parameter) and _is_plain(state):
            return self._tensor(state)
        if type(state) is dict:
            return {key: self._copied(value, other) for key, value in state.items()}
        if type(state) is OrderedDict:  # of a module, with the versions of its parts
            ordered = OrderedDict((key, self._copied(value, other)) for key, value in state.items())
            vars(ordered).update(copy.deepcopy(vars(state)))
            return ordered
        if type(state) in (list, tuple):
            return type(state)([self._copied(value, other) for value in state])
        return other(state)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            view = torch.empty(0, dtype=tensor.dtype)
            view.set_(self._storage(tensor), tensor.storage_offset(), tensor.size(), tensor.stride())
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(view, tensor.requires_grad)
        return view.requires_grad_(tensor.requires_grad)

    def _storage(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._kept.append(storage)
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._storages[key] = whole.to("cpu", copy=True).untyped_storage()
        return self._storages[key]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of memory and nothing more."""
    return (
        tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not vars(tensor)
        and tensor._backward_hooks is None
    )


def _refuse(state: Any) -> Any:
    raise _NotPlain

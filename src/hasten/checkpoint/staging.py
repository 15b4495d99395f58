"""Copies of states in the memory of the host: what they were when the copy was made, whatever training does afterwards."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hasten.weights.whole import is_divided
from hasten.world import torch_private


class Staging:
    """Copies nested states; tensors that share memory share it in the copy, too, and are copied once."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self._kept: list[Any] = []  # what has been copied must not give its identity to something new

    def copied(self, state: Any) -> Any:
        """A copy of dictionaries, lists and tuples with tensors; DTensors stay what they are, over copies of their local parts.

        Anything else is copied by `copy.deepcopy`.
        """
        if isinstance(state, torch.Tensor):
            return self._tensor(state)
        if type(state) is dict:
            return {key: self.copied(value) for key, value in state.items()}
        if type(state) in (list, tuple):
            return type(state)(self.copied(value) for value in state)
        if isinstance(state, (str, bytes, int, float, bool, frozenset, type(None), torch.dtype)):
            return state
        if hasattr(state, "items") and hasattr(
            state, "copy"
        ):  # an ordered dictionary, which may have attributes of its own
            shallow = copy.copy(state)
            for key, value in state.items():
                shallow[key] = self.copied(value)
            return shallow
        return copy.deepcopy(state)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._tensors:
            self._kept.append(tensor)
            self._tensors[id(tensor)] = self._copy(tensor)
        return self._tensors[id(tensor)]

    def _copy(self, tensor: Any) -> torch.Tensor:
        with torch.no_grad():
            if is_divided(tensor):
                return torch_private.with_local(tensor, self._tensor(tensor.to_local().detach()))
            tensor = tensor.detach()
            if (
                type(tensor) is not torch.Tensor
                or tensor.layout is not torch.strided
                or tensor.is_conj()
                or tensor.is_neg()
            ):
                return tensor.to("cpu", copy=True)
            view = torch.empty(0, dtype=tensor.dtype)
            return view.set_(self._storage(tensor), tensor.storage_offset(), tensor.size(), tensor.stride())

    def _storage(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._kept.append(storage)
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._storages[key] = whole.to("cpu", copy=True).untyped_storage()
        return self._storages[key]

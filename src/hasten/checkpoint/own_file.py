"""Files of single processes: of a divided state the parts that one process holds, as plain tensors, and where they belong.

They are files of `torch.save` that need neither processes nor meshes to be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hasten.checkpoint.dcp import Place, leaves
from hasten.checkpoint.sidecar import Topology
from hasten.weights.torch_file import LazyTorch
from hasten.world import torch_private

_STATE, _SHARDS = "hasten_state", "hasten_shards"


@dataclass(frozen=True)
class Shard:
    """Where a part belongs.

    Args:
        shape: of the whole tensor.
        start: where the part begins in it, along each dimension.
        placements: how the whole is divided, along each axis of the mesh.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    placements: tuple[str, ...]


def pack(state: Any) -> dict[str, Any]:
    """What is written of a state: this process's parts, tensors that are one and the same once."""
    parts: dict[int, torch.Tensor] = {}
    shards: dict[Place, Any] = {}
    for place, value in leaves(state):
        if isinstance(value, DTensor):
            part = value.to_local().detach()
            # An empty part is a view of memory that is not empty.
            parts.setdefault(id(value), part if part.numel() else torch.empty(part.shape, dtype=part.dtype))
            shards[place] = (tuple(value.shape), torch_private.local_block(value)[1], _words(value))
    return {_STATE: _local(state, parts), _SHARDS: shards}


def _local(state: Any, parts: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(state, dict):
        return {key: _local(value, parts) for key, value in state.items()}
    if isinstance(state, list):
        return [_local(value, parts) for value in state]
    return parts.get(id(state), state)


def _words(tensor: DTensor) -> tuple[str, ...]:
    return tuple(map(str, tensor.placements))


def topology_of(models: Any) -> Topology:
    """How this process holds the parameters of some models."""
    meshes = {
        mesh: None for model in models for each in model.parameters() if (mesh := getattr(each, "device_mesh", None))
    }
    axes, places = [], []
    for mesh in meshes:
        names = mesh.mesh_dim_names or [f"axis {index}" for index in range(mesh.ndim)]
        axes.append(" x ".join(f"{name} {size}" for name, size in zip(names, mesh.shape, strict=True)))
        places.append(", ".join(map(str, mesh.get_coordinate() or ())))
    return Topology("; ".join(axes), "; ".join(places))


class OwnFile:
    """One process's file, whose tensors are read when they are wanted.

    Args:
        path: the file.
        options: arguments of `torch.load`.

    Raises:
        FileNotFoundError: there is no such file.
        RuntimeError: it is damaged, or something else.
    """

    def __init__(self, path: Path, options: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._file = LazyTorch(path, **(options or {}))
        content = self._file.content
        if not isinstance(content, dict) or content.keys() != {_STATE, _SHARDS}:
            raise RuntimeError(f"{path} is not the file of one process of a sharded run.")
        self.state: Any = content[_STATE]
        self.shards: dict[Place, Shard] = {place: Shard(*said) for place, said in content[_SHARDS].items()}

    def at(self, place: Place) -> torch.Tensor:
        """The tensor at a place, whose values have not been read."""
        held = self.state
        for key in place:
            held = held[key]
        return held

    def skeleton(self) -> Any:
        """The state with whole tensors on the meta device."""
        return self._skeleton(self.state, ())

    def _skeleton(self, held: Any, place: Place) -> Any:
        if isinstance(held, torch.Tensor):
            shape = self.shards[place].shape if place in self.shards else held.shape
            return torch.empty(shape, dtype=held.dtype, device="meta")
        if isinstance(held, Mapping):
            return {key: self._skeleton(value, (*place, key)) for key, value in held.items()}
        if isinstance(held, list):
            return [self._skeleton(value, (*place, index)) for index, value in enumerate(held)]
        return held

    def read(self, targets: Mapping[Place, torch.Tensor]) -> None:
        """Read what the file holds of some places into memory of the same shapes: this process's parts of what is divided.

        Raises:
            ValueError: a target is divided otherwise.
        """
        with torch.no_grad():
            self._file.read([self._pair(place, target) for place, target in targets.items()])

    def _pair(self, place: Place, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shard, held = self.shards.get(place), self.at(place)
        other = isinstance(target, DTensor) and shard is not None and shard.placements != _words(target)
        local = target.to_local() if isinstance(target, DTensor) else target
        if other or local.shape != held.shape:
            raise ValueError(
                f"{self.path} holds {'.'.join(map(str, place))} as another division of the model left it: "
                f"{list(held.shape)} {', '.join(shard.placements) if shard else 'undivided'}, where this process has "
                f"{list(local.shape)}. Files of single processes load on the same number of processes and the same mesh only; "
                f"`hasten merge-weights {self.path.parent} OUTPUT` makes plain weights of them."
            )
        return held, local

    def read_into_whole(self, place: Place, whole: torch.Tensor) -> int:
        """Read what the file holds of a place into the whole tensor, where it belongs; returns the number of elements."""
        held, shard = self.at(place), self.shards.get(place)
        region = whole
        for dim, start in enumerate(shard.start if shard is not None and held.numel() else ()):
            region = region.narrow(dim, start, held.shape[dim])
        if held.numel():
            self._file.read([(held, region)])
        return held.numel()

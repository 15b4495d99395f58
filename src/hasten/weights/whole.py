"""Whole tensors from their shards: several in one collective, or one after the other in pieces of a limited size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hasten.world.frames import frames_of
from hasten.world.process import World

AT_ONCE = 64 << 20  # bytes of small tensors that travel together; a larger tensor travels alone


@dataclass(frozen=True)
class _Piece:
    """How a tensor lies in shards: along one of its dimensions, in equal steps of which the last ones may be cut."""

    tensor: Any
    dim: int
    ranks: int

    @property
    def padded(self) -> list[int]:
        """The shape of a shard, if it is not cut."""
        shape = list(self.tensor.shape)
        shape[self.dim] = -(-shape[self.dim] // self.ranks)
        return shape

    @property
    def numel(self) -> int:
        return int(torch.Size(self.padded).numel())

    def fill(self, row: torch.Tensor) -> None:
        """Write this rank's shard into its place; what a cut one leaves free is never read."""
        local = self.tensor.to_local()
        row.view(self.padded).narrow(self.dim, 0, local.shape[self.dim]).copy_(local)

    def join(self, rows: torch.Tensor) -> torch.Tensor:
        """The whole tensor from all ranks' rows, in place if they lie one behind the other and are shards of rows."""
        shape = self.tensor.shape
        if self.dim == 0:
            return rows.reshape(-1)[: shape.numel()].view(shape)
        joined = torch.cat([row.view(self.padded) for row in rows], self.dim)
        return joined.narrow(self.dim, 0, shape[self.dim]).contiguous()


def is_divided(tensor: Any) -> bool:
    """Whether a tensor is a DTensor; nobody can have made one before torch's module for them is imported."""
    import sys

    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def gather_whole(tensors: Sequence[Any], world: World, dtype: torch.dtype | None = None) -> Iterator[torch.Tensor]:
    """The whole tensors of some DTensors on every rank, in their order; plain tensors come as they are.

    All ranks of `world` call it with the same tensors, and are known to be about to. Tensors of one format on one axis of a mesh
    travel in one collective. They are detached, and lie on the world's device.

    Args:
        tensors: the tensors.
        world: the ranks over which they are divided.
        dtype: a format into which floating-point tensors are converted before they travel.
    """
    groups: dict[Any, list[_Piece]] = {}
    places: list[tuple[Any, int] | None] = []
    for tensor in tensors:
        axis = _axis(tensor)
        if axis is None:
            places.append(None)
            continue
        key = tensor.device_mesh, axis, _format(tensor, dtype)
        members = groups.setdefault(key, [])
        places.append((key, len(members)))
        members.append(_Piece(tensor, tensor.placements[axis].dim, tensor.device_mesh.size(axis)))
    found = {key: _exchange(members, key, world) for key, members in groups.items()}
    for tensor, place in zip(tensors, places, strict=True):
        if place is None:
            yield _plain(tensor, world, dtype)
        else:
            key, index = place
            yield groups[key][index].join(found[key][index])


def _axis(tensor: Any) -> int | None:
    """The axis of the mesh over which a tensor is divided in the usual way; None for everything else."""
    if not is_divided(tensor):
        return None
    from torch.distributed.tensor import Shard

    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return axes[0] if len(axes) == 1 and type(tensor.placements[axes[0]]) is Shard and tensor.numel() else None


def _format(tensor: Any, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _plain(tensor: Any, world: World, dtype: torch.dtype | None) -> torch.Tensor:
    with torch.no_grad():
        plain = tensor.detach()
        if is_divided(plain):
            plain = (plain if plain.to_local().device == world.device else plain.to(world.device)).full_tensor()
        return plain.to(_format(plain, dtype))


def _exchange(pieces: list[_Piece], key: tuple[Any, int, torch.dtype], world: World) -> list[torch.Tensor]:
    """Gather what some tensors have on each rank; for each the rows of all ranks."""
    mesh, axis, dtype = key
    frames = frames_of(world)
    sizes = [piece.numel for piece in pieces]
    with torch.no_grad():
        own = torch.empty(sum(sizes), dtype=dtype, device=world.device)
        for piece, row in zip(pieces, own.split(sizes), strict=True):
            piece.fill(row)
        rows = torch.empty(mesh.size(axis), sum(sizes), dtype=dtype, device=world.device)
        frames.gather_into(rows.view(-1), own, mesh.get_group(axis))
        return list(rows.split(sizes, dim=1))


def state_of(model: torch.nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """The tensors of a model's state, each once, with all its names.

    The names are the model's own: torch.compile's `_orig_mod` is left out.
    """
    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            found.setdefault(id(value), ([], value))[0].append(own_name(name))
    return list(found.values())


def own_name(name: str) -> str:
    """A qualified name without what torch.compile has put into it."""
    return name.replace("_orig_mod.", "")


def stream(
    entries: list[tuple[list[str], torch.Tensor]],
    world: World,
    operation: str,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    at_once: int = AT_ONCE,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and whole tensors, on every rank, while no more than one of them, or a few small ones, are whole.

    Args:
        entries: the tensors, each with its names.
        world: the ranks, which all call this and go to the end.
        operation: what errors call it.
        dtype: a format into which floating-point tensors are converted before they travel.
        device: where the tensors shall be; None leaves them where they are gathered.
        at_once: bytes of small tensors that travel together.
    """
    divided = any(is_divided(tensor) for _, tensor in entries)
    for bucket in _buckets(entries, dtype, at_once):
        if divided and world.size > 1:
            # Whoever has left the loop, or iterates over something else, is found out here.
            frames_of(world).agree(operation, tensor=bucket[0][0][0])
        wholes = gather_whole([tensor for _, tensor in bucket], world, dtype)
        for names, _ in bucket:
            whole = next(wholes)
            whole = whole if device is None else whole.to(device)
            for name in names:
                yield name, whole
            del whole  # so that the next one does not find it in memory
        del wholes


def _buckets(
    entries: list[tuple[list[str], torch.Tensor]], dtype: torch.dtype | None, at_once: int
) -> Iterator[list[tuple[list[str], torch.Tensor]]]:
    """Neighbours that have no more than so many bytes together; larger ones alone."""
    bucket: list[tuple[list[str], torch.Tensor]] = []
    filled = 0
    for names, tensor in entries:
        size = tensor.numel() * _format(tensor, dtype).itemsize
        if bucket and filled + size > at_once:
            yield bucket
            bucket, filled = [], 0
        bucket.append((names, tensor))
        filled += size
    if bucket:
        yield bucket

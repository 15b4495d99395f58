"""Which part of a whole tensor this process holds."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hasten.world import torch_private


def own_part(tensor: Any) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The memory in which this process holds a tensor or its part of one, and where that part begins along each dimension.

    Raises:
        ValueError: the part is not one block of the whole tensor.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.dim()
    local = tensor.to_local()
    sizes, starts = torch_private.local_block(tensor)
    if tuple(local.shape) != sizes:
        raise ValueError(
            f"A tensor of shape {tuple(tensor.shape)} is spread over the processes as {tensor.placements}: this process has "
            f"{tuple(local.shape)} of it, which is not one block."
        )
    return local, starts


def copy_own_part(tensor: Any, whole: torch.Tensor) -> None:
    """Overwrite what this process holds of a tensor by the same part of a whole one, converting its type and device."""
    local, starts = own_part(tensor)
    for axis, start in enumerate(starts):
        whole = whole.narrow(axis, min(start, whole.shape[axis]), local.shape[axis])
    local.copy_(whole)

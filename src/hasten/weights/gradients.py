"""Gradients as a list: plain tensors, DTensors on any meshes, or both; their norm, and limits for them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hasten.world import torch_private

_PLAIN = {torch.Tensor}
_TINY = 1e-6  # torch's, against a division by zero


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale the gradients of `parameters` down so that their global norm is at most `max_norm`.

    The norm is that of the whole gradients, the same on every rank; what DTensors spread over ranks is counted once. One
    collective for each axis of the meshes of DTensors, none otherwise.

    Args:
        parameters: a tensor, or tensors in any iterable; those without a gradient do not count.
        max_norm: the largest norm allowed.
        norm_type: p of the p-norm; `inf` for the largest absolute value.

    Returns:
        The norm before, without dimensions; 0 if there is no gradient.

    Raises:
        ValueError: a `norm_type` that is not above 0, with DTensors.
    """
    parameters, gradients = _listed(parameters)
    if not _any_spread(gradients):
        norm, foreach = _plain_norm(gradients, norm_type)
        clip_grads_with_norm_(parameters, max_norm, norm, foreach)
        return norm
    norm = _mixed_norm(gradients, float(norm_type))
    multiply_all(gradients, (max_norm / (norm + _TINY)).clamp(max=1.0))
    return norm


def clip_grad_value_(parameters: Any, clip_value: float) -> None:
    """Limit every element of the gradients of `parameters` to [-clip_value, clip_value]; no collective.

    Raises:
        ValueError: a DTensor that holds a part of a sum: its elements are not known yet.
    """
    parameters, gradients = _listed(parameters)
    if not gradients:
        return
    if not _any_spread(gradients):
        torch.nn.utils.clip_grad_value_(parameters, clip_value)
        return
    for gradient in gradients:
        if _is_spread(gradient) and any(placement.is_partial() for placement in gradient.placements):
            raise ValueError(
                f"clip_grad_value_: a gradient has the placements {gradient.placements}, so that its elements are sums over ranks "
                "that have not been taken yet. Redistribute it first."
            )
    with torch.no_grad():
        for part in local_parts(gradients):
            part.clamp_(-float(clip_value), float(clip_value))


def _listed(parameters: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """Parameters that were given in any way, and the gradients that they have."""
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return listed, [parameter.grad for parameter in listed if parameter.grad is not None]


def multiply_all(tensors: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply tensors in place by a number; of a DTensor, this rank's part."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for part in local_parts(tensors):
        groups.setdefault((part.device, part.dtype, part.layout), []).append(part)
    with torch.no_grad():
        for (device, dtype, layout), group in groups.items():
            own = factor.to(device=device, dtype=dtype) if isinstance(factor, torch.Tensor) else factor
            if layout is torch.strided:
                torch_private.multiply_each(group, own)
            else:
                for part in group:
                    part.mul_(own)


def local_parts(tensors: Iterable[Any]) -> list[torch.Tensor]:
    """What of each tensor lies on this rank; writing to it writes to the tensor."""
    return [tensor.to_local() if _is_spread(tensor) else tensor for tensor in tensors]


def _plain_norm(gradients: list[torch.Tensor], norm_type: float) -> tuple[torch.Tensor, bool | None]:
    """The norm, and whether these tensors are known to have operations on all at once."""
    # If it is told nothing, torch asks every tensor for its type, which takes as long as the norm of a small one.
    try:
        return get_total_norm(gradients, norm_type, foreach=True), True
    except RuntimeError:
        return get_total_norm(gradients, norm_type), None


def _mixed_norm(gradients: list[Any], norm_type: float) -> torch.Tensor:
    """The norm over groups of gradients that lie on one mesh each, or on none."""
    if not norm_type > 0:
        raise ValueError(
            f"clip_grad_norm_(norm_type={norm_type}): some gradients are DTensors, whose norms can only be put together for a "
            "`norm_type` above 0, or inf."
        )
    groups: dict[Any, list[Any]] = {}
    for gradient in gradients:
        groups.setdefault(gradient.device_mesh if _is_spread(gradient) else None, []).append(gradient)
    norms = []
    for mesh, group in groups.items():
        if mesh is not None and norm_type == math.inf:
            norms.append(_largest(group, mesh))
            continue
        norm: Any = get_total_norm(group, norm_type)
        norms.append(norm.full_tensor() if _is_spread(norm) else norm)
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)


def _largest(gradients: list[Any], mesh: Any) -> torch.Tensor:
    """The largest absolute value over a mesh. Torch's norm fails on a rank whose part of a small tensor is empty."""
    import torch.distributed as dist

    whole = [gradient.redistribute(placements=_summed(gradient)) for gradient in gradients]
    parts = [part.abs().max() for part in local_parts(whole) if part.numel()]
    device = local_parts(gradients[:1])[0].device
    largest = torch.stack([part.to(device) for part in parts]).max() if parts else torch.zeros((), device=device)
    for dimension in range(mesh.ndim):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group(dimension))
    return largest


def _summed(gradient: Any) -> list[Any]:
    """The placements of a DTensor, where it holds parts of sums those of the sums themselves."""
    from torch.distributed.tensor import Replicate

    return [Replicate() if placement.is_partial() else placement for placement in gradient.placements]


def _any_spread(tensors: list[torch.Tensor]) -> bool:
    # Before anybody has imported DTensors there can be none.
    return "torch.distributed.tensor" in sys.modules and not _PLAIN.issuperset(map(type, tensors))


def _is_spread(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)

"""The bytes of tensors in host memory."""

from __future__ import annotations

from typing import Any

import torch


def is_plain(tensor: Any) -> bool:
    """Whether something is a tensor whose values lie one after the other in host memory."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def fits(target: Any, source: torch.Tensor) -> bool:
    """Whether both are plain tensors of the same type and shape."""
    return is_plain(target) and is_plain(source) and target.dtype == source.dtype and target.shape == source.shape


def bytes_of(tensor: torch.Tensor) -> Any:
    """The memory of a plain tensor as a numpy array of bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()

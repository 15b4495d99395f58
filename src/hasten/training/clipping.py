"""Gradient clipping by norm and by value."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def clip_grad_norm_(
    parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale the gradients in place so that their global norm is at most `max_norm`; return the norm before.

    `parameters` may be a generator. For DTensors the norm is that of the whole gradients, not of the local shards.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)


def clip_grad_value_(parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
    """Limit every element of the gradients to [-clip_value, clip_value], in place."""
    torch.nn.utils.clip_grad_value_(parameters, clip_value)

"""Outputs of a forward pass in fp32, and parameters that DeepSpeed has spread over the processes, whole for a while."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import update_wrapper, wraps
from typing import Any

import torch

from hasten.collectives import nested


class ConvertOutputsToFp32:
    """A forward pass whose fp16 and bf16 outputs are converted to fp32, in any structure.

    Args:
        model_forward: the function to call.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function and convert what it returns."""
        return nested.convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> Any:
        raise pickle.PicklingError(
            "Cannot pickle a prepared model with automatic mixed precision; unwrap it first with "
            "`accelerator.unwrap_model(model, keep_fp32_wrapper=False)`."
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `model_forward` and converts its fp16 and bf16 outputs to fp32.

    Example:
        >>> model.forward = convert_outputs_to_fp32(model.forward)
    """
    converted = ConvertOutputsToFp32(model_forward)

    @wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return converted(*args, **kwargs)

    forward.__wrapped__ = converted
    return forward


def GatheredParameters(  # noqa: N802 - a name of the reference
    params: torch.nn.Parameter | Iterable[torch.nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: torch.nn.Module | None = None,
    enabled: bool = True,
) -> AbstractContextManager[Any]:
    """Make parameters whole inside a `with` block, if DeepSpeed (ZeRO stage 3) keeps them spread over the processes.

    Everywhere else parameters are whole already, and nothing happens.

    Args:
        params: the parameters, or one.
        modifier_rank: the process whose changes in the block all processes keep; None if nothing is changed.
        fwd_module: the module in whose forward pass they are used.
        enabled: whether to do anything.
    """
    listed = [params] if isinstance(params, torch.Tensor) else list(params)
    if not enabled or not any(hasattr(param, "ds_id") for param in listed):
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
        listed, modifier_rank=modifier_rank, fwd_module=fwd_module, enabled=enabled
    )
    return gathered

"""Autocast: the forward pass in a smaller format, its outputs back in fp32."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from hasten.collectives import nested
from hasten.settings.handlers import AutocastKwargs
from hasten.world.devices import Device

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_context(device_type: str, dtype: torch.dtype | None, handler: AutocastKwargs | None = None) -> Any:
    """`torch.autocast` for a device type; with `dtype` None (no mixed precision) a context that changes nothing.

    `handler.enabled=False` switches autocast off, also inside an outer autocast region.
    """
    arguments = AutocastKwargs().to_kwargs() if handler is None else handler.to_kwargs()
    if dtype is None:
        if not arguments.get("enabled", True):
            return torch.autocast(device_type, enabled=False)
        from contextlib import nullcontext

        return nullcontext()
    return torch.autocast(device_type, dtype=dtype, **arguments)


def check_supported(precision: str, row: Device) -> None:
    """Raise if autocast to `precision` does not work on a device.

    Raises:
        ValueError: the device has no autocast to that format.
    """
    dtype = DTYPES.get(precision)
    if dtype is not None and not row.supports(dtype):
        others = [name for name, other in DTYPES.items() if row.supports(other)]
        raise ValueError(
            f"mixed_precision={precision!r} is not supported on {row.type!r} with torch {torch.__version__}; "
            f"supported here: {['no', *others]}."
        )


class AutocastForward:
    """The transform that runs a model's `forward` under autocast and returns floating-point outputs in fp32."""

    name = "autocast"

    def __init__(self, device_type: str, dtype: torch.dtype, handler: AutocastKwargs | None = None) -> None:
        self.device_type = device_type
        self.dtype = dtype
        self.handler = handler

    def __repr__(self) -> str:
        return f"autocast forward to {self.dtype}, outputs in fp32"

    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        """Replace `forward` on the instance; the original is kept as `_original_forward`."""
        original = model.forward
        model._original_forward = original  # type: ignore[assignment]
        device_type, dtype, handler = self.device_type, self.dtype, self.handler
        is_method = getattr(original, "__self__", None) is model
        function: Callable[..., Any] = original.__func__ if is_method else original  # type: ignore[attr-defined]

        @functools.wraps(function)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with autocast_context(device_type, dtype, handler):
                outputs = function(*args, **kwargs)
            return convert_to_fp32(outputs)

        wrapped = _Unpicklable(forward)
        # A method takes the instance that it is looked up on, so that a copy of the model runs its own weights.
        model.forward = MethodType(wrapped, model) if is_method else wrapped
        return model

    def undo(self, model: torch.nn.Module) -> torch.nn.Module:
        """Put the original `forward` back, so that the model pickles again."""
        return restore_forward(model)


class _Unpicklable:
    """A function that explains itself when pickled; signature and name are the wrapped function's."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> Any:
        raise pickle.PicklingError(
            "Cannot pickle a prepared model with mixed precision: its forward runs under autocast. Unwrap it first: "
            "`accelerator.unwrap_model(model, keep_fp32_wrapper=False)`, or save `accelerator.get_state_dict(model)`."
        )


def restore_forward(model: torch.nn.Module) -> torch.nn.Module:
    """Undo `AutocastForward.apply` exactly; a model that was not wrapped is left alone."""
    if "_original_forward" in model.__dict__:
        original = model.__dict__.pop("_original_forward")
        if getattr(original, "__self__", None) is model and original.__func__ is getattr(type(model), "forward", None):
            model.__dict__.pop("forward", None)
        else:
            model.forward = original
    return model


def convert_to_fp32(outputs: Any) -> Any:
    """`outputs` with every fp16 and bf16 tensor in fp32, whatever the structure."""
    kind = type(outputs)
    if kind is torch.Tensor:
        return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs
    return nested.convert_to_fp32(outputs)


def is_wrapped(model: torch.nn.Module) -> bool:
    """Whether a model's forward runs under autocast."""
    return "_original_forward" in model.__dict__


__all__ = [
    "DTYPES",
    "AutocastForward",
    "autocast_context",
    "check_supported",
    "convert_to_fp32",
    "is_wrapped",
    "restore_forward",
]

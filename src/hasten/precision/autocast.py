"""Autocast: the forward pass in a smaller format, its outputs back in fp32."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from contextlib import nullcontext
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
    if dtype is None:
        return nullcontext() if handler is None or handler.enabled else torch.autocast(device_type, enabled=False)
    return torch.autocast(device_type, **autocast_arguments(dtype, handler))


def autocast_arguments(dtype: torch.dtype, handler: AutocastKwargs | None) -> dict[str, Any]:
    """The arguments of `torch.autocast` besides the device type."""
    return {"dtype": dtype, **({} if handler is None else handler.to_kwargs())}


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
        model.forward = _Forward(original, self.device_type, autocast_arguments(self.dtype, self.handler))
        return model

    def undo(self, model: torch.nn.Module) -> torch.nn.Module:
        """Put the original `forward` back, so that the model pickles again."""
        return restore_forward(model)


class _Forward:
    """A `forward` under autocast. Signature and name are the original's; a copy of the model gets one that runs its own weights."""

    def __init__(self, original: Callable[..., Any], device_type: str, arguments: dict[str, Any]) -> None:
        functools.update_wrapper(self, original)
        self._original = original
        self._device_type = device_type
        self._arguments = arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device_type, **self._arguments):
            outputs = self._original(*args, **kwargs)
        return convert_to_fp32(outputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        return _Forward(copy.deepcopy(self._original, memo), self._device_type, self._arguments)

    def __reduce__(self) -> Any:
        raise pickle.PicklingError(
            "Cannot pickle a prepared model with mixed precision: its forward runs under autocast. Unwrap it first: "
            "`accelerator.unwrap_model(model, keep_fp32_wrapper=False)`, or save `accelerator.get_state_dict(model)`."
        )


def restore_forward(model: torch.nn.Module) -> torch.nn.Module:
    """Undo `AutocastForward.apply` exactly; a model that was not wrapped is left alone."""
    if is_wrapped(model):
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
    return "_original_forward" in getattr(model, "__dict__", ())


__all__ = [
    "DTYPES",
    "AutocastForward",
    "autocast_arguments",
    "autocast_context",
    "check_supported",
    "convert_to_fp32",
    "is_wrapped",
    "restore_forward",
]

"""Autocast: the forward pass in a smaller format, its outputs back in fp32 or in the format that was asked for."""

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
    arguments = {"dtype": dtype, **({} if handler is None else handler.to_kwargs())}
    arguments.pop("output_dtype", None)
    return arguments


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
    """The transform that runs a model's `forward` under autocast and returns what is in a smaller format in fp32.

    Args:
        device_type: where the model computes.
        dtype: the format to compute in.
        handler: further arguments; its `output_dtype` chooses another format for the outputs.

    Raises:
        ValueError: an `output_dtype` that is no floating-point format.
    """

    name = "autocast"

    def __init__(self, device_type: str, dtype: torch.dtype, handler: AutocastKwargs | None = None) -> None:
        self.device_type = device_type
        self.dtype = dtype
        self.handler = handler
        self.output_dtype = _output_dtype("fp32" if handler is None else handler.output_dtype)

    def __repr__(self) -> str:
        names = {torch.float32: "in fp32", None: "as they are"}
        outputs = names.get(self.output_dtype, f"in {self.output_dtype}")
        return f"autocast forward to {self.dtype}, outputs {outputs}"

    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        """Replace `forward` on the instance; the original is kept as `_original_forward`."""
        original = model.forward
        model.__dict__["_original_forward"] = (
            original  # a compiled model would pass the attribute on to what it compiles
        )
        model.forward = self.around(original)
        return model

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A method that runs another one under autocast, with its outputs converted."""
        arguments = autocast_arguments(self.dtype, self.handler)
        return _Forward(original, self.device_type, arguments, _conversion(self.output_dtype))

    def undo(self, model: torch.nn.Module) -> torch.nn.Module:
        """Put the original `forward` back, so that the model pickles again."""
        return restore_forward(model)


class _Forward:
    """A `forward` under autocast. Signature and name are the original's; a copy of the model gets one that runs its own weights."""

    def __init__(
        self,
        original: Callable[..., Any],
        device_type: str,
        arguments: dict[str, Any],
        convert: Callable[[Any], Any],
    ) -> None:
        functools.update_wrapper(self, original)
        self._original = original
        self._device_type = device_type
        self._arguments = arguments
        self._convert = convert

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device_type, **self._arguments):
            outputs = self._original(*args, **kwargs)
        return self._convert(outputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        return _Forward(copy.deepcopy(self._original, memo), self._device_type, self._arguments, self._convert)

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


def _output_dtype(wanted: Any) -> torch.dtype | None:
    """The format of outputs; None leaves them as they are."""
    if wanted == "keep":
        return None
    dtype = {"fp32": torch.float32, **DTYPES}.get(wanted, wanted)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"AutocastKwargs(output_dtype={wanted!r}): it must be a floating-point format, or 'keep'.")
    return dtype


def _conversion(dtype: torch.dtype | None) -> Callable[[Any], Any]:
    if dtype is None:
        return _keep
    return convert_to_fp32 if dtype is torch.float32 else functools.partial(_convert_to, dtype=dtype)


def _keep(outputs: Any) -> Any:
    return outputs


def _convert_to(outputs: Any, dtype: torch.dtype) -> Any:
    return nested.recursively_apply(lambda leaf: leaf.to(dtype), outputs, test_type=_is_float)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float16, torch.bfloat16)


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

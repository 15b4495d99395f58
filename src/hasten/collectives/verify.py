"""Verification of functions of the user's own that exchange tensors: for those of hasten it is built in."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from hasten.collectives.layout import named_tensors
from hasten.collectives.wire import wire_of
from hasten.world.agreement import DistributedOperationException, Statement
from hasten.world.arrivals import call_site

F = TypeVar("F", bound=Callable[..., Any])

# Labels of the worlds in which there is somebody to exchange tensors with.
TORCH_DISTRIBUTED_OPERATION_TYPES = [
    "DEEPSPEED",
    "MULTI_GPU",
    "FSDP",
    "MEGATRON_LM",
    "TP",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_XPU",
    "MULTI_CPU",
    "MULTI_HPU",
    "MULTI_NEURON",
]


def verify_operation(function: F) -> F:
    """Let a function check in debug mode, before it runs, that all processes call it with tensors of the same shapes.

    Args:
        function: its first argument, or the one named `tensor`, is a nested structure; what is not a tensor in it does not count.

    Returns:
        The function with the check, which costs nothing outside of debug mode (`ACCELERATE_DEBUG_MODE=1`). In debug mode it
        raises DistributedOperationException, the same on every process, where names, dtypes, shapes or the lines of the
        calls differ.

    Example:
        >>> @verify_operation
        ... def total(tensor):
        ...     torch.distributed.all_reduce(tensor)
        ...     return tensor
    """
    name = f"{function.__module__}.{function.__name__}"

    @wraps(function)
    def verified(*args: Any, **kwargs: Any) -> Any:
        wire = wire_of(None)
        if wire is not None and wire.debug:
            found = named_tensors(kwargs["tensor"] if "tensor" in kwargs else args[0] if args else None)
            told = sorted((path, str(leaf.dtype).removeprefix("torch."), str(list(leaf.shape))) for path, leaf in found)
            wire.meet(Statement(name, {}, tuple(told), site=call_site()))
        return function(*args, **kwargs)

    return verified  # type: ignore[return-value]


def chained_operation(function: F) -> F:
    """Let the disagreement of an operation inside a function name the function, too.

    Raises:
        DistributedOperationException: in place of the one that the function has raised, which is its cause.
    """

    @wraps(function)
    def chained(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            operation = f"{function.__module__}.{function.__name__}"
            raise DistributedOperationException(f"Error found while calling `{operation}`: {error}") from error

    return chained  # type: ignore[return-value]

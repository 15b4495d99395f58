"""How an optimizer steps over divided parameters, by its class: on DTensors, on this rank's parts, or on whole parameters."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from hasten.weights.successors import current

_STEPS = "_steps_over"  # on an optimizer: how it steps

# By package and class. A class that is derived from one of these is meant too; the nearest one counts.
_WHOLE = {
    "torch.Adafactor",
    "torch.Muon",
    "transformers.Adafactor",
    "bitsandbytes.LAMB",
    "bitsandbytes.LAMB8bit",
    "bitsandbytes.LAMB32bit",
    "bitsandbytes.LARS",
    "bitsandbytes.LARS8bit",
    "bitsandbytes.LARS32bit",
    "bitsandbytes.PytorchLARS",
    "pytorch_optimizer.AdaFactor",
    "pytorch_optimizer.CAME",
    "pytorch_optimizer.LARS",
    "pytorch_optimizer.Lamb",
    "pytorch_optimizer.SOAP",
    "pytorch_optimizer.ScalableShampoo",
    "pytorch_optimizer.Shampoo",
    "pytorch_optimizer.StableAdamW",
}
_PARTS = {"torch.Rprop", "bitsandbytes.Optimizer8bit"}
_FUSED_PARTS = {"torch.Adagrad", "torch.SGD"}  # whose fused operation does not know DTensors
_REFUSED = {
    "torch.LBFGS": "it works on one vector of all parameters, and evaluates its closure many times",
    "torch.SparseAdam": "it needs sparse gradients, and those of divided parameters are dense",
}
_KNOWN = ("torch", "schedulefree")  # packages whose other optimizers work on DTensors
_NAMES = ("needs_whole_parameters", "is_elementwise")


def follow(optimizer: torch.optim.Optimizer) -> int:
    """Let an optimizer hold the sharded forms of its parameters, with what it knows about them; returns how many it found.

    Groups keep their order and settings. State that was made in advance (Adagrad's sums) is cut as its parameter is. How it steps
    from now on: see `adapt`.

    Raises:
        ValueError: an optimizer that cannot work on divided parameters, or that fails on them.
    """
    found = 0
    for group in optimizer.param_groups:
        for index, old in enumerate(group["params"]):
            new = current(old)
            if new is old:
                continue
            group["params"][index] = new
            found += 1
            if old in optimizer.state:
                optimizer.state[new] = _cut(optimizer.state.pop(old), new)
    adapt(optimizer)
    return found


def _cut(state: dict[str, Any], new: Any) -> dict[str, Any]:
    return {
        name: distribute_tensor(value, new.device_mesh, new.placements, src_data_rank=None)
        if isinstance(value, torch.Tensor) and value.shape == new.shape and value.dim() > 0
        else value
        for name, value in state.items()
    }


def adapt(optimizer: torch.optim.Optimizer) -> str | None:
    """Let an optimizer that holds DTensors step in the way that its class needs; returns what it steps over, None for DTensors.

    A class of a user says what it needs by an attribute: `needs_whole_parameters = True`, or `is_elementwise = True` for one that
    treats each element by itself but does not know DTensors. False for both: it knows them.

    Raises:
        ValueError: an optimizer that cannot work on divided parameters, or that fails on them.
        NotImplementedError: parameters that are divided over several axes.
    """
    if not any(isinstance(each, DTensor) for group in optimizer.param_groups for each in group["params"]):
        return None
    steps = optimizer.__dict__.get(_STEPS)
    if steps is None and (make := _choose(optimizer)) is not None:
        steps = make()
        _install(optimizer, steps)
        setattr(optimizer, _STEPS, steps)
    if steps is None:
        return None
    steps.settle(optimizer)
    return str(steps.name)


def _table(optimizer: torch.optim.Optimizer) -> str | None:
    """What is said about an optimizer, by its class or in the tables."""
    said = [getattr(optimizer, name, None) for name in _NAMES]
    if any(value is not None for value in said):
        return "whole" if said[0] else "parts" if said[1] else "shards"
    for kind in type(optimizer).__mro__:
        name = f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
        if name in _REFUSED:
            raise ValueError(
                f"{type(optimizer).__name__} cannot update parameters that are divided over processes: {_REFUSED[name]}. Choose "
                "another optimizer, or replicate the model (an Accelerator without a FullyShardedDataParallelPlugin)."
            )
        if name in _WHOLE:
            return "whole"
        if name in _PARTS or (name in _FUSED_PARTS and any(group.get("fused") for group in optimizer.param_groups)):
            return "parts"
    steps = next((kind for kind in type(optimizer).__mro__ if "step" in vars(kind)), object)
    return "shards" if steps.__module__.partition(".")[0] in _KNOWN else None


def _choose(optimizer: torch.optim.Optimizer) -> Callable[[], Any] | None:
    wanted = _table(optimizer)
    if wanted == "whole":
        from hasten.parallel.owners import WholeParameters

        return WholeParameters
    if wanted == "parts":
        from hasten.parallel.local_parts import LocalParts

        return LocalParts
    if wanted is None:
        from hasten.parallel.trial import Unknown

        return Unknown
    return None


def _install(optimizer: torch.optim.Optimizer, steps: Any) -> None:
    """Put something around an optimizer's `step`, also one that a scheduler watches already."""
    inner: Any = optimizer.step

    def step(self: Any, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        if closure is not None:
            # Before anything moves: it computes the gradients.
            with torch.enable_grad():
                options["closure"] = _Once(closure(), type(self).__name__)
        with steps.around(optimizer):
            return inner(**options)

    functools.update_wrapper(step, getattr(inner, "__func__", inner))
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


class _Once:
    """A closure that has been called already."""

    def __init__(self, loss: Any, name: str) -> None:
        self._loss = loss
        self._name = name
        self._called = False

    def __call__(self) -> Any:
        if self._called:
            raise ValueError(
                f"{self._name} evaluates its closure more than once per step, which does not work with parameters that are divided "
                "over processes: gradients are taken over once. Use an optimizer that does not, or replicate the model."
            )
        self._called = True
        return self._loss

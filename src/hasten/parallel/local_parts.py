"""Optimizers that treat each element by itself but do not know DTensors: they see this rank's part as a plain tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hasten.parallel.owners import sharded_axis, standing_in


class LocalParts:
    """Lets an optimizer see the parts of its parameters that lie on this rank, while it steps; nothing is exchanged.

    State that has the shape of a part is a DTensor outside of the step, like its parameter. A rank without a part of some
    parameter gives the optimizer one element of zeros, so that it finds work, and makes state, for the same parameters everywhere.
    """

    name = "this rank's parts"

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing has to be prepared."""

    @contextmanager
    def around(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Inside, the optimizer holds plain tensors that share memory with the parameters."""
        spread = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if isinstance(parameter, DTensor) and parameter.numel()
        ]
        parts = {parameter: _part(parameter) for parameter in spread}
        for parameter in parts:
            if state := optimizer.state.get(parameter):
                optimizer.state[parameter] = {
                    key: _visible(value) if isinstance(value, DTensor) else value for key, value in state.items()
                }
        try:
            with standing_in(optimizer, parts):
                yield
        finally:
            for parameter, part in parts.items():
                if state := optimizer.state.get(parameter):
                    optimizer.state[parameter] = {key: _spread(value, parameter, part) for key, value in state.items()}


def _part(parameter: Any) -> nn.Parameter:
    part = nn.Parameter(_visible(parameter.detach()), parameter.requires_grad)
    if parameter.grad is not None:
        part.grad = _visible(parameter.grad)
    return part


def _visible(tensor: DTensor) -> Tensor:
    """This rank's part of a tensor; one slice of zeros if it has none."""
    local = tensor.to_local()
    if local.numel():
        return local
    axis = sharded_axis(tensor)
    assert axis is not None
    dim: int = tensor.placements[axis].dim  # type: ignore[attr-defined]
    return local.new_zeros([1 if place == dim else size for place, size in enumerate(local.shape)])


def _spread(value: Any, parameter: Any, part: nn.Parameter) -> Any:
    """State of a part as state of its parameter."""
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape != part.shape:
        return value
    local = parameter.to_local()
    return DTensor.from_local(
        value if local.numel() else value.new_empty(local.shape),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )

"""Optimizers that nobody knows: whether they work on DTensors is tried when they are prepared."""

from __future__ import annotations

import copy
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hasten.world import torch_private

_ABOUT_SHARDS = re.compile(r"DTensor|[Ss]hard|[Pp]lacement")
_WATCHERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "step")


class Unknown:
    """Lets an optimizer that nobody knows step over DTensors, and explains the errors that come of it."""

    name = "DTensors, which it may not know"

    def __init__(self) -> None:
        self._tried = False

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Try a step, once.

        Raises:
            ValueError: it failed.
        """
        if not self._tried and (error := failure(optimizer)) is not None:
            raise ValueError(_explanation(optimizer, error)) from error
        self._tried = True

    @contextmanager
    def around(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Inside, errors that have to do with divided parameters are explained."""
        try:
            yield
        except Exception as error:
            if not _is_about_shards(error):
                raise
            raise ValueError(_explanation(optimizer, error)) from error


def _explanation(optimizer: torch.optim.Optimizer, error: Exception) -> str:
    name = type(optimizer).__name__
    return (
        f"{name} fails on parameters that are divided over processes: {type(error).__name__}: {error} If it treats each parameter "
        f"by itself, set `{name}.needs_whole_parameters = True` before it is prepared: each parameter is then updated as a whole "
        f"on one process. If it treats each element by itself, set `{name}.is_elementwise = True`: it then sees plain tensors, "
        "the parts on its process."
    )


def failure(optimizer: torch.optim.Optimizer) -> Exception | None:
    """What a step over DTensors would raise; None if it works, or if that cannot be told.

    A copy of the optimizer steps over parameters and gradients of the same shapes and placements. Nothing is computed, sent or
    kept; what fails for another reason than its parameters' being divided is not looked at.
    """
    mode = torch_private.tensors_without_values()
    try:
        with mode:
            memo = _empties(optimizer)
        twin = _twin(optimizer, memo)
        with mode, torch_private.trial_without_values(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            type(twin).step(twin)
    except Exception as error:
        return error if _is_about_shards(error) else None
    return None


def _empties(optimizer: torch.optim.Optimizer) -> dict[int, Any]:
    """For the parameters of an optimizer and its state: tensors without values, by id."""
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            memo[id(parameter)] = twin = nn.Parameter(_empty(parameter), parameter.requires_grad)
            if parameter.requires_grad:
                twin.grad = _empty(parameter)
    for values in optimizer.state.values():
        for value in values.values() if isinstance(values, dict) else ():
            if isinstance(value, Tensor):
                memo[id(value)] = _empty(value)
    return memo


def _twin(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> Any:
    """An optimizer like another one, over other tensors."""
    twin = object.__new__(type(optimizer))
    own = {name: value for name, value in optimizer.__dict__.items() if name not in _WATCHERS}
    twin.__dict__.update(copy.deepcopy(own, memo), _optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={})
    if not isinstance(twin.state, defaultdict):
        twin.state = defaultdict(dict, twin.state)
    return twin


def _empty(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, requires_grad=False)
    return DTensor.from_local(
        torch.empty_like(tensor.to_local(), requires_grad=False),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _is_about_shards(error: Exception) -> bool:
    if _ABOUT_SHARDS.search(str(error)):
        return True
    trace = error.__traceback__
    module = ""
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    return module.startswith("torch.distributed.tensor")

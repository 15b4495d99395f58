"""Steps that exchange nothing, and a meeting of the processes after every so many of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from typing_extensions import Self


class LocalSteps:
    """A context in which DDP exchanges no gradients, and after every N-th `step` and at the end the processes meet.

    After an error they do not: it would be hidden by the wait for the others. What meeting means is said by the classes that
    inherit this one.

    Args:
        accelerator: the one that prepared the model.
        model: a replicated model. Where there are several processes it must have been prepared.
        steps: N.
        enabled: False makes it do nothing.

    Attributes:
        num_steps: how often `step` was called.

    Raises:
        ValueError: a setting is not legal, or the model was not prepared, or has nothing to train.
        NotImplementedError: the model is sharded or spread over the processes in another way.
    """

    def __init__(self, accelerator: Any, model: torch.nn.Module, steps: int, enabled: bool, setting: str) -> None:
        name = type(self).__name__
        if enabled and (isinstance(steps, bool) or not hasattr(steps, "__index__") or steps < 1):
            raise ValueError(f"{name}({setting}={steps!r}): it must be a whole number of 1 or more.")
        self.accelerator = accelerator
        self.enabled = enabled
        self.num_steps = 0
        self.model = _prepared(model, accelerator, name) if enabled else model
        self._steps = steps
        self._quiet: AbstractContextManager[Any] | None = None

    def __enter__(self) -> Self:
        if self._quiet is not None:
            raise RuntimeError(f"This {type(self).__name__} is entered already; make one for each `with`.")
        if self.enabled:
            quiet = self.accelerator.no_sync(self.model)
            quiet.__enter__()
            self._quiet = quiet
            self._check_quiet()
            self.accelerator.gradient_state.local += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._quiet is None:
            return
        quiet, self._quiet = self._quiet, None
        quiet.__exit__(kind, error, trace)
        self.accelerator.gradient_state.local -= 1
        if isinstance(self.model, DistributedDataParallel):
            # Or else DDP would leave the buffers alone in the next forward pass, as after the last one inside.
            self.model.require_forward_param_sync = True
        if kind is None:
            self._meet(end=True)

    def step(self) -> None:
        """Count a step; after every N-th the processes meet. Call it after the optimizer's step, on every process."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self._steps == 0:
            self._meet(end=False)

    def _meet(self, end: bool) -> None:
        """Make the processes' models one again; called by all of them."""
        raise NotImplementedError

    def _check_quiet(self) -> None:
        # With a static graph DDP must exchange in the first backward pass, from which it learns the graph.
        if not getattr(self.model, "require_backward_grad_sync", False):
            return
        quiet, self._quiet = self._quiet, None
        assert quiet is not None
        quiet.__exit__(None, None, None)
        raise ValueError(
            f"{type(self).__name__}: with static_graph=True, DDP has to exchange gradients in its first backward pass. Train one "
            "step before you enter, or switch static_graph off."
        )


def floating(model: torch.nn.Module, trainable_only: bool) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of a model that can be averaged, by their names in it."""
    for name, parameter in model.named_parameters():
        if (parameter.is_floating_point() or parameter.is_complex()) and (
            parameter.requires_grad or not trainable_only
        ):
            yield name, parameter


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """What DDP replicates, or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _prepared(model: torch.nn.Module, accelerator: Any, name: str) -> torch.nn.Module:
    """The module that exchanges the gradients of `model`: itself, what it compiles, or what was made of it."""
    inner = getattr(model, "_orig_mod", model)
    for path, parameter in inner.named_parameters():
        if hasattr(parameter, "full_tensor"):
            raise NotImplementedError(
                f"{name}: the parameter {path!r} of {type(inner).__name__} is a DTensor. A sharded model has one copy that all "
                "processes share, so there are no copies that could go their own ways; use a model that DDP replicates."
            )
    if accelerator.num_processes == 1 or isinstance(inner, DistributedDataParallel):
        return inner
    for prepared in accelerator._models:
        if prepared is not inner and unwrapped(prepared) is inner:
            return prepared
    if any(prepared is inner for prepared in accelerator._models):
        raise ValueError(
            f"{name}: no parameter of {type(inner).__name__} requires gradients, so there is nothing to train."
        )
    raise ValueError(
        f"{name}: {type(inner).__name__} has not been prepared for training on {accelerator.num_processes} processes. Pass what "
        "`accelerator.prepare(model)` returned."
    )

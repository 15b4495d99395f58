"""What the losses of an accumulation window are divided by, where it is not the nominal number of micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from hasten.training.accumulation import GradientState
from hasten.weights.gradients import multiply_all
from hasten.world.process import World

WINDOW = "window"
WEIGHT = "weight"

Divisor = float | torch.Tensor


class WindowMean:
    """Divides losses so that the gradient of a whole window is that of its mean.

    What a window must be divided by is known with its last micro-batch. Until then its gradients are held over another divisor,
    the same on all ranks; after the last backward pass they are corrected, once. A window of one micro-batch needs no correction,
    nor does one that turns out to be as long as planned.

    Args:
        gradients: which micro-batch of which window runs.
        world: the ranks whose gradients are averaged.
        parameters: gives the parameters whose gradients are accumulated.
    """

    def __init__(
        self, gradients: GradientState, world: World, parameters: Callable[[], Iterable[torch.Tensor]]
    ) -> None:
        self.gradients = gradients
        self.world = world
        self.parameters = parameters
        self._window: int | None = None
        self._complete = 0  # the micro-batch that had the last backward pass of a whole window
        self._held: Divisor | None = None  # what the gradients of this window are divided by
        self._final: Divisor | None = None  # what they must be divided by, once it is known
        self._weight: Divisor = 0.0  # the weights of this window on this rank
        self._expected: torch.Tensor | None = None  # the divisor of the last window that had one
        self._is_local = False  # whether each rank has a mean of its own
        self._sent: torch.Tensor | None = None

    def divide(self, loss: torch.Tensor, weight: Any) -> torch.Tensor:
        """The loss of one backward pass, divided.

        Args:
            loss: the mean over a micro-batch, or with a weight the sum over it.
            weight: what `scale="weight"` needs: how much there is in the micro-batch (tokens, say).

        Raises:
            ValueError: there is no weight where one is needed, it is not a finite number >= 0, or a backward pass outside of
                `accumulate` whose gradients are not exchanged.
        """
        length = self._enter_window()
        switched = self._is_local != (self.gradients.local > 0)
        if switched:
            self._is_local, self._expected = not self._is_local, None
        known = self._known_divisor(weight, loss.device, length)
        if self._held is None:
            self._held = known if known is not None else self._planned_divisor()
        elif switched:
            # Ranks that were on their own have divided by different numbers, and are about to exchange what they have.
            self._final = known if known is not None else self._planned_divisor()
            self.correct()
        elif isinstance(known, torch.Tensor) and isinstance(self._held, torch.Tensor):
            # Over infinity the gradients are zero, so any divisor will do for what is added to them.
            self._held = torch.where(self._held.isinf(), known, self._held)
        self._final = known
        return loss / self._held

    def correct(self) -> None:
        """After the backward pass: correct what the window holds, if its divisor has turned out to be another one.

        Raises:
            ValueError: nobody knows whose gradients these are.
        """
        held, final = self._held, self._final
        if held is None or final is None or held is final or (isinstance(held, float) and held == final):
            return
        self._held = final
        parameters = list(self.parameters())
        if not parameters:
            raise ValueError(
                f"Rank {self.world.rank}: GradientAccumulationPlugin(scale={self.gradients.scale!r}) corrects the gradients of "
                "prepared models and optimizers, and there are none. Pass yours to `accelerator.prepare`."
            )
        multiply_all([parameter.grad for parameter in parameters if parameter.grad is not None], held / final)

    def _enter_window(self) -> int:
        """How many micro-batches the window has had, with this one."""
        state = self.gradients
        # Outside of `accumulate`, a backward pass may still be that of the last micro-batch that was counted.
        is_counted = state.running > 0 or state.micro_batches > self._complete
        if not is_counted and not state.sync_gradients:
            raise ValueError(
                f"Rank {self.world.rank}: GradientAccumulationPlugin(scale={state.scale!r}) needs to know where windows begin. Run "
                "each micro-batch in `with accelerator.accumulate(model):`."
            )
        window = state.window_start if is_counted else None
        if window is None or self._window != window:
            self._window, self._held, self._weight = window, None, 0.0
        if state.sync_gradients:
            self._complete = state.micro_batches
        return state.micro_batches - window if window is not None else 1

    def _known_divisor(self, weight: Any, device: torch.device, length: int) -> Divisor | None:
        """The divisor of the window after this micro-batch; None if more are to come."""
        state = self.gradients
        if state.scale == WEIGHT:
            self._weight = self._weight + checked(weight, device, self.world.rank)
            if not state.sync_gradients:
                return None
            total = self._averaged(self._weight)
            self._expect(total)
            return torch.where(total > 0, total, math.inf)
        return float(length) if state.sync_gradients else None

    def _planned_divisor(self) -> Divisor:
        """What a window is probably divided by: the same on all ranks."""
        if self.gradients.scale == WINDOW:
            return float(self.gradients.num_steps)
        if self._expected is None:
            # The first window: its first micro-batch must do. Every rank is here.
            self._expect(self._averaged(self._weight) * self.gradients.num_steps)
        assert self._expected is not None
        return self._expected

    def _expect(self, divisor: torch.Tensor) -> None:
        # A window without any weight says nothing about the next one.
        before = 1.0 if self._expected is None else self._expected
        self._expected = torch.where(divisor > 0, divisor, before)

    def _averaged(self, weight: Divisor) -> torch.Tensor:
        """The weight of all ranks over their number, by which gradients are divided already; this rank's if it is on its own."""
        assert isinstance(weight, torch.Tensor)
        if self.world.size == 1 or self._is_local:
            return weight
        from hasten.collectives.wire import wire_of

        wire = wire_of(self.world)
        assert wire is not None
        # Kept until the next exchange: the backend's thread may still hold it, and would need the interpreter's lock to free it.
        self._sent = weight.to(wire.device, copy=True)
        wire.all_reduce(self._sent, dist.ReduceOp.SUM, name="the weights of a window")
        return self._sent.to(weight.device) / self.world.size


def checked(weight: Any, device: torch.device, rank: int) -> torch.Tensor:
    """A weight as a tensor of no dimensions on the device of the loss; one that lies on an accelerator is not looked at.

    Raises:
        ValueError: see `WindowMean.divide`.
    """
    advice = "how much the micro-batch has, for example its number of tokens: a finite number of at least 0"
    if weight is None:
        raise ValueError(
            f'Rank {rank}: GradientAccumulationPlugin(scale="weight") needs `accelerator.backward(loss_sum, weight=n)`: {advice}.'
        )
    if not _is_number(weight):
        raise ValueError(f"Rank {rank}: backward(weight={weight!r}): `weight` is {advice}.")
    exact = torch.float64 if device.type in ("cpu", "cuda") else torch.float32  # others may not have it
    tensor = weight.detach() if isinstance(weight, torch.Tensor) else torch.tensor(float(weight), dtype=exact)
    return tensor.to(device=device, dtype=exact).reshape(())


def _is_number(weight: Any) -> bool:
    if isinstance(weight, str):
        return False
    if isinstance(weight, torch.Tensor):
        weight = weight.detach()
        if weight.device.type != "cpu":
            return weight.numel() == 1
    try:
        return math.isfinite(value := float(weight)) and value >= 0
    except (TypeError, ValueError, RuntimeError):
        return False

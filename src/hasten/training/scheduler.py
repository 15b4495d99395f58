"""The prepared learning-rate scheduler: it advances when its optimizers do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from hasten.training.accumulation import GradientState
from hasten.world import process


class AcceleratedScheduler:
    """Advances `scheduler` once per update and process, so that a schedule written for one process keeps its length in epochs.

    Each call of `step` advances the schedule by the number of processes (every process consumes a batch of its own), by 1 if
    `split_batches` (the processes share a batch), and not at all inside an accumulation window or after a skipped step.
    Schedulers that are driven by a metric advance once per call, but for calls inside a window.

    Args:
        scheduler: the user's scheduler.
        optimizers: the prepared optimizer, or several, whose steps it follows.
        step_with_optimizer: False makes `step` the user's own business: one call, one step.
        split_batches: see above.
        gradient_state: the accumulation state to obey; the newest Accelerator's by default.
        num_processes: steps per call; the number of processes of the default world by default.
        unit: "process" for a step per update and process, as above; "update" for one step per update, whatever the number of
            processes: for a schedule that was written in updates.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Any,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        gradient_state: GradientState | None = None,
        num_processes: int | None = None,
        unit: str = "process",
    ) -> None:
        self.scheduler = scheduler
        self.optimizers: Sequence[Any] = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        self.gradient_state = GradientState() if gradient_state is None else gradient_state
        size = process.current().size if num_processes is None else num_processes
        self._takes_metric = isinstance(scheduler, ReduceLROnPlateau)
        once = split_batches or unit == "update" or self._takes_metric
        self._steps_per_call = 1 if once else size

    @property
    def steps_per_update(self) -> int:
        """How often the schedule advances per update of its optimizers."""
        return self._steps_per_call if self.step_with_optimizer else 1

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule if the optimizers have stepped."""
        state = self.gradient_state
        # After an epoch a metric counts, also if the epoch has left a window open, or if its last step was skipped.
        by_metric = self._takes_metric and (state.sync_gradients or not state.running)
        if by_metric or not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not state.sync_gradients:
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        for _ in range(self._steps_per_call):
            # A schedule with a fixed end stays at its last rate: torch's would bounce back, then raise.
            if not _is_over(self.scheduler):
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """The current learning rates, one per parameter group."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> list[float]:
        """The learning rates that the schedule computes now."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> None:
        """Print the learning rates where the scheduler can."""
        self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped scheduler's state."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the wrapped scheduler's state."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not set yet: copying and unpickling ask before the state is there
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "gradient_state": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.gradient_state = GradientState()


def _is_over(scheduler: Any) -> bool:
    """Whether a schedule, or what it is put together from, has an end and has come to it."""
    total = getattr(scheduler, "total_steps", None)
    if total is not None:
        return bool(scheduler.last_epoch >= total - 1)
    parts = getattr(scheduler, "_schedulers", ())  # of a SequentialLR or a ChainedScheduler
    if parts and (milestones := getattr(scheduler, "_milestones", ())):
        parts = parts[-1:] if scheduler.last_epoch >= milestones[-1] else ()
    return any(map(_is_over, parts))

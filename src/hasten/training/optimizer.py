"""The prepared optimizer: it steps only when an accumulation window is complete."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hasten.training.accumulation import GradientState


class AcceleratedOptimizer(torch.optim.Optimizer):
    """A thin view of `optimizer` whose `step` and `zero_grad` do nothing inside an accumulation window.

    Args:
        optimizer: the user's optimizer; its parameters, state and groups are seen through.
        device_placement: move state that exists already to its parameters' devices.
        scaler: the gradient scaler of fp16 training, or None.
        gradient_state: the accumulation state to obey; the newest Accelerator's by default.
        update_scale: called after a scaled step, in place of `scaler.update`; several optimizers share one scaler.

    Attributes:
        step_was_skipped: whether the last step was left out because gradients were not finite.
        follow: called with the wrapped optimizer when it has got further parameters, which may be sharded.
        before_step: called with this optimizer before each update.
    """

    step_was_skipped = False
    follow: Callable[[torch.optim.Optimizer], Any] | None = None
    before_step: Callable[[AcceleratedOptimizer], Any] | None = None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        *,
        gradient_state: GradientState | None = None,
        update_scale: Callable[[Any], None] | None = None,
    ) -> None:
        # Optimizer.__init__ is not called: the wrapped optimizer owns parameters, state and hooks.
        self.optimizer = optimizer
        self.scaler = scaler
        self.device_placement = device_placement
        self.gradient_state = GradientState() if gradient_state is None else gradient_state
        self.update_scale = update_scale
        self._takes_set_to_none = "set_to_none" in inspect.signature(optimizer.zero_grad).parameters
        if device_placement and _state_is_elsewhere(optimizer):
            # torch's own loading puts each tensor where its parameter is, and knows the ones that stay on the CPU.
            optimizer.load_state_dict(optimizer.state_dict())

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state by parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:
        """The wrapped optimizer's parameter groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: Any) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> Any:
        """The wrapped optimizer's default options."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: Any) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer; parameters that have been sharded since are followed."""
        from hasten.weights.successors import current

        parameters = param_group["params"]
        if not isinstance(parameters, set):  # torch refuses it, since it has no order
            listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
            parameters = [(each[0], current(each[1])) if isinstance(each, tuple) else current(each) for each in listed]
        self.optimizer.add_param_group({**param_group, "params": parameters})
        if self.follow is not None:
            self.follow(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state."""
        return self.optimizer.state_dict()

    def divide_state(self) -> None:
        """Turn state that lives on single ranks, as that of Muon over sharded models, into DTensors; all ranks must call it."""
        divide = getattr(getattr(self.optimizer, "_steps_over", None), "divide_state", None)
        if divide is not None:
            divide(self.optimizer)

    @property
    def owners(self) -> Mapping[Any, int]:
        """Which rank along its axis owns a parameter, for optimizers that step over whole ones; else empty."""
        return getattr(getattr(self.optimizer, "_steps_over", None), "owners", {})

    def give(self, owners: Mapping[Any, int]) -> None:
        """Let parameters have these owners from now on, who must have their state; all ranks must call it with the same.

        Raises:
            ValueError: the wrapped optimizer does not step over whole parameters.
        """
        give = getattr(getattr(self.optimizer, "_steps_over", None), "give", None)
        if give is None:
            raise ValueError(
                f"This {type(self.optimizer).__name__} does not step over whole parameters that ranks own, as the one did whose "
                "state is loaded: use the same class, and prepare it with its model."
            )
        give(owners)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the wrapped optimizer's state; tensors go to their parameters' devices."""
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters if the accumulation window is complete, else do nothing."""
        if not self.gradient_state.sync_gradients:
            return None
        self.gradient_state.updates += 1
        if self.before_step is not None:
            self.before_step(self)
        if self.scaler is None:
            return self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        return self._scaled_step(closure)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients if the accumulation window is complete, else do nothing.

        Raises:
            ValueError: `set_to_none` is given although the wrapped optimizer does not know it.
        """
        if not self.gradient_state.sync_gradients:
            return
        if self._takes_set_to_none:
            self.optimizer.zero_grad(set_to_none=True if set_to_none is None else set_to_none)
        elif set_to_none is not None:
            raise ValueError(f"{type(self.optimizer).__name__}.zero_grad does not take `set_to_none`; call it without.")
        else:
            self.optimizer.zero_grad()

    def train(self) -> None:
        """Switch a schedule-free optimizer to training; others ignore it."""
        self._forward_mode("train")

    def eval(self) -> None:
        """Switch a schedule-free optimizer to evaluation; others ignore it."""
        self._forward_mode("eval")

    def _forward_mode(self, mode: str) -> None:
        for optimizer in (self.optimizer, getattr(self.optimizer, "optimizer", None)):
            if optimizer is not None and callable(getattr(optimizer, mode, None)):
                getattr(optimizer, mode)()
                return

    def _scaled_step(self, closure: Callable[[], Any] | None) -> Any:
        assert self.scaler is not None
        if closure is not None:
            raise ValueError(
                f"{type(self.optimizer).__name__}.step(closure) cannot be combined with fp16: the scaler must see the gradients "
                "before the step. Use mixed_precision='bf16' or 'no', or step without a closure."
            )
        if not any(parameter.grad is not None for group in self.param_groups for parameter in group["params"]):
            # Nothing to unscale or to look at, which the scaler takes for an error; without a scaler it is none.
            self.step_was_skipped = False
            return self.optimizer.step()
        ran: list[bool] = []
        watch = self.optimizer.register_step_post_hook(lambda *_: ran.append(True))
        try:
            result = self.scaler.step(self.optimizer)
        finally:
            watch.remove()
        self.step_was_skipped = not ran or self._skipped_inside(self.scaler)
        if self.update_scale is None:
            self.scaler.update()
        else:
            self.update_scale(self)
        return result

    def _skipped_inside(self, scaler: torch.amp.GradScaler) -> bool:
        # A fused optimizer is always called, and leaves its parameters alone where gradients are infinite.
        if not getattr(self.optimizer, "_step_supports_amp_scaling", False) or not scaler.is_enabled():
            return False
        from hasten.world import torch_private

        return torch_private.found_infinite(scaler, self.optimizer)

    def __getattr__(self, name: str) -> Any:
        # Hooks, and whatever else an optimizer has of its own.
        if name == "optimizer":  # not set yet: copying and unpickling ask before the state is there
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        # The shared parts (accumulation state, scaler's bookkeeping) belong to an Accelerator, not to a pickle of its optimizer,
        # nor does the `step` that torch's schedulers put on an optimizer to watch it.
        state = {**self.__dict__, "gradient_state": None, "update_scale": None, "follow": None, "before_step": None}
        state.pop("step", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.gradient_state = GradientState()

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"


def _state_is_elsewhere(optimizer: torch.optim.Optimizer) -> bool:
    return any(
        isinstance(value, torch.Tensor) and value.dim() > 0 and value.device != parameter.device
        for parameter, values in getattr(optimizer, "state", {}).items()
        if isinstance(parameter, torch.Tensor) and isinstance(values, dict)
        for value in values.values()
    )

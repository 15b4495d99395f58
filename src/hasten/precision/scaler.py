"""Loss scaling for fp16: one scaler for all optimizers of an Accelerator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hasten.settings.handlers import GradScalerKwargs


class LossScaling:
    """A `torch.amp.GradScaler`, and the bookkeeping that lets several optimizers share it.

    The scale is updated once per window: when every optimizer has stepped, or else before the next backward pass.
    """

    def __init__(self, device_type: str, handler: GradScalerKwargs | None = None) -> None:
        arguments = {} if handler is None else handler.to_kwargs()
        self.scaler = torch.amp.GradScaler(device_type, **arguments)
        self._optimizers: list[Any] = []
        self._stepped: set[int] = set()

    def join(self, optimizer: Any) -> None:
        """Let a prepared optimizer take part."""
        if not any(optimizer is other for other in self._optimizers):
            self._optimizers.append(optimizer)

    def leave_all(self) -> None:
        """Forget all optimizers."""
        self._optimizers.clear()
        self._stepped.clear()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the present scale."""
        self.settle()
        return self.scaler.scale(loss)

    def stepped(self, optimizer: Any) -> None:
        """Note that an optimizer has stepped or skipped its step."""
        self._stepped.add(id(optimizer))
        if len(self._stepped) >= len(self._optimizers):
            self.settle()

    def settle(self) -> None:
        """Update the scale if a step was taken since the last update."""
        if self._stepped:
            self._stepped.clear()
            self.scaler.update()

    @staticmethod
    def owners(optimizers: Sequence[Any], parameters: Iterable[torch.Tensor]) -> Sequence[Any]:
        """The prepared optimizers that update some of `parameters`, or all if none of them does.

        Another optimizer may be in the middle of its own window: its gradients must stay scaled.
        """
        wanted = {id(parameter) for parameter in parameters}
        found = [
            optimizer
            for optimizer in optimizers
            if any(id(parameter) in wanted for group in optimizer.param_groups for parameter in group["params"])
        ]
        return found or optimizers

    def unscale(self, optimizers: Iterable[Any]) -> None:
        """Divide the gradients of some prepared optimizers by the scale, at most once per step."""
        if not self.scaler.is_enabled():
            return
        for optimizer in optimizers:
            # The user's own optimizer may wrap another one too; the scaler steps the outer one, so it must unscale that one.
            while hasattr(type(optimizer), "step_was_skipped"):
                optimizer = optimizer.optimizer
            if _has_gradients(optimizer) and not self._is_unscaled(optimizer):
                self.scaler.unscale_(optimizer)

    def _is_unscaled(self, optimizer: Any) -> bool:
        from hasten.world import torch_private

        return torch_private.is_unscaled(self.scaler, optimizer)


def _has_gradients(optimizer: Any) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])

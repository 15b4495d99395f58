"""What the user sets about gradient accumulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hasten.settings.kwargs import KwargsHandler

SCALES = ("num_steps", "window", "weight")


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How many micro-batches make one update, and what ends a window early.

    Args:
        num_steps: micro-batches per update (>= 1).
        adjust_scheduler: kept for compatibility of the signature; only its default is accepted, since a prepared
            scheduler already advances once per update.
        sync_with_dataloader: end the window with the loader's last batch, so that no gradient is carried over.
        sync_each_batch: reduce the gradients of every micro-batch: less memory, more communication.
        scale: what losses are divided by, so that the gradient of a window is that of its mean. "num_steps", the default: by
            the nominal number of micro-batches, also in a shorter window at the end of a loader. "window": by the real number.
            "weight": by the weights of the whole window on all data-parallel ranks; then `accelerator.backward(loss_sum,
            weight=n_tokens)` gives exactly the gradient of sum(loss) / sum(weight), whatever the micro-batches hold.

    Raises:
        ValueError: `num_steps` is below 1, an unknown `scale`, or `adjust_scheduler=False`.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    scale: str = "num_steps"

    def __post_init__(self) -> None:
        steps: Any = self.num_steps
        if steps is not None and (not hasattr(steps, "__index__") or isinstance(steps, bool) or steps < 1):
            raise ValueError(
                f"GradientAccumulationPlugin(num_steps={self.num_steps!r}): the number of micro-batches per update must "
                "be a whole number of at least 1."
            )
        if self.scale not in SCALES:
            raise ValueError(
                f"GradientAccumulationPlugin(scale={self.scale!r}): allowed are {', '.join(map(repr, SCALES))}."
            )
        if not self.adjust_scheduler:
            raise ValueError(
                "GradientAccumulationPlugin(adjust_scheduler=False): only True is legal. A prepared scheduler advances once per "
                "update (and process, see Accelerator(scheduler_unit=...)), not once per micro-batch, however it was written. For "
                "a schedule that counts micro-batches, do not prepare the scheduler and step it yourself."
            )

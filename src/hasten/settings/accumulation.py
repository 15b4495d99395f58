"""What the user sets about gradient accumulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hasten.settings.kwargs import KwargsHandler


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How many micro-batches make one update, and what ends a window early.

    Args:
        num_steps: micro-batches per update (>= 1).
        adjust_scheduler: kept for compatibility of the signature; only its default is accepted, since a prepared
            scheduler already advances once per update.
        sync_with_dataloader: end the window with the loader's last batch, so that no gradient is carried over.
        sync_each_batch: reduce the gradients of every micro-batch: less memory, more communication.

    Raises:
        ValueError: `num_steps` is below 1.
        NotImplementedError: `adjust_scheduler=False`.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        steps: Any = self.num_steps
        if steps is not None and (not hasattr(steps, "__index__") or isinstance(steps, bool) or steps < 1):
            raise ValueError(
                f"GradientAccumulationPlugin(num_steps={self.num_steps!r}): the number of micro-batches per update must "
                "be a whole number of at least 1."
            )
        if not self.adjust_scheduler:
            raise NotImplementedError(
                "GradientAccumulationPlugin(adjust_scheduler=False) is not built yet (area: training semantics): a prepared "
                "scheduler advances when its optimizer does. Leave the setting at True, or step an unprepared scheduler."
            )

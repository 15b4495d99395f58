"""Parameters that an optimizer updates although their model was never prepared: every process trains its own."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from hasten.world.process import World

_logger = logging.getLogger(__name__)
_SHOWN = 3


def tell(optimizer: Any, models: Iterable[torch.nn.Module], world: World) -> None:
    """Warn, on rank 0, of parameters with gradients that belong to no prepared model.

    Args:
        optimizer: is about to make its first step.
        models: the prepared models.
        world: the ranks.
    """
    if not world.is_main:
        return
    known = {id(parameter) for model in models for parameter in model.parameters()}
    trained = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    strangers = [each for each in trained if id(each) not in known and not hasattr(each, "device_mesh")]
    if strangers:
        shapes = ", ".join(str(tuple(each.shape)) for each in strangers[:_SHOWN])
        _logger.warning(
            "%d of the %d parameters that %s updates (of shapes %s%s) are in no model that was prepared, so nothing averages "
            "their gradients: each of the %d processes trains its own. Prepare their model, too (`accelerator.prepare(model)`), "
            "or average them yourself (`accelerator.reduce(parameter.grad, 'mean')`).",
            len(strangers),
            len(trained),
            type(optimizer.optimizer).__name__,
            shapes,
            ", ..." if len(strangers) > _SHOWN else "",
            world.size,
        )

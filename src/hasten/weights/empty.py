"""Models without values: what of them is on the meta device."""

from __future__ import annotations

from torch import nn

from hasten.weights.names import class_name


def find_empty(model: nn.Module) -> list[str]:
    """The names of parameters and buffers that have no values."""
    return [name for name, each in [*model.named_parameters(), *model.named_buffers()] if each.is_meta]


def check_values(model: nn.Module) -> None:
    """Refuse a model that is about to run or to be saved without values.

    Raises:
        RuntimeError: names the first of its tensors on the meta device, and says how they get values.
    """
    if empty := find_empty(model):
        raise RuntimeError(
            f"{len(empty)} tensors of {class_name(model)} ({empty[0]}, ...) are on the meta device and have no values. After "
            "`prepare` load them with `accelerator.load_weights(model, path)`, or let FullyShardedDataParallelPlugin make them "
            "(`param_init_fn`) or take those of the first process (`cpu_ram_efficient_loading=True`)."
        )

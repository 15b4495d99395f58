"""What a checkpoint holds: the objects, and the names of their files, which are the reference's."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

OPTIMIZER_NAME = "optimizer.bin"
SCHEDULER_NAME = "scheduler.bin"
SCALER_NAME = "scaler.pt"
CUSTOM_NAME = "custom_checkpoint_{}.pkl"
EXCHANGE_NAME = "exchange_orders.bin"

_OURS = re.compile(
    r"(model|pytorch_model)(_\d+)?\.(safetensors|bin)|(optimizer|scheduler|sampler)(_\d+)?\.bin|scaler\.pt|exchange_orders\.bin|"
    r"dl_state_dict(_\d+)?(_rank\d+)?\.bin|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl|"
    r"pytorch_model_fsdp(_\d+)?(_rank\d+)?\.(bin|safetensors)|optimizer_\d+_rank\d+\.bin"
)


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds. The order within each list is what ties an object to its files.

    Args:
        models: the users' own modules.
        optimizers, schedulers, dataloaders, custom: objects with `state_dict` and `load_state_dict`.
        scaler: the gradient scaler, or None.
        step: the number of micro-batches since the last reset.
        exchange_orders: for each model the names of its gradients in the order of their exchange, or None.
        divided: whether each process holds only a part of the models: then all of them must save and load together.
    """

    models: Sequence[torch.nn.Module] = ()
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Any] = ()
    dataloaders: Sequence[Any] = ()
    custom: Sequence[Any] = ()
    scaler: Any = None
    step: int = 0
    exchange_orders: Sequence[list[str] | None] = ()
    divided: bool = False


def is_state_file(name: str) -> bool:
    """Whether a file of this name belongs to the state of a run."""
    return _OURS.fullmatch(name) is not None


def concerns(name: str, rank: int) -> bool:
    """Whether a process reads a file of a checkpoint: a thousand processes need not look at a thousand such files each."""
    match = re.fullmatch(r"random_states_(\d+)\.pkl|.*_rank(\d+)\.bin", name)
    return match is None or rank == int(match[1] or match[2])


def numbered(name: str, index: int) -> str:
    """The name of the file of object number `index`: "optimizer.bin", "optimizer_1.bin", ..."""
    stem, suffix = os.path.splitext(name)
    return name if index == 0 else f"{stem}_{index}{suffix}"

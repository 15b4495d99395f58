"""Memory that is not needed any more: collecting it, giving it back to the device, and knowing when there was too little."""

from __future__ import annotations

import gc
from typing import Any

import torch

from hasten.world.devices import best_device, is_out_of_memory


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give the device memory that torch keeps for later use, and that no tensor occupies, back to the device.

    Does nothing on the CPU, whose allocator keeps nothing.

    Args:
        garbage_collection: first let Python collect objects that only refer to each other.
    """
    if garbage_collection:
        gc.collect()
    best_device().empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Collect what nobody refers to any more, empty the device's cache, and return a None for each of `objects`.

    Assign the result to your names of the objects. They go at that assignment, after this call: no function can take a caller's
    names away. To give back the device memory that they had as well, follow it with `clear_device_cache()`.

    Example:
        >>> model, optimizer = release_memory(model, optimizer)
        >>> clear_device_cache(garbage_collection=True)
    """
    clear_device_cache(garbage_collection=True)
    return [None for _ in objects]


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Whether an exception says that a device, or the host, had too little memory.

    True for every `torch.OutOfMemoryError`, and for a RuntimeError whose only argument contains a text of the device table.
    """
    if isinstance(exception, torch.OutOfMemoryError):
        return True
    return isinstance(exception, RuntimeError) and len(exception.args) == 1 and is_out_of_memory(str(exception.args[0]))

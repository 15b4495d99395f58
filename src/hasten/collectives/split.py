"""Split: each process gets its part of some inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hasten.collectives.nested import honor_mapping
from hasten.world import process
from hasten.world.process import World


@contextmanager
def split_between_processes(inputs: Any, apply_padding: bool = False, *, world: World | None = None) -> Iterator[Any]:
    """Give each process its part of `inputs`: the first ones get one element more where the number does not divide.

    Nothing is sent, and `inputs` is never changed.

    Args:
        inputs: a list, tuple, tensor (split along its first dimension), `datasets.Dataset`, or a mapping of such, all of one
            length. Texts and objects of other types come out whole.
        apply_padding: give every process the same number of elements by repeating the last one (tensors come out on the
            process's device), so that the results can be gathered.
        world: the processes to split between; by default all.

    Raises:
        ValueError: the values of a mapping differ in length.
        TypeError: a tensor without a dimension.

    Example:
        >>> with split_between_processes(["a", "b", "c"]) as part:  # on 2 processes
        ...     print(part)
        ['a', 'b']
        ['c']
    """
    world = world or process.current()
    yield inputs if world.size == 1 else _part(inputs, world, apply_padding)


def _part(inputs: Any, world: World, padded: bool) -> Any:
    length = _length(inputs)
    if length is None:
        return inputs
    least, extra = divmod(length, world.size)
    start = world.rank * least + min(world.rank, extra)
    stop = start + least + (world.rank < extra)
    missing = least + (extra > 0) - (stop - start) if padded and length else 0
    return _take(inputs, start, stop, missing, world.device if padded else None)


def _length(inputs: Any) -> int | None:
    """How many elements there are to split; None if `inputs` is whole."""
    if isinstance(inputs, (list, tuple, torch.Tensor)) or _is_dataset(inputs):
        return len(inputs)
    if not isinstance(inputs, Mapping):
        return None
    lengths = {key: length for key, value in inputs.items() if (length := _length(value)) is not None}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"All values in the dictionary must have the same length, but they have {lengths}.")
    return next(iter(lengths.values()), None)


def _is_dataset(inputs: Any) -> bool:
    return hasattr(inputs, "column_names") and callable(getattr(inputs, "select", None))


def _take(inputs: Any, start: int, stop: int, missing: int, device: torch.device | None) -> Any:
    if isinstance(inputs, Mapping):
        return honor_mapping(inputs, {key: _take(value, start, stop, missing, device) for key, value in inputs.items()})
    if isinstance(inputs, torch.Tensor):
        part = inputs[start:stop]
        if missing:
            part = torch.cat([part, *[inputs[-1:]] * missing])
        return part if device is None else part.to(device)
    if isinstance(inputs, (list, tuple)):
        tail: Any = inputs[-1:] * missing
        return inputs[start:stop] + tail
    if _is_dataset(inputs):
        return inputs.select([*range(start, stop), *[len(inputs) - 1] * missing])
    return inputs

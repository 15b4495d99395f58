"""Metrics: the results of all processes for one batch, without what padding has added."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from hasten.collectives.gather import gather_as
from hasten.collectives.nested import (
    children,
    concatenate,
    find_device,
    honor_mapping,
    recursively_apply,
    send_to_device,
)
from hasten.collectives.objects import gather_each, items_of
from hasten.collectives.wire import Wire, wire_of
from hasten.world.agreement import DistributedOperationException, key_text
from hasten.world.process import World

_NAME = "gather_for_metrics"
_logger = logging.getLogger(__name__)


class Loader(Protocol):
    """What must be known of the loader that gave the batch."""

    end_of_dataloader: bool
    remainder: int


def gather_for_metrics(
    input_data: Any, loader: Loader | None, use_gather_object: bool = False, *, world: World | None = None
) -> Any:
    """Gather what was computed from a batch, and drop what belongs to the samples that completed the last one.

    Args:
        input_data: tensors, in any nesting, whose first dimension counts samples; or objects: a list with one item for each
            sample, or a mapping of such lists and tensors.
        loader: the loader being iterated over, or None outside of a loop.
        use_gather_object: exchange tensors as objects too, e.g. where their shapes differ between processes.
        world: the processes to gather from; by default all.

    Returns:
        For tensors, what `gather` returns. For a list or another iterable of objects, one list of all processes' items. For a
        mapping, a mapping of joined values. On the loader's last batch what belongs to repeated samples is left out. Of a
        loader that gives every process all of the data, the results of the main process are returned. A process alone gets
        its argument back: nothing was added to its batch.

    Raises:
        DistributedOperationException: the processes do not hold the same; the same error on every one.
    """
    wire = wire_of(world)
    if wire is None:
        return input_data
    tensors = not use_gather_object and _is_of_tensors(input_data)
    if tensors and loader is not None and getattr(loader, "has_uneven_rows", False):
        joined = _gather_uneven(input_data, wire, loader.end_of_dataloader)
    elif tensors:
        joined = gather_as(_NAME, input_data, wire, of="tensors")
    else:
        joined = _join(gather_each(input_data, _NAME, wire, of="objects"))
    if loader is not None and getattr(loader, "is_replicated", False):
        return _select(joined, tensors, lambda rows: slice(rows // wire.size))
    if loader is None or not loader.end_of_dataloader or loader.remainder == 0:
        return joined
    padded = getattr(loader, "padded_ranks", 0)
    if padded:
        return _select(joined, tensors, lambda rows: _without_last(rows, wire.size, padded))
    if loader.remainder < 0:
        _logger.info(
            "The loader's dataset has no length, so the results of its last batch are returned with all that was gathered; "
            "drop repeated samples yourself."
        )
        return joined
    remainder = loader.remainder
    return _select(joined, tensors, lambda rows: slice(remainder))


def _gather_uneven(data: Any, wire: Wire, is_last: bool) -> Any:
    """Tensors whose first dimension is another one on each process, in rank order."""
    of = "tensors of the last batch" if is_last else "tensors of different lengths"
    parts = gather_each(send_to_device(data, "cpu"), _NAME, wire, of=of)  # a device of another process is not here
    return send_to_device(concatenate(parts), find_device(data))


def _is_of_tensors(data: Any) -> bool:
    kinds = {isinstance(leaf, torch.Tensor) for leaf in _leaves(data)}
    # Without any leaf it is one of the empty lists of objects that a process may have.
    return kinds == {True}


def _leaves(data: Any) -> Iterator[Any]:
    inner = None if isinstance(data, torch.Tensor) else children(data)
    if inner is None:
        yield data
    else:
        for _, item in inner:
            yield from _leaves(item)


def _join(parts: list[Any]) -> Any:
    """The objects of all processes as one: mappings by key, tensors along their first dimension, all else as one list."""
    first = parts[0]
    if any(isinstance(part, Mapping) for part in parts):
        forms = [sorted(map(key_text, part)) if isinstance(part, Mapping) else type(part).__name__ for part in parts]
        if any(form != forms[0] for form in forms):
            listed = "\n".join(f"  rank {rank}: {form}" for rank, form in enumerate(forms))
            raise DistributedOperationException(
                f"`gather_for_metrics` joins mappings by key, but the processes do not have the same keys:\n{listed}\n"
                "Pass the same keys everywhere, or gather them as they are with `gather_object`."
            )
        return honor_mapping(first, {key: _join([part[key] for part in parts]) for key in first})
    if all(isinstance(part, torch.Tensor) and part.dim() and part.shape[1:] == first.shape[1:] for part in parts):
        return torch.cat(parts)
    return [item for part in parts for item in items_of(part)]


def _select(joined: Any, tensors: bool, choose: Callable[[int], slice | list[int]]) -> Any:
    """The rows of each tensor or list that `choose` names, given their number."""
    if tensors:
        return recursively_apply(lambda tensor: tensor[choose(len(tensor))], joined)
    if isinstance(joined, Mapping):
        return honor_mapping(joined, {key: _select(value, False, choose) for key, value in joined.items()})
    rows = choose(len(joined))
    if isinstance(rows, slice) or isinstance(joined, torch.Tensor):
        return joined[rows]
    return [joined[row] for row in rows]


def _without_last(rows: int, ranks: int, padded: int) -> list[int]:
    """The rows of all ranks, which have the same number each, without the last one of each of the last `padded` ranks."""
    own = rows // ranks
    return [row for row in range(rows) if (row + 1) % own or row // own < ranks - padded]

"""Objects: any picklable Python objects, exchanged by value."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hasten.collectives.wire import Wire, wire_of
from hasten.world.agreement import Statement
from hasten.world.arrivals import call_site
from hasten.world.process import World


def gather_object(object: Any, *, world: World | None = None) -> Any:
    """Gather picklable objects from all processes into one flat list.

    The items of lists, tuples and other iterables are joined in rank order; a mapping, a text, bytes and anything that cannot
    be iterated over counts as one item. One collective if each process's pickle is smaller than 16 KB, otherwise two (one more
    for each process that has much more to send than the average). Pickles are loaded: the other processes are trusted.

    Args:
        object: what this process contributes.
        world: the processes to gather from; by default all.

    Returns:
        A list, the same on every process. A process alone gets its argument back.

    Raises:
        DistributedOperationException: an object of some process could not be pickled.

    Example:
        >>> gather_object([f"text of rank {rank}"])  # on 2 processes
        ['text of rank 0', 'text of rank 1']
        >>> gather_object({"rank": rank})
        [{'rank': 0}, {'rank': 1}]
    """
    wire = wire_of(world)
    if wire is None:
        return object
    return [item for each in gather_each(object, "gather_object", wire) for item in items_of(each)]


def gather_each(item: Any, operation: str, wire: Wire, **arguments: Any) -> list[Any]:
    """The object of each process, in rank order; on behalf of `operation` with `arguments` that must be the same."""
    bodies = wire.talk(_statement(operation, arguments, wire), _pickled(item, operation, wire))
    return [pickle.loads(body) for body in bodies]


def items_of(each: Any) -> Iterable[Any]:
    """What one process contributes to a flat list."""
    if isinstance(each, (Mapping, str, bytes, bytearray)) or not isinstance(each, Iterable):
        return (each,)
    return (each,) if isinstance(each, torch.Tensor) and each.dim() == 0 else each


def broadcast_object_list(object_list: Any, from_process: int = 0, *, world: World | None = None) -> Any:
    """Overwrite the items of a list, on every process, by those of one process.

    Args:
        object_list: a list of picklable objects, of the same length on every process.
        from_process: the rank whose items all get.
        world: the processes to send to; by default all.

    Returns:
        The same list.

    Raises:
        ValueError: there is no process `from_process`.
        DistributedOperationException: the lengths differ, or an object could not be pickled.
    """
    wire = wire_of(world)
    if wire is None:
        return object_list
    wire.check_source(from_process)
    name, sends = "broadcast_object_list", wire.rank == from_process
    if not isinstance(object_list, list):
        wire.fail(name, TypeError(f"`{name}` overwrites the items of a list in place, but got {type(object_list)}."))
    arguments = {"length": len(object_list), "from_process": from_process}
    own = _pickled(object_list, name, wire) if sends else b""
    bodies = wire.talk(_statement(name, arguments, wire), own)
    if not sends:
        object_list[:] = pickle.loads(bodies[from_process])
    return object_list


def _statement(operation: str, arguments: dict[str, Any], wire: Wire) -> Statement:
    return Statement(operation, arguments, site=call_site() if wire.debug else None)


def _pickled(item: Any, operation: str, wire: Wire) -> bytes:
    try:
        return pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        wire.fail(operation, error)

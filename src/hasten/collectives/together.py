"""Steps that all processes take together: a failure of one is an error of all, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hasten.collectives.objects import broadcast_object_list, gather_object
from hasten.world.process import World

T = TypeVar("T")


def together(world: World | None, what: str, action: Callable[[], T]) -> T:
    """Do something on every process; one small message tells who failed.

    Args:
        world: the processes; None for this one alone.
        what: the beginning of the error's text.
        action: what to do.

    Raises:
        RuntimeError: the action failed on another process, which is named; this process's own error is raised as it is.
        TimeoutError: another process did not come; see `hasten.world.arrivals`.
    """
    own: Exception | None = None
    try:
        result = action()
    except Exception as error:
        if world is None or world.size == 1:
            raise
        own = error
    if world is None or world.size == 1:
        return result
    told = None if own is None else in_words(world.rank, own)
    problems = [text for text in gather_object([told], world=world) if text is not None]
    if own is not None:
        raise own
    if problems:
        raise RuntimeError(f"{what}: {problems[0]}")
    return result


def from_main(world: World | None, what: str, action: Callable[[], T]) -> T:
    """What the main process gets by doing something, on every process; one broadcast.

    Args:
        world: the processes; None for this one alone.
        what: the beginning of the error's text.
        action: what the main process does. The others must be able to load its result.

    Raises:
        RuntimeError: the action failed, on the other processes; on the main one its own error is raised as it is.
    """
    if world is None or world.size == 1:
        return action()
    told: list[Any] = [None, None]
    own: Exception | None = None
    if world.is_main:
        try:
            told[0] = action()
        except Exception as error:
            own = error
            told[1] = in_words(0, error)
    broadcast_object_list(told, world=world)
    if own is not None:
        raise own
    if told[1] is not None:
        raise RuntimeError(f"{what}: {told[1]}")
    result: T = told[0]
    return result


def in_words(rank: int, error: BaseException) -> str:
    """How the failure of one process is told to the others."""
    return f"rank {rank} failed with {type(error).__name__}: {error}"

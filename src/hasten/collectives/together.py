"""Steps that all processes take together: a failure of one is an error of all, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hasten.collectives.objects import gather_object
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
    told = None if own is None else f"rank {world.rank} failed with {type(own).__name__}: {own}"
    problems = [text for text in gather_object([told], world=world) if text is not None]
    if own is not None:
        raise own
    if problems:
        raise RuntimeError(f"{what}: {problems[0]}")
    return result

"""One attempt at a function that may run out of memory, alone or by all processes together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from hasten.world import memory, process

if TYPE_CHECKING:
    from hasten.world.process import World
    from hasten.world.said import Said

_DONE, _MEMORY, _ERROR = "done", "memory", "error"
_SHOWN = 500  # characters of an error's text that travel
_ADVICE = (
    "Processes can reduce their batch size together only in a function that exchanges nothing: see `synchronize` of "
    "find_executable_batch_size."
)


def alone(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Call a function; its result and None, or None and the error if memory ran out. Other errors are raised."""
    try:
        return call(), None
    except Exception as error:
        if not memory.should_reduce_batch_size(error):
            raise
        return None, error


def together(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """As `alone`, but where memory ran out in any process, every process gets an error.

    Raises:
        RuntimeError: another process failed in another way, or this one did and that may be because another lacked memory.
        TimeoutError: another process does not come to the end of its attempt.
    """
    world = process.current()
    if world.size == 1:
        return alone(call)
    from hasten.world.said import Said

    said = Said(world, "attempts")
    try:
        result, error = alone(call)
    except Exception as other:
        _fail(said, world, other)
    said.say(_DONE if error is None else f"{_MEMORY}{_text(error)}")
    try:
        everyone = said.all()
    except TimeoutError as late:
        if error is None:
            raise
        raise RuntimeError(f"{late} They probably wait for this one, which ran out of memory. {_ADVICE}") from error
    broken = {rank: text for rank, text in everyone.items() if text.startswith(_ERROR)}
    if broken:
        why = "" if error is None else f" They probably waited for this one, which ran out of memory. {_ADVICE}"
        raise RuntimeError(
            f"Rank {world.rank}: {_told(broken, _ERROR)}, so the attempt failed for all.{why}"
        ) from error
    lacking = {rank: text for rank, text in everyone.items() if text.startswith(_MEMORY)}
    if lacking and error is None:
        return None, torch.OutOfMemoryError(f"{_told(lacking, _MEMORY)}.")
    return result, error


def _fail(said: Said, world: World, error: Exception) -> NoReturn:
    """Tell the others of an error, so that they do not wait, and raise it, with the likely cause if there is one."""
    said.say(f"{_ERROR}{_text(error)}")
    lacking = {rank: text for rank, text in said.heard().items() if text.startswith(_MEMORY)}
    if not lacking:
        raise error
    raise RuntimeError(
        f"Rank {world.rank} failed, probably because it waited for others: {_told(lacking, _MEMORY)}. {_ADVICE}"
    ) from error


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_SHOWN]


def _told(texts: dict[int, str], kind: str) -> str:
    what = "ran out of memory" if kind == _MEMORY else "failed"
    return "; ".join(f"rank {rank} {what} ({text.removeprefix(kind)})" for rank, text in texts.items())

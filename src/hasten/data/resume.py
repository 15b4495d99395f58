"""Where a loader is: which epoch, how far into it, and from which random state its order was drawn.

A prepared loader and those that `skip_first_batches` made from it share one `Progress`, because they walk through the same epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hasten.data.randomness import ALL, State, capture, differs

_END: Any = object()

# How a pass stood when its state was taken.
IDLE = "idle"  # between epochs
RUNNING = "running"  # a batch was in the loop's body
ENDING = "ending"  # the last batch was in the loop's body
LEFT = "left"  # the loop had been left by `break` or an error


@dataclass(frozen=True)
class Count:
    """How positions are counted over all ranks, so that they mean the same on any number of ranks.

    Args:
        what: "samples", or "batches" where batches can not be divided anew.
        per_step: how many of these a step of all ranks takes.
    """

    what: str
    per_step: int


@dataclass(frozen=True)
class Start:
    """Where a pass begins: after `offset` (see `Count`), then `batches` of this rank; `state` is what it continues."""

    offset: int
    batches: int
    state: State | None = None


@dataclass
class Position:
    """One pass over the data.

    Args:
        offset: what is left out before the first batch, in what `Count` counts: a pass of another number of ranks ended there.
        batches: batches handed to the loop after that, the skipped ones included.
        draws_seed: whether a seed for workers was drawn before the order; workers that are kept have theirs.
        order: the generators' states before the order was drawn.
        ahead: those before the batch that has been fetched ahead, if fetching draws.
        data: the state of a dataset that has one, before the batch that has been fetched ahead.
        running: whether the loop is in its body.
        last: whether the last batch has been handed out.
    """

    offset: int = 0
    batches: int = 0
    draws_seed: bool = True
    order: State | None = None
    ahead: State | None = None
    data: Any = None
    running: bool = True
    last: bool = False

    @property
    def status(self) -> str:
        """How the pass stands."""
        if not self.running:
            return LEFT
        return ENDING if self.last else RUNNING


@dataclass
class Progress:
    """The epochs of a loader.

    Args:
        iteration: the epoch of the next pass, or of the one that runs.
        position: the pass that runs or was left; None between epochs.
        pending: a state that was loaded and that the next pass continues.
        keeps_workers: the workers were started before the state was saved, so that starting them again must not draw.
        fetch_kinds: the kinds of generators that fetching a batch draws from; None until the first batches have shown it.
    """

    iteration: int = 0
    position: Position | None = None
    pending: State | None = None
    keeps_workers: bool = False
    fetch_kinds: tuple[str, ...] | None = None

    def save(self) -> State:
        """The epoch and the position in it, as plain values and tensors."""
        position = self.position
        if position is None:
            return {"iteration": self.iteration, "status": IDLE, "offset": 0, "batches": 0}
        return {
            "iteration": self.iteration,
            "status": position.status,
            "offset": position.offset,
            "batches": position.batches,
            "draws_seed": position.draws_seed,
            "order": position.order,
            "ahead": position.ahead,
            "data": position.data,
        }

    def load(self, state: State) -> None:
        """Go to a saved position: the next pass continues it."""
        self.position = None
        self.pending = state if state["status"] != IDLE else None
        # In the body of its last batch an epoch is over for everybody but a loop that counts batches.
        self.iteration = state["iteration"] + (state["status"] == ENDING)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; a loaded position in another epoch is forgotten."""
        self.iteration = epoch
        if self.pending is not None:
            ending = self.pending["status"] == ENDING
            if not 0 <= epoch - self.pending["iteration"] <= ending:
                self.pending = None

    def take_pending(self, skip: int, find: Callable[[State], tuple[int, int]] | None) -> Start | None:
        """What the next pass, asked to leave out `skip` batches, does about a loaded position.

        Args:
            skip: batches to leave out.
            find: gives the offset and the batches before a position, for a pass that continues there by itself.

        Returns:
            Where it begins; None if nothing is left of its epoch.
        """
        state, self.pending = self.pending, None
        if state is None:
            return Start(0, skip)
        if state["status"] == ENDING:
            return None if skip >= state["batches"] else Start(0, skip)
        if find is not None and skip == 0:
            return Start(*find(state), state)
        if state["status"] == LEFT and skip == 0:
            # A loop that was left begins anew in an uninterrupted run, too, unless it is told to skip.
            return Start(0, 0)
        return Start(state["offset"], skip, state)


class FetchWatch:
    """Notes the random state before each batch that is fetched ahead, as long as fetching draws.

    The batch after the one in the loop's body is already there when a checkpoint is saved. To continue exactly it is fetched
    again, from the state that it was fetched from.
    """

    def __init__(self, progress: Progress, position: Position) -> None:
        self.progress = progress
        self.position = position

    def over(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches, watched while they are fetched."""
        drawing = True
        while drawing:
            self._before()
            batch = next(batches, _END)
            drawing = self._after()
            if batch is _END:
                return
            yield batch
        yield from batches

    def _before(self) -> None:
        kinds = self.progress.fetch_kinds
        self.position.ahead = capture(ALL if kinds is None else kinds)

    def _after(self) -> bool:
        """Returns whether to go on watching."""
        before, progress = self.position.ahead, self.progress
        if progress.fetch_kinds is None:
            assert before is not None
            progress.fetch_kinds = tuple(k for k in ALL if differs({k: before[k]}, capture([k])))
            self.position.ahead = before if progress.fetch_kinds else None
        return bool(progress.fetch_kinds)

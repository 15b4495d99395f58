"""Where a loader is: which epoch, how far into it, and from which random state its order was drawn.

A prepared loader and those that `skip_first_batches` made from it share one `Progress`, because they walk through the same epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hasten.data.randomness import ALL, Glance, State

_END: Any = object()
_PASSES = 2  # which are watched completely; the first batch of a pass can not be, since the order is drawn with it

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


class Start(NamedTuple):
    """Where a pass begins: after `offset` (see `Count`), then `batches` of this rank; `state` is what it continues."""

    offset: int
    batches: int
    state: State | None = None


@dataclass(slots=True)
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
        fetch_kinds: the kinds of generators that fetching a batch draws from; None until whole passes have shown it.
        drawn: those that the passes so far have shown.
        whole_passes: how many passes that has been watched.
    """

    iteration: int = 0
    position: Position | None = None
    pending: State | None = None
    keeps_workers: bool = False
    fetch_kinds: tuple[str, ...] | None = None
    drawn: set[str] = field(default_factory=set)
    whole_passes: int = 0

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
    """Notes the random state before each batch that is fetched ahead, if fetching it draws.

    Fetching may draw for some samples only. So it is only what was not drawn from in two whole passes that is not watched any more.

    The batch after the one in the loop's body is already there when a checkpoint is saved. To continue exactly it is fetched
    again, from the state that it was fetched from.
    """

    def __init__(self, progress: Progress, position: Position) -> None:
        self.progress = progress
        self.position = position
        self._kinds = ALL if progress.fetch_kinds is None else progress.fetch_kinds
        self._is_whole = position.offset == position.batches == 0

    def over(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches, watched while they are fetched."""
        first: Glance | None = None
        while True:
            before = Glance(self._kinds, None if "numpy" in self.progress.drawn else first)
            first = first or before
            batch = next(batches, _END)
            drawn = before.changed()
            self.progress.drawn.update(drawn)
            # What nobody has drawn from is not noted: it would be another one on each rank.
            self.position.ahead = before.state(drawn) if drawn else None
            if batch is _END:
                break
            yield batch
        self.progress.whole_passes += self._is_whole
        if self.progress.whole_passes >= _PASSES and self.progress.fetch_kinds is None:
            self.progress.fetch_kinds = tuple(kind for kind in ALL if kind in self.progress.drawn)

"""Arrivals: who waits where in the exchanges of a world, so that no process waits for another one without saying why.

An exchange that goes well costs nothing beside its wait. A process that has waited for long leaves a note in the store of the
job: the number of its call, what was called, and the user's line. When the wait ends in vain, those who waited read each
other's notes, and their error names who has not come.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from hasten.world.agreement import ORDER, grouped

if TYPE_CHECKING:
    from hasten.world.process import World

T = TypeVar("T")
_logger = logging.getLogger(__name__)

_PATIENCE_S = 2.0  # a wait of this length is noted
_TOLD_S = 60.0  # after a wait of this length the log says who is missing
_SLICE = timedelta(seconds=1)  # between two looks at signals, such as that of Ctrl-C
_SPIN_S = 0.0002  # a shorter sleep takes longer than most exchanges
_GRACE_S = 1.0  # for the notes of those whose wait ends a little later
_STORE_S = 5.0  # that the store may take, if the machine where it is does not answer
_SHOWN = 160  # characters of the backend's own text
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Between a user's `with` statement or decorator and this package.
_BETWEEN = (
    _PACKAGE,
    os.path.join(os.path.dirname(os.__file__), "contextlib.py"),
    os.path.dirname(torch.__file__) + os.sep,
)


class MissingProcessError(RuntimeError):
    """A process waited in vain for others in an exchange.

    Attributes:
        missing: the ranks that did not come; None if that could not be found out.
    """

    def __init__(self, text: str, missing: tuple[int, ...] | None = None) -> None:
        super().__init__(text)
        self.missing = missing

    def __reduce__(self) -> Any:
        return type(self), (*self.args, self.missing)


def call_site(whole: bool = False) -> str:
    """File and line from which this package was called.

    Args:
        whole: give the path of the file; otherwise without folders, which may differ between machines.
    """
    frame, _ = _caller()
    path = frame.f_code.co_filename
    return f"{path if whole else os.path.basename(path)}:{frame.f_lineno}"


def _caller() -> tuple[FrameType, str]:
    """The frame that called this package, and the public function of this package that it called, or nothing."""
    frame, before = sys._getframe(1), sys._getframe(0)
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(_BETWEEN):
        frame, before = frame.f_back, frame
    called = before.f_code
    public = called.co_name.isidentifier() and not called.co_name.startswith("_")
    return frame, called.co_name if public and os.path.abspath(called.co_filename).startswith(_PACKAGE) else ""


@dataclass(frozen=True)
class Note:
    """What a waiting process says of itself.

    Args:
        call: the how-manieth exchange of its world this is.
        operation: the exchange.
        site: file and line of the call.
        called: the function that was called there, if it is another one than the exchange.
    """

    call: int
    operation: str
    site: str
    called: str = ""

    def __str__(self) -> str:
        if self.called not in ("", self.operation):
            return f"`{self.called}` (its `{self.operation}`) at {self.site}"
        return f"`{self.operation}` at {self.site}"


class Arrivals:
    """The waits of one process in the exchanges of a world.

    Args:
        world: more than one process.
        polls: ask again and again whether an exchange is over, where the backend's own wait does not hold the host up (or cannot
            be limited); by default on accelerators.
    """

    def __init__(self, world: World, polls: bool) -> None:
        assert world.group is not None
        self._rank, self._size = world.rank, world.size
        self._name = f"hasten/arrivals/{world.group.group_name}"
        self._timeout_now = lambda: world.patience
        self._polls = polls
        self._patience = timedelta(seconds=min(_PATIENCE_S, self._timeout_now().total_seconds() / 4))
        self.call = 0
        self.operation = ""

    def begin(self, operation: str) -> None:
        """Note, here alone, that the next call has come."""
        self.call += 1
        self.operation = operation

    def wait(self, work: Any, on_host: bool = False) -> None:
        """Wait for an exchange that torch.distributed has begun.

        Args:
            work: its handle.
            on_host: the host will wait for the result. On an accelerator only the stream waits otherwise.

        Raises:
            MissingProcessError: it has failed, or was not over in time.
        """
        start = time.monotonic()
        try:
            if not self._polls:
                work.wait(self._patience)
                return
            if on_host:
                self._poll(work, start)
            work.wait()
        except MissingProcessError:
            raise
        except RuntimeError:
            self._wait_longer(work, start)

    def _wait_longer(self, work: Any, start: float) -> None:
        """Go on waiting for an exchange whose first wait has ended without it."""
        # The backend has a limit for each step of an exchange, and ours is for those that it forgets.
        wait = _Wait(self, 2 * self._timeout_now().total_seconds(), start)
        while not work.is_completed():
            wait.goes_on()
            with suppress(RuntimeError):  # it is not over yet, or over with the error that is asked for below
                work.wait(_SLICE)
        try:
            work.wait()
        except RuntimeError as error:
            wait.fails(error)
        wait.ends()

    def _poll(self, work: Any, start: float) -> None:
        # A little less than the time at which the backend ends the whole process.
        wait = _Wait(self, 0.9 * self._timeout_now().total_seconds(), start)
        while not work.is_completed():
            if wait.seconds > self._patience.total_seconds():
                wait.goes_on()
            if wait.seconds > _SPIN_S:
                time.sleep(min(wait.seconds / 16, 0.05))
        wait.ends()

    # -- the store ---------------------------------------------------------------------------------------------------

    def note(self, note: Note) -> None:
        """Let the others read where this process is."""
        text = json.dumps(asdict(note))
        _within(_STORE_S, lambda: self._store().set(str(self._rank), text))

    def forget(self) -> None:
        """Take the note back: the wait has ended well."""
        _within(_STORE_S, lambda: self._store().delete_key(str(self._rank)))

    def tell(self, own: Note, seconds: float) -> None:
        """Log who has come so far, on the first of the processes that wait."""
        notes = _within(_STORE_S, lambda: self._read(deadline=0.0))
        if notes and min(notes) == self._rank:
            headline = f"Rank {self._rank} of {self._size}: {own} (call {own.call} of this process) has waited {seconds:.0f} s."
            _logger.warning("\n".join([headline, *self._lines(notes, own)]))

    def report(self, own: Note, seconds: float, error: Exception | None) -> MissingProcessError:
        """The error for a wait that has ended in vain after some seconds, with `error` if the backend gave one."""
        timeout = self._timeout_now().total_seconds()
        self.note(own)
        notes = _within(_STORE_S, lambda: self._read(time.monotonic() + min(_GRACE_S, timeout / 4)))
        if notes is not None:
            notes[self._rank] = own
        missing = None if notes is None else tuple(rank for rank in range(self._size) if rank not in notes)
        lines = [self._headline(own, seconds, timeout), *self._lines(notes, own), _advice(seconds, timeout, missing)]
        if error is not None:
            lines.append(f"The communication backend said: {str(error).strip()[:_SHOWN]}")
        return MissingProcessError("\n".join(lines), missing)

    def _store(self) -> Any:
        import torch.distributed as dist

        from hasten.world import torch_private

        return dist.PrefixStore(self._name, torch_private.default_store())

    def _read(self, deadline: float) -> dict[int, Note]:
        """The notes of all processes; those that have none yet are waited for until the deadline."""
        store, notes = self._store(), dict[int, Note]()
        while True:
            unknown = [rank for rank in range(self._size) if rank not in notes]
            for rank in _noted(store, unknown):
                notes[rank] = Note(**json.loads(store.get(str(rank))))
            if len(notes) == self._size or time.monotonic() > deadline:
                return notes
            time.sleep(0.05)

    # -- what people read --------------------------------------------------------------------------------------------

    def _headline(self, own: Note, seconds: float, timeout: float) -> str:
        if seconds < timeout / 2:
            what = f"was broken off after {seconds:.1f} s"
        else:
            what = f"was given up after {seconds:.1f} s; the timeout of the process group is {timeout:g} s"
        return f"Rank {self._rank} of {self._size}: {own} (call {own.call} of this process) {what}."

    def _lines(self, notes: dict[int, Note] | None, own: Note) -> list[str]:
        if notes is None:
            return [
                "  where the other ranks are is unknown: the store of the job, which rank 0 or the launcher serves, is gone"
            ]
        places = [_place(notes[rank], own) if rank in notes else "not here" for rank in range(self._size)]
        return [f"  {ranks}: {place}" for place, ranks in grouped(places)]


class _Wait:
    """One wait that lasts longer than usual."""

    def __init__(self, arrivals: Arrivals, limit: float, start: float) -> None:
        self.arrivals, self.limit, self.start = arrivals, limit, start
        self.noted: Note | None = None
        self.told = False

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self.start

    def goes_on(self) -> None:
        """Leave a note, once; say after a while who is missing, once; and give up at the limit."""
        if self.noted is None:
            self.noted = self._own()
            self.arrivals.note(self.noted)
        if not self.told and self.seconds > _TOLD_S:
            self.told = True
            self.arrivals.tell(self.noted, self.seconds)
        if self.seconds > self.limit:
            self.fails(None)

    def fails(self, error: Exception | None) -> NoReturn:
        """Raise the error that says who is missing."""
        # The backend's own error is in the text; its traceback says nothing more.
        raise self.arrivals.report(self._own(), self.seconds, error) from None

    def ends(self) -> None:
        """Take the note back: the wait has ended well."""
        if self.noted is not None:
            self.arrivals.forget()

    def _own(self) -> Note:
        _, called = _caller()
        return Note(self.arrivals.call, self.arrivals.operation, call_site(whole=True), called)


def _place(note: Note, own: Note) -> str:
    if note.call != own.call:
        return f"in call {note.call}, {note}"
    return f"here, in {note}"


def _advice(seconds: float, timeout: float, missing: tuple[int, ...] | None) -> str:
    if missing == ():
        return (
            "All processes have come, but some so late that others had given up, or the connection between them is broken. Give "
            "more time with `InitProcessGroupKwargs(timeout=timedelta(...))`."
        )
    if seconds < timeout / 2:
        return (
            "A process has ended, or has given up an earlier wait: look at the first error in its own output. If it has none, it "
            f"has ended without making this call. {ORDER}"
        )
    return f"{ORDER} If it only needs more time, give it with `InitProcessGroupKwargs(timeout=timedelta(...))`."


def _noted(store: Any, ranks: list[int]) -> list[int]:
    """Which of the ranks have left a note. Most have, or few: halves that all have are asked for together."""
    if not ranks or store.check([str(rank) for rank in ranks]):
        return ranks
    if len(ranks) == 1:
        return []
    middle = len(ranks) // 2
    return _noted(store, ranks[:middle]) + _noted(store, ranks[middle:])


def _within(seconds: float, action: Callable[[], T]) -> T | None:
    """The result of an action with the store; None if it takes longer, or if the store is gone."""
    results: list[T] = []

    def attempt() -> None:
        with suppress(RuntimeError, ValueError):  # ValueError: the process group has been ended
            results.append(action())

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None

"""Reading ahead: the next item of an iterator is read in a thread while the one before is used."""

from __future__ import annotations

import atexit
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

import torch

T = TypeVar("T")

_GLANCE_S = 0.5  # a wait looks this often whether it still makes sense, and whether Ctrl-C was pressed (on Windows)
_AT_EXIT_S = 5.0  # a reader that hangs must not keep the process from ending


class _Modes(NamedTuple):
    """What torch keeps for each thread, and what reading may depend on."""

    grad: bool
    inference: bool
    device: int | None

    @classmethod
    def here(cls) -> _Modes:
        device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), device)


class _Outcome(NamedTuple):
    """What came of reading one item."""

    item: Any = None
    error: BaseException | None = None
    end: bool = False


class ReadAhead(Generic[T]):
    """The items of an iterator, one of which is being read, or has been, before it is asked for.

    The thread reads only on demand: it never is more than one item ahead. Errors of the iterator are raised where its item would
    have been returned. `close` must be called when the items are no longer wanted.

    Args:
        items: what is read; from now on by the thread alone.
        limit_s: seconds that one item may take; None: as long as it takes, as without a thread.
    """

    def __init__(self, items: Iterator[T], limit_s: float | None = None) -> None:
        self._items: Iterator[T] | None = items
        self._limit_s = limit_s
        self._asked: SimpleQueue[_Modes | None] = SimpleQueue()
        self._outcomes: SimpleQueue[_Outcome] = SimpleQueue()
        arguments = (items, self._asked, self._outcomes)
        # A daemon: the process may end while it waits for the loop or for its data.
        self._thread = threading.Thread(target=_read, args=arguments, name="hasten-read-ahead", daemon=True)
        self._hurries = False
        atexit.register(self._end)  # while threads still run
        self._thread.start()
        self._ask()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._items is None:
            raise StopIteration
        try:
            outcome = self._outcome()
        except KeyboardInterrupt:
            self._hurries = True
            raise
        if outcome.error is not None or outcome.end:
            self.close()
            raise StopIteration if outcome.error is None else outcome.error
        self._ask()
        item: T = outcome.item
        return item

    def close(self) -> None:
        """Read no more, and wait until the reading that has begun is over, as long as one item may take."""
        if self._items is None:
            return
        atexit.unregister(self._end)
        self._asked.put(None)
        if not (self._hurries or sys.is_finalizing() or threading.current_thread() is self._thread):
            self._wait_for_the_end()
        self._items = None

    def _end(self) -> None:
        self._asked.put(None)
        self._thread.join(_AT_EXIT_S)

    def _ask(self) -> None:
        self._asked.put(_Modes.here())

    def _outcome(self) -> _Outcome:
        start = time.monotonic()
        while True:
            try:
                return self._outcomes.get(timeout=_GLANCE_S)
            except Empty:
                if not self._thread.is_alive() and self._outcomes.empty():
                    raise RuntimeError(
                        "The thread that reads ahead is gone; a process that was forked from one that reads does not have it."
                    ) from None
                if self._limit_s is not None and time.monotonic() - start > self._limit_s:
                    self._hurries = True
                    raise TimeoutError(
                        f"Reading one step took longer than {self._limit_s:g} s, the time that the other ranks wait for it. Give "
                        "the process group a longer `timeout`, or look for what the dataset waits for."
                    ) from None

    def _wait_for_the_end(self) -> None:
        start = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(_GLANCE_S)
            if self._limit_s is not None and time.monotonic() - start > self._limit_s:
                warnings.warn(
                    f"The dataset is still being read in the background, {self._limit_s:g} s after the loop was left. What it "
                    "reads is dropped.",
                    stacklevel=2,
                )
                return


def _read(items: Iterator[Any], asked: SimpleQueue[_Modes | None], outcomes: SimpleQueue[_Outcome]) -> None:
    """What the thread does."""
    # It waits for at most as long as the loop runs, whose end is told by `close`.
    while (modes := asked.get()) is not None:
        outcome = _attempt(items, modes)
        outcomes.put(outcome)
        if outcome.end or outcome.error is not None:
            return
        del outcome  # the item belongs to the loop


def _attempt(items: Iterator[Any], modes: _Modes) -> _Outcome:
    try:
        if modes.device is not None:
            torch.accelerator.set_device_index(modes.device)
        with torch.inference_mode(modes.inference), torch.set_grad_enabled(modes.grad):
            return _Outcome(next(items))
    except StopIteration:
        return _Outcome(end=True)
    except BaseException as error:
        return _Outcome(error=error)

"""Preemption: a signal that reaches one process makes all of them save at the same update, and leave.

A signal only raises a flag. Each process counts its boundaries: the moments at which a loop asks a prepared loader for a batch
after at least one update of a prepared optimizer. Everything that belongs to a step has happened then, wherever the loop has
put it, and the next one has not begun. Processes that run the same program pass the same boundaries in the same
order; so at boundaries whose numbers all of them know, about one a second, they tell each other whether the flag is up. What
the numbers are, the first process says in the exchange before.
"""

from __future__ import annotations

import logging
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any
from weakref import WeakSet

from hasten.settings.preemption import PREEMPTED
from hasten.training.accumulation import GradientState
from hasten.world.agreement import Statement
from hasten.world.context import CONTEXT
from hasten.world.process import World

_logger = logging.getLogger(__name__)

PERIOD = 1.0  # seconds between two exchanges, as far as the speed of the last updates tells
_FEW = 1000  # boundaries between two exchanges at most: the next ones may be slower
_TOLD = struct.Struct("<HI")  # number of the signal that has come, or 0; boundaries until the next exchange


class Preemption:
    """What one Accelerator does about signals. Made in the main thread: only there can signals be handled.

    Args:
        names: the signals.
        world: the processes that are to agree.
        gradients: counts the updates.
        save: writes the checkpoint; called on all processes at the same boundary.

    Attributes:
        raised: number of the signal that has come here, or 0.
        exchanges: how often the processes have told each other.
    """

    def __init__(self, names: Sequence[str], world: World, gradients: GradientState, save: Callable[[], Any]) -> None:
        self.raised = 0
        self.exchanges = 0
        self._world, self._gradients, self._save = world, gradients, save
        self._earlier: dict[int, Any] = {}
        self._process = os.getpid()
        self._is_manual = self._is_paused = self._is_closed = False
        self._owing: WeakSet[Any] = WeakSet()  # loaders whose last pass ended after an update
        self._updates = gradients.updates  # at the last boundary
        self._passed = self._next = 0  # boundaries, and the one with the next exchange
        self._interval, self._since = 1, time.monotonic()
        if CONTEXT.loaders.watcher is not None:  # the newest Accelerator is obeyed
            CONTEXT.loaders.watcher.close()
        CONTEXT.loaders.watcher = self
        self._install(names)

    # -- signals -----------------------------------------------------------------------------------------------------

    def _install(self, names: Sequence[str]) -> None:
        if threading.current_thread() is not threading.main_thread():
            _logger.warning(
                "save_on_signal=%r has no effect on rank %d: signals can be handled in the main thread alone, but this Accelerator "
                "is built in the thread %r. Build it in the main thread; what signals other ranks get is obeyed here, too.",
                names, self._world.rank, threading.current_thread().name,
            )  # fmt: skip
            return
        for name in names:
            number = getattr(signal, name, None)
            if number is None:
                _logger.warning("save_on_signal: this platform has no %s, so only other signals are waited for.", name)
            elif signal.getsignal(number) is None:
                _logger.warning(
                    "save_on_signal: %s is handled by something outside of Python already, which could "
                    "not be put back, so it is left alone. Choose another signal.", name,
                )  # fmt: skip
            else:
                self._earlier[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Raise the flag, and let the handler that was there before do its work."""
        earlier = self._earlier[number]
        if os.getpid() != self._process:  # one that was forked from ours: it must obey as if we were not there
            signal.signal(number, earlier)
            os.kill(os.getpid(), number)
            return
        self.raised = number
        # Python's own handler of Ctrl-C would end the program here and now.
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)

    def __reduce__(self) -> Any:
        # Signals come to a process. An Accelerator that is unpickled elsewhere waits for none.
        return type(None), ()

    def close(self) -> None:
        """Put the earlier handlers back, and watch nothing any more. May be called again."""
        self._is_closed = True
        if CONTEXT.loaders.watcher is self:
            CONTEXT.loaders.watcher = None
        if threading.current_thread() is not threading.main_thread():
            return
        for number, earlier in self._earlier.items():
            if signal.getsignal(number) == self._note:  # else someone has put another one before it, which may call it
                signal.signal(number, earlier)

    # -- boundaries --------------------------------------------------------------------------------------------------

    def watched(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of one pass; between two of them is a boundary if an optimizer has stepped.

        After the last batch there is none: the loop may go on with what belongs to the end of its epoch. The beginning of the same
        loader's next pass is one instead.
        """
        if loader in self._owing:
            self._owing.discard(loader)
            self._after_update()
        updates = self._gradients.updates
        for batch in batches:
            yield batch
            if updates == self._gradients.updates or not self._gradients.sync_gradients:
                continue
            updates = self._gradients.updates
            if loader.end_of_dataloader:
                self._owing.add(loader)
            else:
                self._after_update()

    def before_backward(self) -> None:
        """Where no prepared loader runs, a boundary is before the first backward pass after an update."""
        if CONTEXT.loaders.current is None:
            self._after_update()

    def _after_update(self) -> None:
        """One boundary, however many loaders are asked for the batches of the next step."""
        if self._updates != self._gradients.updates:
            self._updates = self._gradients.updates
            self._boundary()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, processes may have different numbers of steps: they agree at the end."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before
        self._boundary()

    def _boundary(self) -> None:
        if self._is_manual or self._is_paused or self._is_closed:
            return
        self._passed += 1
        if self._passed < self._next and self._world.size > 1:
            return
        number = self._exchange()
        if number:
            self._leave(number)

    def _leave(self, number: int) -> None:
        name = signal.Signals(number).name
        folder = self._save()
        if self._world.size > 1:
            # Who leaves first may take away what the others still need to end the save.
            self._world.barrier("save_on_signal")
        if self._world.is_main:
            _logger.warning(
                "%s has come after %d updates; saved in %s. Leaving with exit code %d, so that the job is started again.",
                name, self._gradients.updates, folder, PREEMPTED,
            )  # fmt: skip
        raise SystemExit(PREEMPTED)

    # -- agreement ---------------------------------------------------------------------------------------------------

    def check(self) -> bool:
        """Whether a signal has come to any process, the same on all of them. From now on it is the caller who saves and leaves."""
        self._is_manual = True
        return bool(self._exchange())

    def _exchange(self) -> int:
        """The number of the signal that has come to some process, or 0; the same on all of them."""
        if self._world.size == 1:
            return self.raised
        from hasten.world.frames import frames_of

        self._pace()
        told = frames_of(self._world).talk(Statement("check_preemption", {}), _TOLD.pack(self.raised, self._interval))
        numbers, intervals = zip(*(_TOLD.unpack(each) for each in told), strict=True)
        self.exchanges += 1
        self._interval = intervals[0]
        self._next = self._passed + self._interval
        return max(numbers)

    def _pace(self) -> None:
        """Find out how many boundaries pass in a period. At most twice as many as before: the first ones may be slow, or fast."""
        now = time.monotonic()
        fitting = self._interval * PERIOD / max(now - self._since, 1e-6)
        self._interval = max(1, min(_FEW, 2 * self._interval, int(fitting)))
        self._since = now

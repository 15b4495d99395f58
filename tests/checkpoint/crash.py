"""Ends this process with SIGKILL at the n-th change that it makes to a disk."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from hasten.weights.stream import Stream

_CALLS = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")


class Counter:
    """Counts changes to the disk; at number `limit` the process is killed, before the change or in the middle of a write."""

    def __init__(self, limit: int | None) -> None:
        self.count = 0
        self.limit = limit
        self._lock = threading.Lock()

    def is_last(self) -> bool:
        with self._lock:
            self.count += 1
            return self.count == self.limit


def watch(limit: int | None) -> Counter:
    """Count from now on; None counts only."""
    counter = Counter(limit)

    def watched(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if counter.is_last():
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*args, **kwargs)

        return call

    for name in _CALLS:
        setattr(os, name, watched(getattr(os, name)))
    write_all = Stream._write_all

    def write(self: Stream, view: memoryview) -> None:
        if counter.is_last():
            write_all(self, view[: len(view) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write_all(self, view)

    Stream._write_all = write  # type: ignore[method-assign]
    return counter

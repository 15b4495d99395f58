"""A save that goes on in the background."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - what it does at exit must be registered before what is here
import logging
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hasten.world.context import CONTEXT

logger = logging.getLogger(__name__)


def _finish_at_exit(saving: Saving) -> None:
    """Let a process end when the save has.

    It would wait for the thread by itself, but before that Python stops the pools of threads which write and checksum.
    """
    CONTEXT.savings.add(saving)
    register = getattr(threading, "_register_atexit", None)
    if register is not None and CONTEXT.first_time("saves are finished at exit"):
        register(_wait_for, CONTEXT.savings)


def _wait_for(savings: weakref.WeakSet[Saving]) -> None:
    for saving in list(savings):
        saving._ended.wait()


class Saving:
    """A save that is under way; what it writes has been copied, so that training may go on.

    At its normal end the process waits for it. A save that is interrupted is never taken for a checkpoint.

    Args:
        path: the folder, which is there when the save is done.
        action: what is left to do.
    """

    def __init__(self, path: Path, action: Callable[[], object]) -> None:
        self.path = path
        self._action: Callable[[], object] | None = action
        self._error: BaseException | None = None
        self._is_told = False
        self._ended = threading.Event()
        _finish_at_exit(self)
        threading.Thread(target=self._run, name=f"hasten-save {path.name}").start()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> Path:
        """Wait for the end; returns the folder.

        Args:
            timeout: seconds to wait at most.

        Raises:
            TimeoutError: it has not ended in this time. It goes on.
            OSError, RuntimeError: what went wrong, as `save_state` says it when it blocks.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"{self.path} has not been saved within {timeout:g} s; the save goes on.")
        self._is_told = True
        if self._error is not None:
            raise self._error
        return self.path

    def settle(self) -> None:
        """Wait for the end, and raise what went wrong unless somebody has been told already."""
        self._ended.wait()
        if not self._is_told:
            self.result()

    def _run(self) -> None:
        try:
            with torch.no_grad():
                assert self._action is not None
                self._action()
        except BaseException as error:
            self._error = error
            logger.error("Saving %s in the background failed: %s", self.path, error)
        finally:
            self._action = None  # with it goes the copy
            self._ended.set()

    def __reduce__(self) -> Any:
        # It belongs to this process. An Accelerator that is copied or unpickled elsewhere has none under way.
        return type(None), ()

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "done" if self.done() else "under way"
        return f"Saving({str(self.path)!r}, {state})"

"""Running a function in several processes of this machine, until all have returned or the first has failed."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import sys
import time
import traceback
import warnings
from typing import TYPE_CHECKING, Any

from hasten.launch.report import in_words
from hasten.launch.tree import end_descendants
from hasten.settings import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

SETTLE = 0.2  # seconds in which other ranks may turn out to have failed first
GRACE = 5.0  # seconds between asking a process to end and killing it
_KEPT = 10_000  # characters of a traceback: less than a pipe holds, as it is read after the process has ended


USED_BEFORE = (
    "\nAn accelerator was used in this process before the launch, and a forked process cannot use it again. Restart the "
    "notebook, and use accelerators (also through imports that start them) only inside of the launched function."
)


class WorkerFailed(RuntimeError):
    """A started process raised an error, or died.

    Attributes:
        rank: which one failed first.
        code: its exit status as `subprocess` gives it: negative for a signal.
        trace: its traceback; "" if it died without one.
    """

    def __init__(self, rank: int, code: int, trace: str) -> None:
        self.rank, self.code, self.trace = rank, code, trace
        last = trace.strip().splitlines()[-1] if trace else in_words(code)
        self.summary = f"rank {rank} failed: {last}"
        hint = USED_BEFORE if "Cannot re-initialize" in trace else ""
        super().__init__(f"{self.summary}{hint}" + (f"\n\nThe traceback of rank {rank}:\n{trace}" if trace else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.code, self.trace)


def run(function: Callable[..., Any], args: Sequence[Any], count: int, method: str) -> None:
    """Call `function(index, *args)` in `count` processes and wait for them.

    Raises:
        WorkerFailed: one of them failed; the others have been stopped, with all that they had started.
    """
    context: Any = multiprocessing.get_context(method)
    started: list[tuple[Any, Connection]] = []
    sys.stdout.flush()  # a forked process would print what is in the buffer again
    sys.stderr.flush()
    try:
        for index in range(count):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_call, args=(function, index, tuple(args), theirs))
            with warnings.catch_warnings():
                # a notebook has threads; none of them holds a lock that the function needs
                warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
                process.start()
            theirs.close()
            started.append((process, ours))
        failed = _wait([process for process, _ in started])
    finally:
        _stop([process for process, _ in started])
    if failed:
        accounts = [(_account(started[rank][1]), rank) for rank in failed]
        (_, trace), rank = min(accounts, key=lambda account: account[0][0])
        raise WorkerFailed(rank, started[rank][0].exitcode, trace)


def _call(function: Callable[..., Any], index: int, args: tuple[Any, ...], report: Connection) -> None:
    """In the started process: call the function; send when and how it failed."""
    context = sys.modules.get("hasten.world.context")
    if context is not None:
        context.CONTEXT.reset()  # a forked process must not take its parent's place for its own
    torch = sys.modules.get("torch")
    if torch is not None and environment.raw("OMP_NUM_THREADS") == "1":
        torch.set_num_threads(1)  # forked with torch loaded: the variable comes too late
    with report:
        try:
            function(index, *args)
        except BaseException as error:
            code = error.code if isinstance(error, SystemExit) else 1
            if code:
                report.send((time.monotonic(), traceback.format_exc()[-_KEPT:]))
            raise SystemExit(code) from None


def _account(report: Connection) -> tuple[float, str]:
    """When a process failed, and its traceback; a process that died without a word comes first: it is nobody's victim."""
    try:
        moment, trace = report.recv()
    except (EOFError, OSError):
        return 0.0, ""
    return moment, trace


def _wait(processes: list[Any]) -> list[int]:
    """Wait until all have ended well, or one has not; the ranks of those that have failed."""
    deadline = float("inf")
    while True:
        # one look at all: a process may end between two
        codes = [process.exitcode for process in processes]
        if deadline == float("inf") and any(codes):
            deadline = time.monotonic() + SETTLE
        left = deadline - time.monotonic()
        running = [process.sentinel for process, code in zip(processes, codes, strict=True) if code is None]
        if not running or left <= 0:
            return [rank for rank, code in enumerate(codes) if code]
        multiprocessing.connection.wait(running, None if left == float("inf") else left)


def _stop(processes: list[Any]) -> None:
    """End what still runs, with its descendants."""
    running = [process for process in processes if process.is_alive()]
    if running:
        end_descendants([process.pid for process in running], GRACE)
    for process in running:
        process.join(GRACE)

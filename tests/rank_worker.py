"""What runs inside a rank of `ranks.py`: cases come in, outcomes go out, and nothing of one case is left for the next."""

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import queue
import random
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from types import FrameType, TracebackType
from typing import Any

import numpy
import torch
import torch.distributed as dist

FINISH = "finish"  # every rank has its result: tear down
STACKS = "stacks"  # say where you are
READY = "ready"


@dataclass(frozen=True)
class Case:
    """One call of a function in one rank, and the process state that it is to find."""

    call: bytes  # pickled (function, args, kwargs)
    environ: dict[str, str]
    folder: str
    sys_path: list[str]
    filters: list[tuple[str, str, type[Warning], str, int]]  # as warnings.filterwarnings takes them, first match first
    store: str  # a file, like the next two
    stdout: str
    stderr: str
    group_timeout: float | None  # seconds; None: the function makes its own process group


@dataclass(frozen=True)
class Outcome:
    """What came of a call, or of cleaning up after it."""

    value: bytes = b""  # pickled
    error: str = ""  # the text of a traceback
    leaks: list[str] = field(default_factory=list)
    when: float = field(default_factory=time.monotonic)


def serve(connection: Connection) -> None:
    """Run cases until the other end of `connection` is closed, then end the process at once, even in the middle of a case."""
    faulthandler.enable()  # by descriptor, so what a crash prints is captured as the rank's stderr
    _Worker(connection).serve()


class _Worker:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._strays: list[str] = []

    def serve(self) -> None:
        threading.Thread(target=self._listen, name="ranks-inbox", daemon=True).start()
        sys.unraisablehook = lambda lost: self._strays.append(_text(lost.exc_value, f"lost in {lost.object!r}"))
        threading.excepthook = lambda lost: self._strays.append(_text(lost.exc_value, f"in thread {lost.thread}"))
        self._send(READY)
        while True:
            try:
                case = self._inbox.get()
            except KeyboardInterrupt:  # Ctrl-C reaches the whole foreground group; the owner of the pool ends us
                continue
            self._serve_case(case)

    def _serve_case(self, case: Case) -> None:
        before = _Holdings()
        with _captured(case.stdout, case.stderr), warnings.catch_warnings():
            _set_up(case)
            self._send(self._outcome(_call, case))
            self._inbox.get()
            outcome = self._outcome(_clean_up, before)
        self._send(outcome)

    def _outcome(self, function: Any, argument: Any) -> Outcome:
        outcome = function(argument)
        sys.stdout.flush()
        sys.stderr.flush()
        strays, self._strays[:] = "\n".join(self._strays), []
        return Outcome(outcome.value, outcome.error or strays, outcome.leaks)

    def _listen(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                os._exit(0)
            if message == STACKS:
                self._send(stacks())
            else:
                self._inbox.put(message)

    def _send(self, message: Any) -> None:
        with self._sending:
            self._connection.send(message)


def _set_up(case: Case) -> None:
    os.environ.clear()
    os.environ.update(case.environ)
    os.chdir(case.folder)
    sys.path[:] = case.sys_path
    warnings.resetwarnings()
    for action, message, category, module, line in case.filters:
        warnings.filterwarnings(action, message, category, module, line, append=True)  # type: ignore[arg-type]
    _meet_in(case.store)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)


def _meet_in(path: str) -> None:
    """Let `env://` and `tcp://` use a file in place of a TCPStore.

    Each connection of a TCPStore asks the name server who ::ffff:127.0.0.1 is (5 s where none answers), and a rank that is faster than
    rank 0 waits half a second before it tries again. Tests of the launcher use the real one.
    """
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # the attribute of this name is a function
    if hasattr(rendezvous, "_create_c10d_store"):
        rendezvous._create_c10d_store = lambda host, port, rank, size, *rest, **options: dist.FileStore(f"{path}-{port}", size)


def _call(case: Case) -> Outcome:
    try:
        if case.group_timeout is not None:
            dist.init_process_group("gloo", timeout=timedelta(seconds=case.group_timeout))
        function, args, kwargs = pickle.loads(case.call)
        return Outcome(value=pickle.dumps(function(*args, **kwargs)))
    except BaseException as error:
        return Outcome(error=_text(error))


def _clean_up(before: "_Holdings") -> Outcome:
    try:
        if context := sys.modules.get("hasten.world.context"):
            context.reset()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
        return Outcome(leaks=before.leaks())
    except BaseException as error:
        return Outcome(error=_text(error, "while cleaning up"))


class _Holdings:
    """What a process holds that a case may not leave behind."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}

    def leaks(self) -> list[str]:
        """Name the threads, child processes, signal handlers and process groups that are there since this object was made."""
        found = []
        for thread in set(threading.enumerate()) - self._threads:
            thread.join(timeout=0.2)
            if thread.is_alive():
                found.append(f"thread {thread.name}")
        found += [f"child process {child.pid}" for child in multiprocessing.active_children()]
        found += [f"signal handler of {n}" for n, old in self._handlers.items() if signal.getsignal(n) != old]
        return found + ["process group"] * dist.is_initialized()


@contextmanager
def _captured(stdout: str, stderr: str) -> Iterator[None]:
    """Send everything written to descriptors 1 and 2, from Python or below, to two files."""
    kept = []
    for number, path in ((1, stdout), (2, stderr)):
        kept.append(os.dup(number))
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, saved in zip((1, 2), kept, strict=True):
            os.dup2(saved, number)
            os.close(saved)


def stacks() -> str:
    """Return where each thread of this process is, but for the calling one; of the main thread, only what is above our own frames."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        own = {_call.__code__, _clean_up.__code__}
        above = []
        for inner, line in traceback.walk_stack(frame):
            if inner.f_code in own:
                break
            above.append((inner, line))
        text = "".join(traceback.StackSummary.extract(reversed(above)).format())  # type: ignore[arg-type]
        parts.append(f"{names.get(ident, ident)}:\n{text}")
    return "\n".join(parts)


def _text(error: BaseException | None, where: str = "") -> str:
    """Format a traceback without our own frame; to a bare assertion add the local values that it was about."""
    if error is None:
        return where
    trace = error.__traceback__
    if trace and trace.tb_next and trace.tb_frame.f_code in (_call.__code__, _clean_up.__code__):
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    if isinstance(error, AssertionError) and not error.args and trace:
        text += _locals(trace)
    return f"({where})\n{text}" if where else text


def _locals(trace: TracebackType) -> str:
    while trace.tb_next:
        trace = trace.tb_next
    frame: FrameType = trace.tb_frame
    lines = []
    for name, value in frame.f_locals.items():
        shown = re.sub(r"\s+", " ", repr(value))
        lines.append(f"  where {name} = {shown[:300]}{'...' * (len(shown) > 300)}\n")
    return "".join(lines)

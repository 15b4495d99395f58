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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import numpy
import torch
import torch.distributed as dist

READY = "ready"
NEXT = "next"  # every rank has completed this step: begin the next one
STACKS = "stacks"  # say where you are


@dataclass(frozen=True)
class Case:
    """One call of a function in one rank, and the process state that it is to find."""

    call: bytes  # pickled (function, args, kwargs)
    environ: dict[str, str]
    folder: str
    sys_path: list[str]
    filters: list[tuple[Any, str, Any, str, int]]  # as `warnings.filterwarnings` takes them, the first match first
    store: str  # a file, like the next two
    stdout: str
    stderr: str
    group_timeout: float | None  # seconds; None: the function makes its own process group


@dataclass(frozen=True)
class Outcome:
    """What came of one step of a case: starting, calling, tearing down. The last one carries the results of all."""

    error: str = ""  # a traceback
    value: bytes = b""  # what the function returned, pickled
    leaks: tuple[str, ...] = ()
    when: float = field(default_factory=time.monotonic)


def serve(connection: Connection) -> None:
    """Run cases until the other end of `connection` is closed; then the process ends at once, even in the middle of a case."""
    faulthandler.enable()  # to descriptor 2, so a crash is captured like other output
    _Worker(connection).serve()


class _Worker:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._strays: list[str] = []

    def serve(self) -> None:
        threading.Thread(target=self._listen, name="ranks-inbox", daemon=True).start()
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # so that a kill loses nothing
        sys.unraisablehook = lambda lost: self._strays.append(f"lost in {lost.object!r}:\n{_text(lost.exc_value)}")
        threading.excepthook = lambda lost: self._strays.append(f"lost in {lost.thread}:\n{_text(lost.exc_value)}")
        self._send(READY)
        while True:
            try:
                case = self._inbox.get()
            except KeyboardInterrupt:  # Ctrl-C reaches the whole foreground; the owner of the pool ends us
                continue
            self._serve_case(case)

    def _serve_case(self, case: Case) -> None:
        before = _Holdings()
        with _captured(case.stdout, case.stderr), warnings.catch_warnings():
            self._send(self._attempt(_start, case))
            assert self._inbox.get() == NEXT
            called = self._attempt(_call, case)
            self._send(Outcome(called.error))
            assert self._inbox.get() == NEXT
            ended = self._attempt(_tear_down, before)
        self._send(replace(ended, value=called.value))

    def _attempt(self, step: Callable[[Any], Outcome], argument: Any) -> Outcome:
        """Make one step. Exceptions that it could not catch (in a thread, in a finalizer) are its error, too."""
        try:
            outcome = step(argument)
        except BaseException as error:
            outcome = Outcome(_text(error))
        sys.stdout.flush()
        sys.stderr.flush()
        strays = "\n".join(self._strays)
        self._strays.clear()
        return replace(outcome, error=outcome.error or strays)

    def _listen(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                os._exit(0)
            if message == STACKS:
                self._send(_stacks())
            else:
                self._inbox.put(message)

    def _send(self, message: Any) -> None:
        with self._sending:
            self._connection.send(message)


@contextmanager
def _captured(*paths: str) -> Iterator[None]:
    """Send what is written to descriptors 1 and 2, from Python or below it, to two files."""
    kept = [os.dup(number) for number in (1, 2)]
    for number, path in zip((1, 2), paths, strict=True):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)


def _start(case: Case) -> Outcome:
    os.environ.clear()
    os.environ.update(case.environ)
    os.chdir(case.folder)
    sys.path[:] = case.sys_path
    warnings.resetwarnings()
    for entry in case.filters:
        warnings.filterwarnings(*entry, append=True)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    _meet_in(case.store)
    if case.group_timeout is not None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=case.group_timeout))
    return Outcome()


def _meet_in(path: str) -> None:
    """Let `env://` and `tcp://` use a file in place of a TCPStore.

    Each connection of a TCPStore asks a name server who ::ffff:127.0.0.1 is (5 s where none answers), and a rank that is faster
    than rank 0 waits half a second before it tries again. The tests of the launcher use the real one.
    """
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # the attribute is a function
    rendezvous._create_c10d_store = lambda host, port, rank, size, *_, **__: dist.FileStore(f"{path}-{port}", size)


def _call(case: Case) -> Outcome:
    function, args, kwargs = pickle.loads(case.call)
    return Outcome(value=pickle.dumps(function(*args, **kwargs)))


def _tear_down(before: "_Holdings") -> Outcome:
    if context := sys.modules.get("hasten.world.context"):
        context.reset()
    if dist.is_initialized():
        for _ in range(2):  # the backend's threads need the interpreter's lock to let go of the last exchange's tensors
            time.sleep(0.003)
        dist.destroy_process_group()
    gc.collect()
    return Outcome(leaks=before.leaks())


class _Holdings:
    """What this process holds when a case begins."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        numbers = signal.valid_signals() - {getattr(signal, "SIGCHLD", None)}  # torch keeps one, for data loaders
        self._handlers = {number: signal.getsignal(number) for number in numbers}

    def leaks(self) -> tuple[str, ...]:
        """Name what has come since: threads, child processes, signal handlers, a process group."""
        threads = set(threading.enumerate()) - self._threads
        for thread in threads:
            thread.join(timeout=0.2)
        return (
            *(f"thread {thread.name}" for thread in threads if thread.is_alive()),
            *(f"child process {child.pid}" for child in multiprocessing.active_children()),
            *(
                f"signal handler of {number}"
                for number, old in self._handlers.items()
                if signal.getsignal(number) != old
            ),
            *["process group"] * dist.is_initialized(),
        )


# What is above these frames is the test's.
_OWN_FRAMES = {function.__code__ for function in (_Worker._attempt, _start, _call, _tear_down)}


def _stacks() -> str:
    """Return where the threads of this process are, but for the calling one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            stack = list(traceback.walk_stack(frame))
            own = [i for i, (inner, _) in enumerate(stack) if inner.f_code in _OWN_FRAMES]
            above = stack[: own[0] if own else None]
            lines = traceback.StackSummary.extract(reversed(above)).format()
            parts.append(f"{names.get(ident, ident)}:\n{''.join(lines)}")
    return "\n".join(parts)


def _text(error: BaseException | None) -> str:
    """Format a traceback without our own frames; to a bare assertion add the values that it was about."""
    if error is None:
        return ""
    trace = error.__traceback__
    while trace and trace.tb_next and trace.tb_frame.f_code in _OWN_FRAMES:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    return text + _locals(trace) if trace and type(error) is AssertionError and not error.args else text


def _locals(trace: TracebackType) -> str:
    while trace.tb_next:
        trace = trace.tb_next
    shown = {name: re.sub(r"\s+", " ", repr(value)) for name, value in trace.tb_frame.f_locals.items()}
    return "".join(f"  where {name} = {value[:300]}{'...' * (len(value) > 300)}\n" for name, value in shown.items())

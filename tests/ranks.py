"""Run a function on several gloo ranks, as cheaply as a test needs.

    def total(start):
        tensor = torch.tensor([start + dist.get_rank()])
        dist.all_reduce(tensor)
        return tensor.item()

    assert run_ranks(total, 2, 10) == [21, 21]

Ranks are processes that stay warm between cases. They are forked from a zygote, which has imported torch but not used it
(`rank_zygote.py`); what happens inside one is in `rank_worker.py`. Each process that runs tests (an xdist worker) has its own pool,
made when first needed. A rank that raised, hung, died or left something behind is replaced. Nothing outlives the owner of the pool.
"""

import atexit
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Generic, TypeVar

import psutil

from tests.rank_worker import NEXT, STACKS, Case, Outcome, serve

START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"  # macOS: fork is not safe; Windows: there is none
KEPT = 4  # idle ranks
START_LIMIT = 120.0  # seconds until a rank must be ready; they include importing torch
TEAR_DOWN_LIMIT = 20.0
GRACE = 3.0  # seconds that the others have once a rank has failed: their own errors are worth seeing
ANSWER_LIMIT = 2.0  # seconds in which a stuck rank must say where it is
SHOWN = 4000  # characters of each output in an error

T = TypeVar("T")


class Ranks(list[T], Generic[T]):
    """What each rank returned, in rank order; beside it, what each printed, and what each left behind."""

    stdout: list[str]
    stderr: list[str]
    leaks: list[tuple[str, ...]]


class RankError(AssertionError):
    """Some rank raised, died or did not finish in time. `tracebacks` maps rank to text, the first failure first."""

    def __init__(self, title: str, tracebacks: dict[int, str], stdout: list[str], stderr: list[str]) -> None:
        self.tracebacks, self.stdout, self.stderr = tracebacks, stdout, stderr
        good = [rank for rank in range(len(stdout)) if rank not in tracebacks]
        parts = [title]
        for rank in [*tracebacks, *good]:
            parts.append(f"===== rank {rank} =====\n{tracebacks.get(rank, 'returned').rstrip()}")
            for name, text in (("stdout", stdout[rank]), ("stderr", stderr[rank])):
                if text:
                    parts.append(f"----- {name} of rank {rank} -----\n{text[-SHOWN:].rstrip()}")
        super().__init__("\n".join(parts))


def run_ranks(
    function: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 30.0,
    env: dict[str, str | None] | None = None,
    fresh: bool = False,
    initialise: bool = True,
    **kwargs: Any,
) -> Ranks[T]:
    """Call `function(*args, **kwargs)` on every rank of a gloo world and return what each returned, in rank order.

    Each call finds the caller's environment, folder, `sys.path` and warning filters, the variables of torchrun (RANK, LOCAL_RANK,
    WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), random generators seeded with 0, one thread, torch's default dtype and
    grad mode, and no state of `hasten`. Nobody listens at MASTER_PORT: process groups made by `env://` or `tcp://` meet in a file.

    Args:
        function: one that a rank can import: at the top of a module. Arguments and results travel by pickle, tensors by value.
        world_size: number of ranks.
        timeout: seconds after which the ranks are killed; the error says where each one was.
        env: more environment variables; None takes one away.
        fresh: use new processes and throw them away after it, for a function that changes its process for good.
        initialise: make the default process group before the call. False leaves that to the function. It is destroyed either way.

    Raises:
        RankError: with the traceback and the output of every rank.
        TypeError: if the function or an argument can not be pickled.
    """
    __tracebackhide__ = True  # pytest then shows the line of the test
    call = _pickled(function, args, kwargs)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        cases = _cases(call, world_size, folder, env or {}, group_timeout=2 * timeout if initialise else None)
        with _pool().lend(world_size, fresh) as ranks:
            outcomes = _run(ranks, cases, timeout)
        stdout, stderr = [_read(case.stdout) for case in cases], [_read(case.stderr) for case in cases]
    failed = sorted((rank for rank in range(world_size) if outcomes[rank].error), key=lambda rank: outcomes[rank].when)
    if failed:
        title = f"{function.__module__}.{function.__qualname__}: {len(failed)} of {world_size} ranks failed"
        raise RankError(title, {rank: outcomes[rank].error for rank in failed}, stdout, stderr)
    result: Ranks[T] = Ranks(pickle.loads(outcome.value) for outcome in outcomes)
    result.stdout, result.stderr, result.leaks = stdout, stderr, [outcome.leaks for outcome in outcomes]
    return result


def close_pool() -> None:
    """End all ranks of this process. The next `run_ranks` makes new ones."""
    if pool := _POOLS.pop(os.getpid(), None):
        pool.close()


def _pickled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((function, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"run_ranks can not send this call to another process: {error}. The function must stand at the top level of its "
            "module (no lambda, no function inside another one), and its arguments must be picklable."
        ) from error


def _cases(
    call: bytes, world_size: int, folder: str, env: dict[str, str | None], group_timeout: float | None
) -> list[Case]:
    port = str(_free_port())
    size = str(world_size)
    filters = [_plain_filter(*entry) for entry in warnings.filters]
    cases = []
    for rank in map(str, range(world_size)):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        environ = {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **env}
        cases.append(
            Case(
                call=call,
                environ={name: value for name, value in environ.items() if value is not None},
                folder=os.getcwd(),
                sys_path=sys.path,
                filters=filters,
                store=os.path.join(folder, "store"),
                stdout=os.path.join(folder, f"{rank}.stdout"),
                stderr=os.path.join(folder, f"{rank}.stderr"),
                group_timeout=group_timeout,
            )
        )
    return cases


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _plain_filter(action: str, message: Any, category: Any, module: Any, line: int) -> tuple[Any, str, Any, str, int]:
    """Undo what `warnings.filterwarnings` made of its arguments: patterns are compiled there, and empty ones are None."""
    return action, getattr(message, "pattern", message or ""), category, getattr(module, "pattern", module or ""), line


def _read(path: str) -> str:
    file = Path(path)
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


class _Rank:
    """One warm process and the pipe to it."""

    def __init__(self, context: Any) -> None:
        self.connection, far = context.Pipe()
        self._process = context.Process(target=serve, args=(far,), name="rank")
        with _start_environment():
            self._process.start()
        far.close()

    def is_alive(self) -> bool:
        return not self.connection.closed and self._process.is_alive()

    def signs(self) -> tuple[Any, Any]:
        """Return what to wait for: a message, or the end of the process (its own children may hold its end of the pipe open)."""
        return self.connection, self._process.sentinel

    def send(self, message: Any) -> None:
        with suppress(OSError):  # it has died, which `receive` will tell
            self.connection.send(message)

    def receive(self) -> Any:
        """Return the message that is there; an `Outcome` with an error if the process is gone."""
        with suppress(EOFError, OSError):
            if self.connection.poll():
                return self.connection.recv()
        self._process.join(ANSWER_LIMIT)
        code = self._process.exitcode
        died = f"signal {-code} ({signal.strsignal(-code)})" if code and code < 0 else f"exit code {code}"
        return Outcome(error=f"the process died: {died}")

    def where(self) -> str:
        """Return the stacks of a stuck process. One that does not answer is aborted: faulthandler then prints them."""
        self.send(STACKS)
        deadline = time.monotonic() + ANSWER_LIMIT
        while wait(self.signs(), max(0.0, deadline - time.monotonic())):
            message = self.receive()
            if isinstance(message, str):
                self._abort_children()
                return message
            if message.error:
                return str(message.error)
        os.kill(self._process.pid, signal.SIGABRT)
        self._process.join(ANSWER_LIMIT)
        return "it did not answer, since native code holds the interpreter: see its stderr"

    def _abort_children(self) -> None:
        """Have the processes that a stuck one has forked print their stacks: it may be waiting for one of them."""
        with suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                child.send_signal(signal.SIGABRT)  # faulthandler, inherited, then writes to the stderr of the rank
                psutil.wait_procs([child], ANSWER_LIMIT)

    def kill(self) -> None:
        """End the process, and those that it started, at once."""
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                child.kill()
        self._process.kill()
        self._process.join(TEAR_DOWN_LIMIT)
        self.connection.close()


@contextmanager
def _start_environment() -> Iterator[None]:
    """Let a process that starts now find this package, and start no threads when it imports numpy and torch."""
    wanted = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]
    wanted["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Pool:
    """Warm ranks, made when they are first needed."""

    def __init__(self) -> None:
        self._context: Any = multiprocessing.get_context(START_METHOD)
        if START_METHOD == "forkserver":
            self._context.set_forkserver_preload(["tests.rank_zygote"])
        # By rank: torch remembers in a process what it has computed for a mesh, and takes its rank to be always the same.
        self._idle: dict[int, _Rank] = {}

    @contextmanager
    def lend(self, count: int, fresh: bool) -> Iterator[list[_Rank]]:
        """Lend `count` ranks. Those that are killed meanwhile do not come back; none does if the body raises or `fresh` is set."""
        kept = {} if fresh else {i: self._idle.pop(i) for i in range(count) if i in self._idle}
        _kill([rank for rank in kept.values() if not rank.is_alive()])
        new = {i: _Rank(self._context) for i in range(count) if i not in kept or not kept[i].is_alive()}
        ranks = [new.get(i) or kept[i] for i in range(count)]
        try:
            _require_ready(list(new.values()))
            yield ranks
        except BaseException:
            fresh = True
            raise
        finally:
            back = (
                {}
                if fresh
                else {i: rank for i, rank in enumerate(ranks[:KEPT]) if rank.is_alive() and i not in self._idle}
            )
            _kill([rank for i, rank in enumerate(ranks) if i not in back and rank.is_alive()])
            self._idle |= back

    def close(self) -> None:
        _kill(list(self._idle.values()))
        self._idle.clear()


_POOLS: dict[int, _Pool] = {}  # by process: a fork of this one must not use its parent's ranks
atexit.register(close_pool)


def _pool() -> _Pool:
    if os.getpid() not in _POOLS:
        _POOLS[os.getpid()] = _Pool()
    return _POOLS[os.getpid()]


def _require_ready(ranks: Sequence[_Rank]) -> None:
    deadline = time.monotonic() + START_LIMIT
    for rank in ranks:
        if not wait(rank.signs(), max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"a rank was not ready {START_LIMIT:g} s after it was started")
        if isinstance(message := rank.receive(), Outcome):
            raise RuntimeError(f"a rank did not start: {message.error}")


def _kill(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        rank.kill()


def _run(ranks: list[_Rank], cases: list[Case], timeout: float) -> list[Outcome]:
    """Run one case per rank, all ranks completing a step before any begins the next. Spoiled ranks are killed."""
    messages: list[Any] = [*cases]
    for limit in (timeout, timeout, TEAR_DOWN_LIMIT):  # start, call, tear down
        for rank, message in zip(ranks, messages, strict=True):
            rank.send(message)
        outcomes = _collect(ranks, limit)
        failed = any(outcome.error for outcome in outcomes)
        if failed:
            break
        messages = [NEXT] * len(ranks)
    _kill([rank for rank, outcome in zip(ranks, outcomes, strict=True) if failed or outcome.leaks])
    return outcomes


def _collect(ranks: list[_Rank], timeout: float) -> list[Outcome]:
    """Wait for an outcome of each rank. A failed one is killed at once: its sockets close, and its peers see that it is gone."""
    outcomes: dict[int, Outcome] = {}
    deadline, reason = time.monotonic() + timeout, f"no result within {timeout:g} s"
    while missing := [i for i in range(len(ranks)) if i not in outcomes]:
        signs = {sign: i for i in missing for sign in ranks[i].signs()}
        ready = {signs[sign] for sign in wait(list(signs), max(0.0, deadline - time.monotonic()))}
        if not ready:
            break
        for i in ready:
            outcomes[i] = ranks[i].receive()
            if outcomes[i].error:
                ranks[i].kill()
                deadline = min(deadline, time.monotonic() + GRACE)
                reason = f"still running {GRACE:g} s after rank {i} had failed"
    for i in missing:
        outcomes[i] = Outcome(error=f"{reason}; it was here:\n{ranks[i].where()}")
    return [outcomes[i] for i in range(len(ranks))]

"""Supervising the processes of this machine: none is left behind, whatever happens to any of them or to us."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hasten.launch import report, tree
from hasten.launch.ports import take_port
from hasten.launch.spec import DISTRIBUTED, LOCAL, LOCALHOST, REPLACE, LaunchSpec
from hasten.launch.worker import Worker
from hasten.settings import environment
from hasten.settings.preemption import PREEMPTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

SETTLE = 0.5  # seconds in which other ranks may turn out to have failed before the one that ended first
LAST_SETTLE = 3.0  # as many more if all of them only miss another one, which has not ended yet
FAILURE_GRACE = 5.0  # seconds for the other ranks to finish after one has failed; they cannot go on without it
_STDOUT = 1
_KILLED = 5.0  # seconds for the kernel to end what was killed
_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGBREAK", "SIGUSR1", "SIGUSR2")
_PASSED_ON = {getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)}
_OF_A_RUN = ("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")  # torchrun's, if it has started us


def run_local(spec: LaunchSpec) -> int:
    """Start the job's processes on this machine, wait for them, and return the job's exit code."""
    if spec.engine == REPLACE:
        return supervise(spec, [(None, spec.command(), spec.environment)])
    _check_address(spec.address)
    port, note = take_port(spec.port)
    with port:
        if note:
            say(spec, note)
        # a terminal gets whole lines as they are printed; an unbuffered python would mix those of several ranks
        command = spec.command(unbuffered=not os.isatty(_STDOUT))
        return supervise(
            spec,
            [
                (rank, command, {**spec.environment, **spec.rank_environment(rank, port.number)})
                for rank in range(spec.local_processes)
            ],
        )


def _check_address(address: str) -> None:
    """Raise if another machine has the address by which the processes of this one are to meet."""
    from hasten.launch.network import route_to

    route = None if address == LOCALHOST else route_to(address)
    if address != LOCALHOST and (route is None or not route.home):
        raise ValueError(
            f"main_process_ip is {address}, which is no address of this machine, but all processes of the job are to run here. "
            "Leave it out, or say how many machines there are with --num_machines and --machine_rank."
        )


def supervise(spec: LaunchSpec, processes: Sequence[tuple[int | None, list[str], dict[str, str]]]) -> int:
    """Run processes (rank, command, added variables) until all have ended; return the exit code for the shell.

    When one fails, the others are stopped and the first failure is reported. Signals to this process are forwarded; after
    `grace_period`, or at the second signal, what is left is killed, with all that it has started. SIGUSR1 and SIGUSR2 are passed on
    and mean what the processes make of them.
    """
    inherited = {
        name: text
        for name, text in environment.snapshot().items()
        if not name.startswith(("TORCHELASTIC_", *_OF_A_RUN))
    }
    launch_id, mark = tree.new_mark(inherited.get(tree.MARK))
    inherited.update({"PYTHONFAULTHANDLER": inherited.get("PYTHONFAULTHANDLER", "1"), tree.MARK: mark})
    with _Guard(launch_id) as guard, _signals(job := _Job(spec, launch_id, guard)):
        try:
            for rank, command, added in processes:
                job.start(rank, command, {**inherited, **added})
            job.watch()
        finally:
            job.clean_up()
    return job.outcome()


def say(spec: LaunchSpec, text: str) -> None:
    """Print a line of our own to stderr, unless the user wants quiet."""
    if not spec.value("quiet"):
        print(f"hasten: {text}", file=sys.stderr, flush=True)


class _Job:
    """The running processes and what has happened to them."""

    def __init__(self, spec: LaunchSpec, launch_id: str, guard: _Guard) -> None:
        self.spec = spec
        self.launch_id = launch_id
        self.guard = guard
        self.workers: list[Worker] = []
        self.events: queue.SimpleQueue[Worker | int] = queue.SimpleQueue()
        self.signal: int | None = None  # the first that we got
        self._next: Callable[[], None] | None = None  # what to do at the deadline
        self._deadline = float("inf")
        self._has_waited = False

    def start(self, rank: int | None, command: list[str], environ: dict[str, str]) -> None:
        worker = Worker(command, environ, rank, self.spec.engine == LOCAL, self.events)
        self.workers.append(worker)
        self.guard.tell(f"+{worker.process.pid}")

    def watch(self) -> None:
        """Handle ends, signals and deadlines until every process has ended, or cannot be ended."""
        while any(worker.running for worker in self.workers):
            try:
                # Windows: a wait without a limit would not notice Ctrl-C
                event = self.events.get(timeout=max(0.0, min(self._deadline - time.monotonic(), 1.0)))
            except queue.Empty:
                if time.monotonic() >= self._deadline:
                    if self._next is None:
                        return
                    self._next()
                continue
            if isinstance(event, int):
                self._on_signal(event)
                continue
            if not event.lingers:
                self.guard.tell(f"-{event.process.pid}")
            if event.failed and self._deadline == float("inf"):
                # One that has saved before its machine is taken away ends no sooner than the others have, too.
                saved = event.process.returncode == PREEMPTED
                self._at(self.spec.value("grace_period") if saved else SETTLE, self._stop_others)

    def _on_signal(self, signum: int) -> None:
        if signum in _PASSED_ON:
            for worker in self.workers:
                if self.spec.engine == DISTRIBUTED:
                    tree.signal_children(worker.process.pid, signum)
                else:
                    worker.send(signum)
            return
        if self._deadline != float("inf"):  # they are being stopped already: because of a failure, or a signal
            self._kill()
            return
        self.signal = signum
        grace = self.spec.value("grace_period")
        name = signal.Signals(signum).name
        say(self.spec, f"{name}: the processes have {grace:g} s to finish; a second signal kills them at once")
        self._stop(signum, grace)

    def _stop_others(self) -> None:
        if not self._has_waited and all(
            report.is_consequence(worker.said()) for worker in self.workers if worker.failed
        ):
            self._has_waited = True  # the one that they miss is about to end
            self._at(LAST_SETTLE, self._stop_others)
            return
        self._stop(signal.SIGTERM, FAILURE_GRACE)

    def _stop(self, signum: int, grace: float) -> None:
        for worker in self.workers:
            if self.signal is None:  # else how it answers the user's signal is its own doing
                worker.stopped |= worker.running
            worker.send(signum)
        self._at(grace, self._kill)

    def _kill(self) -> None:
        for worker in self.workers:
            worker.stopped |= worker.running
            worker.kill()
        self._at(_KILLED, None)

    def _at(self, seconds: float, then: Callable[[], None] | None) -> None:
        self._deadline, self._next = time.monotonic() + seconds, then

    def clean_up(self) -> None:
        """End whatever the processes have left behind."""
        if any(worker.running for worker in self.workers):  # we were interrupted, or they could not be killed
            self._kill()
        tree.end_groups([worker.process.pid for worker in self.workers if worker.lingers], FAILURE_GRACE)
        for worker in self.workers:
            worker.drain()
        if self.signal is None and not any(worker.failed for worker in self.workers):
            return
        if not tree.end_family(self.launch_id, grace=1.0):
            say(self.spec, "some processes of the job could not be ended; `ps` shows them")

    def outcome(self) -> int:
        """Report the first failure, if there is one, and return the job's exit code."""
        failed = sorted((worker for worker in self.workers if worker.failed), key=lambda worker: worker.failed_at)
        if self.signal is not None:
            chosen = [worker.process.returncode for worker in failed if worker.process.returncode > 0]
            unwilling = any(worker.process.returncode != 0 for worker in self.workers)
            if chosen:
                return chosen[0]
            return 128 + self.signal if unwilling else 0
        if not failed:
            return 0
        if all(worker.process.returncode == PREEMPTED for worker in failed):
            say(self.spec, f"the job has saved and can be started again (exit code {PREEMPTED})")
            return PREEMPTED
        failures = [worker.failure() for worker in failed]
        # One that leaves without a traceback ends after those that miss it: leaving takes an interpreter its time.
        first, *others = sorted(failures, key=lambda failure: report.is_consequence(failure.stderr))
        said = self.spec.engine == DISTRIBUTED and first.code > 0  # by torch.distributed.run
        if not (said or self.spec.value("quiet")):
            print(report.describe(first, others, len(self.workers)), file=sys.stderr, flush=True)
        return report.shell_code(first.code)


class _Guard:
    """A small process that ends the job if this one is killed before it can."""

    def __init__(self, launch_id: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", tree.__file__, launch_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=tree.POSIX,
        )

    def tell(self, line: str) -> None:
        """Write a line to it: `+pid`, `-pid` or `done`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except OSError:
            pass  # someone has killed it; the job goes on without

    def __enter__(self) -> _Guard:
        return self

    def __exit__(self, *error: object) -> None:
        self.tell("done")
        self._process.kill()
        self._process.communicate()


@contextmanager
def _signals(job: _Job) -> Iterator[None]:
    """Hand signals to the job for the length of a `with` block."""

    def forward(signum: int, frame: FrameType | None) -> None:
        job.events.put(signum)

    def resize(signum: int, frame: FrameType | None) -> None:
        for worker in job.workers:
            worker.resize()

    def pause(signum: int, frame: FrameType | None) -> None:
        for worker in job.workers:
            worker.pause(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)  # the next line runs when the user continues us
        for worker in job.workers:
            worker.pause(signal.SIGCONT)

    handlers: dict[str, Any] = dict.fromkeys(_FORWARDED, forward)
    handlers |= {"SIGWINCH": resize, "SIGTSTP": pause}
    previous: dict[int, Any] = {}
    for name, handler in handlers.items():
        number = getattr(signal, name, None)
        if number is None or (name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN):  # nohup
            continue
        try:
            previous[number] = signal.signal(number, handler)
        except ValueError:  # not the main thread: whoever has it decides what signals do
            break
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

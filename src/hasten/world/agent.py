"""torch.distributed.run, with the exit codes of its processes; jobs of several machines hear of each other's end.

Run as `python -m hasten.world.agent`, with the options of torch.distributed.run. With torch's own agents, the processes of a
machine learn of a failure elsewhere only when they next communicate; if a process has failed before it had joined the
job, the others wait for it until their timeout, half an hour. Here the rendezvous (torch's own) has a notice board in its
store, at which every agent looks once a second.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import DistError, run
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)

from hasten.settings.preemption import PREEMPTED

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

BACKENDS = {"static": "hasten-static", "c10d": "hasten-c10d"}  # torch's rendezvous, and the same with a notice board
LOOK = 1.0  # seconds between two looks at the notice board
_KEY = "hasten/ended"
_SAVED = " have saved and left"
_LEAVE = 30.0  # seconds that the processes of a machine may take to leave after those of another one have
_WRITE = 5.0  # seconds that a notice may take, if the machine with the store does not answer


class Rendezvous(RendezvousHandler):
    """A rendezvous of torch with a notice board for the machines that have met.

    Attributes:
        notice: why the job has ended elsewhere; "" if it has not, so far as is known.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self.notice = ""
        self._waits_until = 0.0
        self._backend = parameters.backend
        self._elastic = parameters.min_nodes != parameters.max_nodes
        self._store: Any = None  # a torch.distributed.Store; its stub lacks methods
        config = dict(parameters.config)
        if "rank" in config:
            config["rank"] = int(config["rank"])
        theirs = {ours: name for name, ours in BACKENDS.items()}[parameters.backend]
        self._meeting = rendezvous_handler_registry.create_handler(
            RendezvousParameters(
                theirs,
                parameters.endpoint,
                parameters.run_id,
                parameters.min_nodes,
                parameters.max_nodes,
                parameters.local_addr,
                **config,
            )
        )

    def get_backend(self) -> str:
        """Its name, by which it was asked for."""
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        """Whether the processes use the store of the agents, as the rendezvous of torch decides."""
        return self._meeting.use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other machines, and watch the notice board from then on."""
        info = self._meeting.next_rendezvous()
        self._store = info.store
        threading.Thread(target=self._watch, args=(self._store.clone(),), daemon=True).start()
        return info

    def is_closed(self) -> bool:
        """Whether nobody can join any more."""
        return self._meeting.is_closed()

    def set_closed(self) -> None:
        """Let nobody join any more."""
        self._meeting.set_closed()

    def num_nodes_waiting(self) -> int:
        """How many machines want to join. The agent asks often, so that here it learns that the job has ended.

        Raises:
            SystemExit: it has; the reason has been printed.
        """
        if self.notice.endswith(_SAVED):  # the processes of this machine have saved, too, and are about to leave
            self._waits_until = self._waits_until or time.monotonic() + _LEAVE
            if time.monotonic() < self._waits_until:
                return 0
            raise SystemExit(PREEMPTED)
        if self.notice:
            print(f"hasten: {self.notice}; the processes of this machine are stopped.", file=sys.stderr, flush=True)
            raise SystemExit(1)
        return self._meeting.num_nodes_waiting()

    def get_run_id(self) -> str:
        """The name of the job."""
        return self._meeting.get_run_id()

    def shutdown(self) -> bool:
        """Close it, when this machine ends."""
        return self._meeting.shutdown()

    def tell(self, text: str, stopped: bool = False) -> None:
        """Tell the other machines that this one has ended, and why; `stopped`: by a signal, which an elastic job survives."""
        store = self._store
        if store is not None and not (stopped and self._elastic):
            _within(_WRITE, lambda: store.append(_KEY, f"{text}\n"))

    def others(self, own: str) -> list[str]:
        """What the other machines have told; takes as long as they need to read what this one has."""
        deadline = time.monotonic() + 2 * LOOK
        told: list[str] = []
        while self._store is not None and time.monotonic() < deadline:
            told = [line for line in _read(self._store).splitlines() if line != own]
            time.sleep(0.1)
        return told

    def _watch(self, store: Any) -> None:
        """Look at the notice board until the next meeting, or the end. On a connection of its own: a look may take long."""
        mine = self._store
        try:
            while not self.notice and self._store is mine:
                self.notice = _read(store).partition("\n")[0]
                time.sleep(LOOK)
        except RuntimeError:
            pass  # the main machine has ended: perhaps well, so the processes here may finish what they do


def _read(store: Any) -> str:
    return store.get(_KEY).decode() if store.check([_KEY]) else ""


def _within(seconds: float, action: Callable[[], T]) -> T | None:
    """The result of an action with the store; None if it takes longer, or if the store is gone."""
    results: list[T] = []

    def attempt() -> None:
        with suppress(RuntimeError):
            results.append(action())

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def main() -> None:
    """Run torch.distributed.run with the options of the command line.

    Raises:
        SystemExit: the job has failed, here or elsewhere.
    """
    made: list[Rendezvous] = []

    def make(parameters: RendezvousParameters) -> Rendezvous:
        made.append(Rendezvous(parameters))
        return made[-1]

    for name in BACKENDS.values():
        rendezvous_handler_registry.register(name, make)
    codes = _exit_codes()
    _outlive_signals_of_processes()
    try:
        run.main()
    except Preempted:
        for rendezvous in made:
            rendezvous.tell(f"the processes on {socket.gethostname()}{_SAVED}", stopped=True)
        raise
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(error, file=sys.stderr, flush=True)
        _part(made, f"rank {rank} on {socket.gethostname()} failed with {_in_words(failure.exitcode)}")
        raise SystemExit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode) from None
    except (DistError, RendezvousError) as error:
        reason = str(error.__cause__ or error).partition("\n")[0] or type(error).__name__
        print(f"hasten: this machine could not join the others: {reason}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    except SignalException as error:
        name = signal.Signals(error.sigval).name
        _part(made, f"{socket.gethostname()} was stopped by {name}", stopped=True)
        raise SystemExit(next((code for code in codes if code > 0), 128 + error.sigval)) from None


class Preempted(SystemExit):
    """The processes have saved and left, to be started again elsewhere: not here, whatever `max_restarts` says."""


def _exit_codes() -> list[int]:
    """A list that from now on holds the exit codes of the processes that ended last.

    torch keeps them to itself where a signal has ended the job.
    """
    codes: list[int] = []
    close = SubprocessContext.close

    def closing(self: SubprocessContext, *arguments: Any, **options: Any) -> None:
        close(self, *arguments, **options)
        codes[:] = [handler.proc.returncode or 0 for handler in self.subprocess_handlers.values()]
        if PREEMPTED in codes:
            raise Preempted(PREEMPTED)

    SubprocessContext.close = closing  # type: ignore[assignment, method-assign]
    return codes


def _outlive_signals_of_processes() -> None:
    """Survive what the launcher passes on to the processes. They would inherit it if the signals were ignored here."""
    for name in ("SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda *_: None)


def _part(made: list[Rendezvous], text: str, stopped: bool = False) -> None:
    """Tell the others why this machine ends, and the user what they have told."""
    for rendezvous in made:
        rendezvous.tell(text, stopped)
        told = [] if stopped else _within(2 * LOOK + _WRITE, partial(rendezvous.others, text))
        if told:
            print(f"hasten: from other machines: {'; '.join(told[:3])}.", file=sys.stderr, flush=True)


def _in_words(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


if __name__ == "__main__":
    main()

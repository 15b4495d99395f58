"""One started process: its session, its stderr, its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from hasten.launch.report import Failure, Tail
from hasten.launch.tree import KILL, POSIX, signal_group

if TYPE_CHECKING:
    import queue
    from collections.abc import Mapping, Sequence

_STDERR = 2
_DRAIN = 1.0  # seconds without a word after which an ended process has said its last


class Worker:
    """A process in a session of its own.

    Terminal signals do not reach it; the supervisor forwards them. Stdout, and for the first process stdin, are the
    launcher's own. Stderr, if `keep` asks for it, passes through the launcher, which copies it on at once and keeps its end;
    where the launcher's stderr is a terminal, the first process gets a pseudo-terminal, so that progress bars work.

    Args:
        command: what to run.
        environ: its whole environment.
        rank: its rank; None for the only process.
        keep: keep the end of its stderr.
        ended: receives the worker itself when its process has ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        rank: int | None,
        keep: bool,
        ended: queue.SimpleQueue[Worker | int],
    ) -> None:
        self.rank = rank
        self.ended_at: float | None = None
        self.stopped = False  # whether we, not it, made it end
        self.lingers = False  # whether its group outlived it
        self._tail = Tail() if keep else None
        self._reader: threading.Thread | None = None
        self._terminal: int | None = None
        self._waits_since = time.monotonic()  # the reader, for more to copy
        source, sink = self._stderr_channel() if keep else (None, None)
        flags = 0 if POSIX else subprocess.CREATE_NEW_PROCESS_GROUP  # type: ignore[attr-defined,unused-ignore]
        try:
            self.process = subprocess.Popen(
                command,
                env=dict(environ),
                stdin=None if not rank else subprocess.DEVNULL,
                stderr=sink,
                start_new_session=POSIX,
                creationflags=flags,
            )
        finally:
            if sink is not None:
                os.close(sink)
        if source is not None:
            self._reader = threading.Thread(target=self._copy, args=(source,), daemon=True)
            self._reader.start()
        threading.Thread(target=self._wait, args=(ended,), daemon=True).start()

    @property
    def running(self) -> bool:
        """Whether its end has not been noticed yet."""
        return self.ended_at is None

    @property
    def failed(self) -> bool:
        """Whether it ended badly without our doing."""
        return not self.running and not self.stopped and self.process.returncode != 0

    @property
    def failed_at(self) -> float:
        """When it failed: with its last traceback, if that led to the end; interpreters take their time to leave."""
        assert self.ended_at is not None
        traced = self._tail.traced_at if self._tail else None
        return traced if traced is not None and self.ended_at - traced < 30 else self.ended_at

    def send(self, signum: int) -> None:
        """Forward a signal to the process alone: it decides what its own children should get."""
        if not self.running:
            return
        try:
            if not POSIX and signum == signal.SIGINT:  # a process group of Windows can only be sent this one
                signum = signal.CTRL_BREAK_EVENT  # type: ignore[attr-defined,unused-ignore]
            self.process.send_signal(signum)
        except OSError:
            pass  # gone, though not noticed yet

    def kill(self) -> None:
        """End the process and its group at once."""
        if self.running:
            signal_group(self.process.pid, KILL)
            self.process.kill()

    def pause(self, signum: int) -> None:
        """Stop or continue the whole group."""
        if self.running:
            signal_group(self.process.pid, signum)

    def resize(self) -> None:
        """Give its pseudo-terminal the size of our terminal."""
        if self._terminal is not None:
            _copy_size(self._terminal)

    def failure(self) -> Failure:
        """Its failure, for the report."""
        return Failure(self.rank, self.process.pid, self.process.returncode, self.said())

    def drain(self) -> None:
        """Wait until what it wrote last has been copied on, however slowly that is read.

        A process that it has left behind may hold its stderr open: nothing comes from there for a while.
        """
        while self._reader is not None and self._reader.is_alive():
            self._reader.join(0.1)
            if time.monotonic() - self._waits_since > _DRAIN:
                return

    def said(self) -> str | None:
        """The end of its stderr so far; None if that is not kept."""
        return self._tail.text() if self._tail else None

    def _stderr_channel(self) -> tuple[int, int]:
        """The end that we read, and the end that the process writes."""
        if POSIX and self.rank == 0 and os.isatty(_STDERR):
            import termios

            source, sink = os.openpty()
            modes = termios.tcgetattr(sink)
            modes[1] &= ~termios.OPOST  # our own terminal turns \n into \r\n
            termios.tcsetattr(sink, termios.TCSANOW, modes)
            self._terminal = source
            _copy_size(source)
            return source, sink
        return os.pipe()

    def _copy(self, source: int) -> None:
        assert self._tail is not None
        while chunk := self._next(source):
            self._tail.feed(chunk)
            self._waits_since = float("inf")  # for those who read what we write
            _write(chunk)
        self._terminal = None
        os.close(source)

    def _next(self, source: int) -> bytes:
        self._waits_since = time.monotonic()
        return _read(source)

    def _wait(self, ended: queue.SimpleQueue[Worker | int]) -> None:
        self.process.wait()
        moment = time.monotonic()
        # Its children, if it left any, go with it: nothing of a job outlives the job. At once, while the number is ours.
        self.lingers = signal_group(self.process.pid, signal.SIGTERM)
        self.ended_at = moment
        ended.put(self)


def _read(source: int) -> bytes:
    try:
        return os.read(source, 1 << 16)
    except OSError:  # a pseudo-terminal whose other side is closed
        return b""


def _write(chunk: bytes) -> None:
    try:
        while chunk:
            chunk = chunk[os.write(_STDERR, chunk) :]
    except OSError:
        pass  # our stderr is closed; the process need not know


def _copy_size(terminal: int) -> None:
    if sys.platform == "win32":
        return
    import fcntl
    import termios

    try:
        size = fcntl.ioctl(_STDERR, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)
    except OSError:
        pass

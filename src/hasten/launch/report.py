"""What a failed process says last, and the report that names it."""

from __future__ import annotations

import signal
import socket
import time
from typing import NamedTuple

KEPT_BYTES = 1 << 16
SHOWN_LINES = 60
_TRACEBACK = "Traceback (most recent call last):"
_FATAL = "Fatal Python error:"  # faulthandler's, before the traceback of a crash
_LINKS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)


# How a process ends whose peer has gone.
_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "remote process has terminated",
    "recvValue failed",
)


class Tail:
    """The end of a stream, and when the last traceback in it began."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self.traced_at: float | None = None

    def feed(self, chunk: bytes) -> None:
        """Append what was read."""
        seam = len(_TRACEBACK) - 1
        if _TRACEBACK.encode() in bytes(self._bytes[-seam:]) + chunk:
            self.traced_at = time.monotonic()
        self._bytes += chunk
        del self._bytes[:-KEPT_BYTES]

    def text(self) -> str:
        """What is kept, as text."""
        return self._bytes.decode(errors="replace")


class Failure(NamedTuple):
    """One process that ended badly by itself.

    Attributes:
        rank: its rank; None for a process that is not one of several.
        pid: its process id.
        code: its exit status as `subprocess` gives it: negative for a signal.
        stderr: the end of what it wrote there; None if that was not kept.
    """

    rank: int | None
    pid: int
    code: int
    stderr: str | None


def is_consequence(text: str | None) -> bool:
    """Whether what a process wrote last says that another one had gone before."""
    trace = last_traceback(text or "")
    return any(gone in line for line in trace[-3:] for gone in _GONE)


def shell_code(code: int) -> int:
    """The exit code by which a shell reports the status: 128 + signal for a signal."""
    return code if code >= 0 else 128 - code


def in_words(code: int) -> str:
    """`exit code 3` or `signal SIGSEGV`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    hint = " (perhaps the kernel's, for lack of memory)" if name == "SIGKILL" else ""
    return f"signal {name}{hint}"


def describe(first: Failure, others: list[Failure], ranks: int) -> str:
    """The report: which rank failed first, how, and its last traceback."""
    where = f"on {socket.gethostname()}, pid {first.pid}"
    if first.rank is None:
        return f"hasten: the process failed with {in_words(first.code)} ({where})."
    lines = [f"hasten: rank {first.rank} of {ranks} failed with {in_words(first.code)} ({where}); the job was stopped."]
    if others:
        later = ", ".join(f"rank {other.rank} ({in_words(other.code)})" for other in others)
        lines.append(f"Failed after it, perhaps because of it: {later}.")
    trace = last_traceback(first.stderr or "")
    lines += (
        [f"The last that rank {first.rank} wrote to stderr:", *(f"  {line}" for line in trace)]
        if trace
        else [f"Rank {first.rank} wrote nothing to stderr."]
    )
    return "\n".join(lines)


def last_traceback(text: str) -> list[str]:
    """The lines of the last traceback, with the exceptions that it is chained to; without one, the last lines."""
    lines = [line.rstrip() for line in text.splitlines()]
    begins = [number for number, line in enumerate(lines) if _TRACEBACK in line or _FATAL in line]
    if not begins:
        return [line for line in lines if line][-SHOWN_LINES // 3 :]
    start = begins.pop()
    while begins and any(link in line for line in lines[begins[-1] : start] for link in _LINKS):
        start = begins.pop()
    shown = lines[start:]
    while shown and not shown[-1]:
        shown.pop()
    if len(shown) > SHOWN_LINES:
        head = SHOWN_LINES // 4
        shown = [*shown[:head], "...", *shown[head - SHOWN_LINES + 1 :]]
    return shown

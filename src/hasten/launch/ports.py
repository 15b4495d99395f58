"""The port by which the processes of a job meet."""

from __future__ import annotations

import errno
import socket
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

_TRIES = 100


class HeldPort:
    """A port of this machine that no other launch can pick while this object lives.

    Two sockets hold it for the whole job. Its UDP twin is bound exclusively: that keeps out other launches that want the
    same number. On Linux the port itself is bound as well, with SO_REUSEADDR but without listening: the kernel then gives it
    to nobody who asks for any free port, while rank 0, which asks for this very number and allows reuse, as torch's store
    does, may listen on it. Elsewhere such sharing is unsafe; there, a program that is no launch and happens to be given the
    port within the moment until rank 0 starts could take it.

    Args:
        wanted: the number to take; 0 for any free one.

    Raises:
        OSError: `wanted` is in use (EADDRINUSE), or may not be used.
    """

    def __init__(self, wanted: int = 0) -> None:
        self._sockets = _hold(wanted) if wanted else _hold_any()
        self.number: int = self._sockets[1].getsockname()[1]
        if sys.platform != "linux":
            self._sockets[0].close()

    def release(self) -> None:
        """Let anyone have the port."""
        for held in self._sockets:
            held.close()

    def __enter__(self) -> HeldPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def take_port(wanted: int | None) -> tuple[HeldPort, str]:
    """Hold `wanted`, or a free port if it is unset, 0 or in use; with a note for the user in the last case, else ""."""
    try:
        return HeldPort(wanted or 0), ""
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        held = HeldPort()
        return held, f"port {wanted} is in use; the processes meet on the free port {held.number} instead"


def is_busy(number: int) -> bool:
    """Whether something on this machine listens on the port, or another launch holds it."""
    try:
        HeldPort(number).release()
    except OSError:
        return True
    return False


def _hold(number: int) -> tuple[socket.socket, socket.socket]:
    # The IPv4 wildcard conflicts with listeners on any address of either family, except IPv6-only ones.
    port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    twin = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        if sys.platform != "win32":  # there, this option would let us steal a port that is in use
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("", number))
        twin.bind(("127.0.0.1", port.getsockname()[1]))
    except OSError:
        port.close()
        twin.close()
        raise
    return port, twin


def _hold_any() -> tuple[socket.socket, socket.socket]:
    for _ in range(_TRIES):
        try:
            return _hold(0)
        except OSError as error:  # free, but its twin is not
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, "no free port was found")

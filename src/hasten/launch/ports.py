"""The port by which the processes of a job meet."""

from __future__ import annotations

import errno
import socket
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class HeldPort:
    """A port of this machine that no other launch can pick while this object lives.

    On Linux the port stays reserved for the whole job: it is bound with SO_REUSEADDR but not listened on. The kernel then
    gives it to nobody who asks for any free port, while rank 0, which asks for this very number (and allows reuse, as
    torch's store does), may listen on it. Elsewhere such sharing is unsafe; there the port is free again at once, and only
    a program that happens to be given it within the milliseconds until rank 0 starts could take it.

    Args:
        wanted: the number to take; 0 for any free one.

    Raises:
        OSError: `wanted` is in use.
    """

    def __init__(self, wanted: int = 0) -> None:
        self._socket: socket.socket | None = _bind(wanted)
        self.number: int = self._socket.getsockname()[1]
        if sys.platform != "linux":
            self.release()

    def release(self) -> None:
        """Let anyone have the port."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

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
    """Whether something on this machine listens on the port."""
    try:
        HeldPort(number).release()
    except OSError:
        return True
    return False


def _bind(number: int) -> socket.socket:
    # The IPv4 wildcard conflicts with listeners on any address of either family, except IPv6-only ones.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":  # there, this option would let us steal a port that is in use
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("", number))
    except OSError:
        bound.close()
        raise
    return bound

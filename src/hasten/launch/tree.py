"""Ending processes together with everything that they started; as a program: doing so when the launcher dies.

Every process of a launch inherits its mark, HASTEN_LAUNCH_ID, and so does all that it starts: by the mark they are found,
also those that left their session or lost their parent. The mark of a launch within a launch is appended to the outer
one's, so that the outer launch ends the inner one, too.

Run as `python -I tree.py <launch id>`, it reads its stdin to the end: a line `+pid` for each process that the launcher has
started (and `-pid` when it has ended), and "done" before the launcher leaves. If the launcher is killed instead, even by
SIGKILL, this program ends what it has started.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import psutil

MARK = "HASTEN_LAUNCH_ID"
POSIX = os.name == "posix"
KILL = signal.SIGKILL if POSIX else signal.SIGTERM

GUARD_GRACE = 3.0  # seconds between SIGTERM and SIGKILL after the launcher died
_POLL = 0.02
_LIMIT = 5.0  # seconds to wait for the kernel to remove what was killed


def new_mark(inherited: str | None) -> tuple[str, str]:
    """A new launch id, and the value of the mark that carries it."""
    launch_id = os.urandom(8).hex()
    return launch_id, f"{inherited},{launch_id}" if inherited else launch_id


def signal_group(leader: int, signum: int) -> bool:
    """Send a signal to a process group; whether it still had a member. Where there are no groups: no."""
    if not POSIX:
        return False
    try:
        os.killpg(leader, signum)
    except (ProcessLookupError, PermissionError):  # macOS: EPERM if only zombies are left
        return False
    return True


def end_groups(leaders: list[int], grace: float) -> None:
    """Wait up to `grace` seconds for process groups whose leaders have ended to become empty, then kill the rest."""
    if not any(signal_group(leader, 0) for leader in leaders):
        return
    _wait_for(_members(leaders), grace)
    for leader in leaders:
        signal_group(leader, KILL)


def end_family(launch_id: str, grace: float, leaders: Collection[int] = ()) -> bool:
    """End every process that carries the mark: SIGTERM, then SIGKILL after `grace` seconds. Whether none is left.

    So are the members of the groups of `leaders`: a process that sets its title may overwrite the mark.
    """
    first = _family(launch_id, leaders)
    for process in first:
        _send(process, signal.SIGTERM)
    _wait_for(first, grace)
    deadline = time.monotonic() + _LIMIT
    while (
        left := _family(launch_id, leaders)
    ) and time.monotonic() < deadline:  # again: they may have started more meanwhile
        for process in left:
            if POSIX and process.pid != os.getpid():
                _kill_group_of(process.pid)
            _send(process, KILL)
        _wait_for(left, 0.2)
    return not left


def end_descendants(roots: list[int], grace: float) -> None:
    """End processes and all that descend from them: SIGTERM, then SIGKILL after `grace` seconds."""
    import psutil

    found = []
    for pid in roots:
        try:
            process = psutil.Process(pid)
            found += [process, *process.children(recursive=True)]
        except psutil.Error:
            continue
    for process in found:
        _send(process, signal.SIGTERM)
    for process in _wait_for(found, grace):
        _send(process, KILL)


def signal_children(pid: int, signum: int) -> None:
    """Send a signal to the processes that a process has started itself."""
    import psutil

    try:
        children = psutil.Process(pid).children()
    except psutil.Error:  # it has ended
        return
    for child in children:
        _send(child, signum)


def guard() -> None:
    """Wait for the launcher's last word, and end its processes if it dies without one."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    leaders: set[int] = set()
    for line in sys.stdin:
        if line.strip() == "done":
            return
        (leaders.add if line[0] == "+" else leaders.discard)(int(line[1:]))
    end_family(sys.argv[1], GUARD_GRACE, leaders)


def _family(launch_id: str, leaders: Collection[int]) -> list[psutil.Process]:
    return _select(
        lambda process: (
            launch_id in process.environ().get(MARK, "").split(",") or (POSIX and os.getpgid(process.pid) in leaders)
        )
    )


def _members(leaders: list[int]) -> list[psutil.Process]:
    """The processes of these groups. The dead whom nobody has collected belong to them, too, but are not meant."""
    return _select(lambda process: os.getpgid(process.pid) in leaders)


def _select(wanted: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    import psutil  # not above: importing it costs more than a whole launch

    found = []
    for process in psutil.process_iter():
        try:
            if wanted(process) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # another user's, or gone
    return found


def _kill_group_of(pid: int) -> None:
    """Kill the process's group, which a launch has made: also members that have thrown the mark away."""
    try:
        group = os.getpgid(pid)
    except (ProcessLookupError, PermissionError):
        return
    if group != os.getpgrp():
        signal_group(group, KILL)


def _wait_for(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait up to `seconds` for processes to end, without reaping any: the rest of them."""
    import psutil

    def alive(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    deadline = time.monotonic() + seconds
    while (left := [process for process in processes if alive(process)]) and time.monotonic() < deadline:
        time.sleep(_POLL)
    return left


def _send(process: psutil.Process, signum: int) -> None:
    import psutil

    try:
        process.send_signal(signum)
    except (psutil.Error, OSError):
        pass  # gone already


if __name__ == "__main__":
    guard()

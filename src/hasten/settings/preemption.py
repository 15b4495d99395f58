"""The signals by which a machine is announced to be taken away, and how a job answers them."""

from __future__ import annotations

import signal
from collections.abc import Iterable

PREEMPTED = 75  # exit code of a job that has saved and can be started again: EX_TEMPFAIL of sysexits.h, "try again"

# Some platforms lack some of these. A name that no platform has is a mistake.
_ELSEWHERE = (
    *("SIGALRM", "SIGBREAK", "SIGCONT", "SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM"),
    *("SIGURG", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGXCPU", "SIGXFSZ"),
)
_NOBODYS = ("SIGKILL", "SIGSTOP")  # nobody can handle them


def signal_names(given: str | int | Iterable[str | int]) -> tuple[str, ...]:
    """The names of signals, each once.

    Args:
        given: names such as "SIGTERM", or members of `signal.Signals`; one or several.

    Raises:
        ValueError: no platform has such a signal, or none lets a program handle it.
    """
    several = [given] if isinstance(given, (str, int)) else list(given)
    names = [each.name if isinstance(each, signal.Signals) else str(each) for each in several]
    known = {*_ELSEWHERE, *(each.name for each in signal.Signals)} - {*_NOBODYS}
    for name in names:
        if name in _NOBODYS:
            raise ValueError(f"save_on_signal={given!r}: {name} ends a process at once, no program can handle it.")
        if name not in known:
            raise ValueError(
                f"save_on_signal={given!r}: {name!r} is not the name of a signal, such as 'SIGTERM' or 'SIGUSR1'."
            )
    return tuple(dict.fromkeys(names))

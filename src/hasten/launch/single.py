"""One process: it takes the place of the launcher."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from hasten.settings import environment

if TYPE_CHECKING:
    from hasten.launch.spec import LaunchSpec


def replace_process(spec: LaunchSpec) -> int:
    """Run the only process in the place of this one. Returns only where processes cannot be replaced (Windows)."""
    command, environ = spec.command(), {**environment.snapshot(), **spec.environment}
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "posix":
        os.execvpe(command[0], command, environ)
    return _wait_for(command, environ)


def _wait_for(command: list[str], environ: dict[str, str]) -> int:
    import signal
    import subprocess

    child = subprocess.Popen(command, env=environ)
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the child, too; it decides
    try:
        return child.wait()
    finally:
        signal.signal(signal.SIGINT, previous)

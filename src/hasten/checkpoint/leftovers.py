"""Folders that are being written, and those that a crash has left behind."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import socket
import time
from pathlib import Path

from hasten.checkpoint import commit

logger = logging.getLogger(__name__)

_ABANDONED = (
    3600.0  # seconds without a change after which a folder of a process that cannot be asked counts as left behind
)
_NAME = re.compile(r"\.(?P<target>.*)\.partial-(?P<host>[^.]*)\.(?P<pid>\d+)\.[0-9a-f]{8}")


def open_temporary(target: Path) -> Path:
    """Make the folder for what is to become `target`: inside it if it exists, else beside it."""
    commit.make_folder(target.parent)
    remove_leftovers(target)
    if target.is_dir():
        commit.finish(target)
    elif target.exists():
        raise NotADirectoryError(
            f"{target} is a file, but a folder is needed: choose another name, or remove the file."
        )
    temporary = (target if target.is_dir() else target.parent) / temporary_name(target)
    temporary.mkdir()
    return temporary


def temporary_name(target: Path) -> str:
    """A new name for a folder that is to become `target`; it says who writes it."""
    return f".{target.name[:100]}.partial-{_host()}.{os.getpid()}.{secrets.token_hex(4)}"


def remove_leftovers(target: Path) -> None:
    """Remove what earlier saves to `target` have left, unless somebody may still be writing it.

    Beside the target, what other dead processes of this machine have left goes too.
    """
    for place in (target.parent, target):
        try:
            names = [entry.name for entry in os.scandir(place) if entry.name.startswith(".")]
        except OSError:
            continue
        for name in names:
            match = _NAME.fullmatch(name)
            if match and _is_left_behind(place / name, match, same=match["target"] == target.name[:100]):
                logger.info("Removing %s, which an interrupted save has left.", place / name)
                shutil.rmtree(place / name, ignore_errors=True)


def _is_left_behind(folder: Path, match: re.Match[str], same: bool) -> bool:
    import psutil

    pid = int(match["pid"])
    if match["host"] == _host() and not psutil.pid_exists(pid):
        return True
    return same and time.time() - _last_change(folder) > _ABANDONED


def _last_change(folder: Path) -> float:
    times = [folder]
    times += [Path(path) / name for path, _, files in os.walk(folder) for name in files]
    return max((path.stat().st_mtime for path in times if path.exists()), default=0.0)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40]

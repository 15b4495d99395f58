"""Putting a finished folder in its place, so that a crash at any moment leaves the old content or the new one.

A folder that does not exist yet comes into being by one rename. One that exists is kept, for it may hold the user's own files,
be a mount point or the current folder: the finished folder is renamed to `.incoming` inside it. From then on the new content
counts, and its files are moved into their places one by one. Whoever finds `.incoming` after a crash finishes the moves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

INCOMING = ".incoming"
_PLAN = "plan.json"


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the operating system can (not on Windows)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and what is missing above it, durably.

    Raises:
        NotADirectoryError: there is a file of that name.
    """
    missing = []
    while not folder.is_dir():
        if folder.exists() and not folder.is_dir():  # another process may be making it
            raise NotADirectoryError(
                f"{folder} is a file, but a folder is needed: choose another name, or remove the file."
            )
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def write_durably(path: Path, text: str) -> None:
    """Write a small new file and sync it. Its name is durable once the folder is synced."""
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def put_in_place(finished: Path, target: Path, files: Sequence[str], stale: Iterable[str] = ()) -> None:
    """Make the content of a finished and synced folder that of `target`.

    Args:
        finished: a folder beside or inside the target; it is gone afterwards.
        target: the folder to make or to change; files that are not named here stay as they are.
        files: names of all files in `finished`, relative, in the order in which they shall take their places.
        stale: names in `target` to remove.

    Raises:
        OSError: the operating system refused something; `target` is as it was.
        RuntimeError: the new content counts, but could not be moved to its places.
    """
    if finished.parent != target:
        try:
            os.rename(finished, target)
        except OSError:
            if not target.is_dir():
                raise
        else:
            sync_folder(target.parent)
            return
    write_durably(finished / _PLAN, json.dumps({"move": list(files), "remove": list(stale)}))
    sync_folder(finished)
    os.rename(finished, target / INCOMING)
    sync_folder(target)
    try:
        finish(target)
    except OSError as error:
        raise RuntimeError(
            f"All files of {target} are complete, in {INCOMING} inside it, but can't be moved to their places: {error}. That is "
            "finished when the folder is loaded or saved the next time."
        ) from error


def is_interrupted(target: Path) -> bool:
    """Whether new content counts that is not in its place yet."""
    return (target / INCOMING / _PLAN).is_file()


def finish(target: Path) -> None:
    """Move new content that counts into its places, if there is any. Several processes may do so at once.

    Raises:
        OSError: the folder can't be changed.
    """
    incoming = target / INCOMING
    try:
        plan = json.loads((incoming / _PLAN).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        _remove_empty(incoming)
        return
    folders = {target}
    for name in plan["move"]:
        place = target / name
        for folder in _missing_above(place):
            folder.mkdir(exist_ok=True)
            folders.add(folder.parent)
        with suppress(FileNotFoundError):  # in its place already
            os.replace(incoming / name, place)
        folders.add(place.parent)
    for name in plan["remove"]:
        (target / name).unlink(missing_ok=True)
        folders.add((target / name).parent)
    for folder in folders:
        with suppress(FileNotFoundError):
            sync_folder(folder)
    (incoming / _PLAN).unlink(missing_ok=True)
    _remove_empty(incoming)
    sync_folder(target)


def _remove_empty(folder: Path) -> None:
    # Never a file: at this moment another process may be putting new content there.
    for path, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            os.rmdir(path)


def _missing_above(path: Path) -> list[Path]:
    missing = []
    for folder in path.parents:
        if folder.is_dir():
            break
        missing.append(folder)
    return missing[::-1]

"""Automatic names of checkpoints, which one is the newest, and how many are kept."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hasten.checkpoint import commit, sidecar, state, store
from hasten.checkpoint.contents import Contents
from hasten.checkpoint.remote import RemoteFolder
from hasten.world.process import World

logger = logging.getLogger(__name__)

_NAME = re.compile(r"checkpoint_(\d+)")
_REMOVED = ".removed"
# Of the newest complete checkpoints: what a killed run has left lies just before the first ones of the next run.
_LOOKED_AT = 3


Folder = Any  # a Path or a RemoteFolder


def folder_of_all(project_dir: str | Path | RemoteFolder) -> Folder:
    """Where the automatically named checkpoints of a project are."""
    base = project_dir if isinstance(project_dir, RemoteFolder) else Path(project_dir).expanduser()
    return base / "checkpoints"


def numbered(folder: Folder) -> dict[int, Folder]:
    """The folders `checkpoint_{n}` by number, in the order of the numbers. What is complete is not asked."""
    if isinstance(folder, RemoteFolder):
        names = {int(match[1]): name for name in folder.children() if (match := _NAME.fullmatch(name))}
        return {number: folder / names[number] for number in sorted(names)}
    if not folder.is_dir():
        return {}
    found = {
        int(match[1]): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    }
    return dict(sorted(found.items()))


def complete(folder: Folder) -> Iterator[Folder]:
    """The complete checkpoints, the highest number first; says which ones it leaves out.

    Raises:
        ValueError: there is none, or no more.
    """
    for path in reversed(numbered(folder).values()):
        if store.is_complete(path):
            yield path
        else:
            logger.warning("%s is not complete; looking for an older one.", path)
    raise ValueError(f"There is no complete checkpoint in {folder}. Save one first, or pass `input_dir`.")


def newest(folder: Folder) -> Folder:
    """The complete checkpoint with the highest number.

    Raises:
        ValueError: there is none.
    """
    return next(complete(folder))


def check_free(path: Folder) -> None:
    """Check that no checkpoint is in the way of a new one, and that the first one of a run does not come after others.

    `load_state` would take the others, and `total_limit` this one.

    Raises:
        ValueError: there is one.
    """
    others = numbered(path.parent)
    following = max(others, default=-1) + 1
    taken = number_of(path) in others if isinstance(path, RemoteFolder) else path.exists()
    if taken or (number_of(path) == 0 and following > 0):
        there = path if taken else others[following - 1]
        raise ValueError(
            f"Checkpoint directory {there} already exists, of an earlier run. To go on from it, call `load_state()` first, which "
            "also sets the next number. To begin anew, choose another `project_dir`, or set the number: "
            f"`ProjectConfiguration(iteration={following})`."
        )


def next_iteration(folder: Folder) -> int:
    """The first number after all that are there, so that nothing is in the way and the next checkpoint is the newest."""
    return max(numbered(folder), default=-1) + 1


def number_of(path: Folder) -> int:
    """The number of an automatically named checkpoint."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def prune(newest: Folder, total_limit: int) -> list[Folder]:
    """Remove the oldest complete checkpoints beside the one that has just been saved, until `total_limit` are left.

    Incomplete ones are neither counted nor removed. Returns what was removed.
    """
    others = [path for path in numbered(newest.parent).values() if path != newest and store.is_complete(path)]
    kept = len(others) + store.is_complete(newest)  # it may wait for other processes to commit their files
    surplus = others[: max(0, kept - total_limit)]
    if isinstance(newest, RemoteFolder):
        for path in surplus:
            path.remove_all()
            logger.info("Removed %s: at most %d checkpoints are kept.", path, total_limit)
        return surplus
    if surplus:
        for path in (*others[len(surplus) :], newest):
            sidecar.make_durable(path)
    for path in surplus:
        # Gone under its name at once, so that a crash leaves no half of it.
        path.rename(path.with_name(f".{path.name}{_REMOVED}"))
        logger.info("Removed %s: at most %d checkpoints are kept.", path, total_limit)
    removed = list(newest.parent.glob(f".checkpoint_*{_REMOVED}"))
    if removed:
        commit.sync_folder(newest.parent)  # or a power cut brings a name back, and not all of the files
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    return surplus


def remove_unfinished(folder: Path) -> None:
    """Remove what killed runs have left of saves in which each process commits its own files.

    A process commits in the order of the numbers. So nobody can be writing one before a complete one any more.
    """
    complete = 0
    for path in reversed(numbered(folder).values()):
        if store.is_complete(path):
            complete += 1
            if complete == _LOOKED_AT:
                return
        elif complete and sidecar.saves(path) and all(sidecar.is_save(each) for each in path.iterdir()):
            logger.info("Removing %s, which an interrupted save has left.", path)
            shutil.rmtree(path, ignore_errors=True)


def save_numbered(
    project_dir: str | Path | RemoteFolder,
    iteration: int,
    total_limit: int | None,
    contents: Contents,
    world: World,
    **options: Any,
) -> Any:
    """Save as `project_dir/checkpoints/checkpoint_{iteration}`, then remove the oldest ones beyond `total_limit`.

    Args:
        project_dir: the folder of the run.
        iteration: the number; where several processes save, that of the main process counts.
        total_limit: how many checkpoints are kept; None keeps all.
        contents, world, options: as in `state.save`.

    Returns:
        The checkpoint's folder (a `RemoteFolder` behind a URL), whose number `number_of` tells; in the background the save.

    Raises:
        ValueError: the number is taken.
        OSError, RuntimeError: see `state.save`.
    """
    folder = folder_of_all(project_dir)

    def tidy(saved: Folder) -> None:
        if not isinstance(saved, RemoteFolder):
            remove_unfinished(folder)
        if total_limit is not None:
            prune(saved, total_limit)

    place = folder / f"checkpoint_{iteration}"
    return state.save(
        place, contents, world, label=f"numbered in {folder}", check=check_free, after_commit=tidy, **options
    )

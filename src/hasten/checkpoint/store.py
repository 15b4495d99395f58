"""A folder as a transaction over all processes: it is written completely, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hasten.checkpoint import commit, per_rank, roles, sidecar
from hasten.checkpoint.manifest import MANIFEST, Manifest
from hasten.checkpoint.remote import RemoteFolder, folder_of, spool
from hasten.world.process import World


@contextmanager
def transaction(
    folder: str | os.PathLike[str],
    world: World,
    *,
    label: str | None = None,
    is_stale: Callable[[str], bool] = lambda name: False,
    check: Callable[[Any], object] = lambda folder: None,
    topology: sidecar.Topology | None = None,
) -> Iterator[roles.Transaction]:
    """Write a folder so that a crash at any moment leaves its old content or the new one, whole.

    The main process calls this; the others may, and those that do take part: the folder is put in place when all of them have
    left the body. Files that are in `folder` already and do not belong to an earlier transaction stay.

    Args:
        folder: what to write; it is made, with the folders above it. Behind a URL (see `remote`) the files are sent when all have
            left the body; what was there before is no checkpoint from then on, and the new one is when all are there.
        world: the processes.
        label: by what the processes recognise that they write the same thing; by default the folder's name as it is given.
        is_stale: of the files in `folder` that no manifest lists, which ones the new content replaces even if it has no such name.
        check: called with the folder by the main process first; what it raises ends the save on all processes.
        topology: how this process holds parameters, if each process commits its own files and waits for nobody; see `sidecar`.
            Then the folder is complete when the last one has left the body, and `transaction.temporary` is this process's own.

    Raises:
        OSError: this process could not write, or the main process could not put the folder in place.
        RuntimeError: another process failed; the message names it. The old content is still there.
    """
    place = folder_of(folder)
    remote = place if isinstance(place, RemoteFolder) else None
    target = spool(place.url) if isinstance(place, RemoteFolder) else place
    label = (os.path.normpath(target) if remote is None else remote.url) if label is None else label
    role: roles.Role
    if topology is not None:
        if remote is not None:
            raise NotImplementedError(
                f"{remote}: saves of which each process commits its own files (sharded_save='per_rank') need a folder on a disk, "
                "not one behind a URL. Use sharded_save='dcp', or a folder."
            )
        role = per_rank.Own(target.absolute(), world, check, topology)
    elif world.size == 1 or world.group is None:
        role = roles.Alone(target.absolute(), is_stale, check, remote)
    elif world.is_main:
        role = roles.Main(target.absolute(), is_stale, check, world, label, remote)
    else:
        role = roles.Member(target.absolute(), is_stale, world, label, remote)
    try:
        with role.transaction.writer:
            yield role.transaction
    except BaseException as error:
        role.end(error)
        raise
    role.end(None)


def is_complete(folder: str | os.PathLike[str] | RemoteFolder) -> bool:
    """Whether a folder holds a whole checkpoint. One without a manifest, as the reference writes, counts if it holds files."""
    if isinstance(folder, RemoteFolder):
        return folder.is_complete()
    folder = Path(folder)
    if not folder.is_dir():
        return False
    try:
        save = sidecar.current(folder)
        if save is not None:
            return not sidecar.problems(save)
        manifest = read_manifest(folder)
    except RuntimeError:
        return False
    if manifest is None:
        return any(path.is_file() and not path.name.startswith(".") for path in folder.iterdir())
    return not manifest.problems(_places(folder))


def verify(
    folder: str | os.PathLike[str],
    checksums: bool = False,
    concerns: Callable[[str], bool] = lambda name: True,
    rank: int | None = None,
) -> None:
    """Check that every file of a checkpoint is there and has its size, and on demand its checksum.

    Folders without a manifest pass: nothing is known of them.

    Args:
        folder: the checkpoint.
        checksums: also read every file and compare its checksums.
        concerns: which files to check, by name; all by default.
        rank: where each process has committed its own files, look at those of this one and of the main one only.

    Raises:
        RuntimeError: files are damaged or missing; the message names them.
    """
    folder = Path(folder)
    save = sidecar.current(folder)
    if save is not None:
        sidecar.verify(save, rank, checksums, concerns)
        return
    manifest = read_manifest(folder)
    if manifest is None:
        return
    files = {name: file for name, file in manifest.files.items() if concerns(name)}
    problems = replace(manifest, files=files).problems(_places(folder), checksums)
    if problems:
        raise RuntimeError(
            f"The checkpoint {folder} is damaged: {'; '.join(problems)}. Load another one. If the files were changed on purpose, "
            f"delete {folder / MANIFEST}: then they are read as they are."
        )


def resolve(folder: str | os.PathLike[str]) -> Path:
    """Finish what a crash has interrupted in a folder, so that it can be read. Any process may call it, several at once.

    Returns:
        Where the files are: the folder, or inside it the save of which each process has committed its own files.

    Raises:
        ValueError: there is no such folder.
        RuntimeError: there is something to finish, but the folder can't be changed; or some processes had not committed theirs.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ValueError(f"Tried to find {path} but folder does not exist")
    try:
        commit.finish(path)
    except OSError as error:
        raise RuntimeError(
            f"Saving {path} was interrupted when the new files were complete but not all in their places, and they can't be moved "
            f"now: {error}. Make the folder writable and load it once."
        ) from error
    return sidecar.current(path) or path


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of what counts in a folder; None if there is none.

    Raises:
        RuntimeError: the manifest is damaged.
    """
    for place in _places(folder):
        manifest = Manifest.read(place)
        if manifest is not None:
            return manifest
    return None


def _places(folder: Path) -> tuple[Path, ...]:
    return (folder / commit.INCOMING, folder) if commit.is_interrupted(folder) else (folder,)

"""Saves of which each process commits its own files: what each one says of them, and when that makes a checkpoint.

Such a save is a folder of its own inside the checkpoint's folder, so that one that is never finished takes nothing away. Each
process puts its files there and then a small sidecar, `hasten_rank_3.json`. Nobody waits for anybody: the save is complete when
the sidecars of all processes are there and agree, and it is the reader who looks. The name of the folder is that of the save, and
in the order of names a later one comes after an earlier one.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hasten.checkpoint import commit
from hasten.checkpoint.manifest import MANIFEST, Manifest
from hasten.weights.stream import BLOCK, Written

_VERSION = 1
_SAVE = re.compile(r"per_rank_[0-9a-f]{24}_\d{8,}")
_SIDECAR = re.compile(r"hasten_rank_(\d+)\.json")


@dataclass(frozen=True)
class Topology:
    """How parameters are divided over the processes.

    Args:
        axes: the names and sizes of the meshes' axes; empty where nothing is divided.
        place: where this process is on them.
    """

    axes: str = ""
    place: str = ""


@dataclass(frozen=True)
class Sidecar:
    """What one process says about its own files.

    Args:
        save: the name of the save, the same for all processes.
        rank: the process.
        world_size: how many there are.
        topology: how it holds parameters.
        files: size and checksums by name.
        replaces: the identity of the manifest that was in the checkpoint's folder when the save began, as the main process saw it.
    """

    save: str
    rank: int
    world_size: int
    topology: Topology
    files: dict[str, Written]
    replaces: str | None = None

    def text(self) -> str:
        """The content of the sidecar's file."""
        import torch

        from hasten.version import __version__

        body = {
            "version": _VERSION,
            "written_by": {"hasten": __version__, "torch": torch.__version__},
            "save": self.save,
            "rank": self.rank,
            "world_size": self.world_size,
            "mesh": self.topology.axes,
            "place": self.topology.place,
            "replaces": self.replaces,
            "checksum": {"kind": "crc32", "bytes": BLOCK},
            "files": {name: {"size": file.size, "crc32": file.crc32} for name, file in sorted(self.files.items())},
        }
        return json.dumps({"crc32": _sum(body), "body": body}, indent=1) + "\n"

    @classmethod
    def read(cls, save: Path, rank: int) -> Sidecar:
        """The sidecar of one process.

        Raises:
            FileNotFoundError: there is none.
            RuntimeError: it is damaged, or of a later version.
        """
        path = save / file_name(rank)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            body = content["body"]
            if content["crc32"] != _sum(body):
                raise ValueError("its checksum differs")
            if body["version"] > _VERSION:
                raise RuntimeError(
                    f"{path} was written by a later version of hasten ({body['written_by']}): update hasten."
                )
            files = {name: Written(entry["size"], tuple(entry["crc32"])) for name, entry in body["files"].items()}
            topology = Topology(body["mesh"], body["place"])
            return cls(body["save"], body["rank"], body["world_size"], topology, files, body["replaces"])
        except (ValueError, KeyError, TypeError) as error:
            raise RuntimeError(f"{path.name} is damaged ({error})") from error


def _sum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def file_name(rank: int) -> str:
    """Name of a process's sidecar."""
    return f"hasten_rank_{rank}.json"


def save_name(run: str, number: int) -> str:
    """Name of the n-th save of a run."""
    return f"per_rank_{run}_{number:08d}"


def is_save(folder: Path) -> bool:
    """Whether a folder is such a save, finished or not."""
    return _SAVE.fullmatch(folder.name) is not None


def saves(folder: Path) -> list[Path]:
    """The saves inside a checkpoint's folder, the latest first, finished or not."""
    try:
        found = [folder / name for name in os.listdir(folder) if _SAVE.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, reverse=True)


# -- completeness --------------------------------------------------------------------------------------------------------


def unfinished(save: Path) -> str | None:
    """What says that some process had not finished its part; None if all had."""
    there = {int(match[1]) for name in os.listdir(save) if (match := _SIDECAR.fullmatch(name))}
    if not there:
        return "no process had finished its part"
    for rank in sorted(there):
        try:
            size = Sidecar.read(save, rank).world_size
        except (RuntimeError, FileNotFoundError):
            continue
        missing = sorted(set(range(size)) - there)
        if missing:
            more = f" and {len(missing) - 3} others" if len(missing) > 3 else ""
            names = ", ".join(map(file_name, missing[:3]))
            return f"{names}{more} missing: of {size} processes, these had not finished their part"
        return None
    return None  # all are there, and damaged


def problems(save: Path, checksums: bool = False) -> list[str]:
    """What keeps a save from being a checkpoint, one line each; the sidecars of all processes are read.

    Args:
        save: the folder.
        checksums: also read every file and compare its checksums; sizes are always compared.
    """
    lacking = unfinished(save)
    return [lacking] if lacking else list(_problems(save, None, checksums, lambda name: True))


def verify(save: Path, rank: int | None, checksums: bool, concerns: Callable[[str], bool]) -> None:
    """Check what one process reads: its own files and those that the main process has written for all; None checks everything.

    Raises:
        RuntimeError: something is damaged or missing; the message names it.
    """
    if lines := problems(save, checksums) if rank is None else list(_problems(save, rank, checksums, concerns)):
        raise RuntimeError(f"The checkpoint {save} is damaged: {'; '.join(lines)}. Load another one.")


def _problems(save: Path, rank: int | None, checksums: bool, concerns: Callable[[str], bool]) -> Iterator[str]:
    first, line = _read(save, 0)
    if first is None:
        yield line
        return
    for number in range(first.world_size) if rank is None else {0, rank} & set(range(first.world_size)):
        own, line = _read(save, number)
        if own is None:
            yield line
        elif own.save != save.name or own.rank != number:
            yield f"{file_name(number)} is of another save ({own.save}, rank {own.rank})"
        elif (own.world_size, own.topology.axes) != (first.world_size, first.topology.axes):
            yield (
                f"{file_name(number)} speaks of {_words(own.world_size, own.topology)}, and {file_name(0)} of "
                f"{_words(first.world_size, first.topology)}"
            )
        else:
            files = {name: file for name, file in own.files.items() if concerns(name)}
            yield from Manifest(files).problems([save], checksums)


def _read(save: Path, rank: int) -> tuple[Sidecar | None, str]:
    try:
        return Sidecar.read(save, rank), ""
    except FileNotFoundError:
        return None, f"{file_name(rank)} is missing"
    except RuntimeError as error:
        return None, str(error)


def current(folder: Path) -> Path | None:
    """The latest finished save of a checkpoint's folder, if it is later than the other content of the folder.

    Raises:
        RuntimeError: there is nothing but unfinished saves.
    """
    if is_save(folder):
        lacking = unfinished(folder)
        if lacking:
            raise RuntimeError(f"The checkpoint {folder} is not complete: {lacking}. Load another one.")
        return folder
    found = saves(folder)
    for save in found:
        if unfinished(save) is None:
            return save if counts(save) else None
    if found and all(name.startswith(".") or is_save(folder / name) for name in os.listdir(folder)):
        raise RuntimeError(f"The checkpoint {folder} is not complete: {unfinished(found[0])}. Load another one.")
    return None


def counts(save: Path) -> bool:
    """Whether the checkpoint's folder has not been saved in another form since."""
    try:
        manifest = Manifest.read(save.parent)
    except RuntimeError:  # which is no checkpoint any more
        return True
    first = _read(save, 0)[0]
    return manifest is None or first is None or manifest.identity == first.replaces


def check_fits(save: Path, rank: int, world_size: int, topology: Topology) -> None:
    """Check that this process is what it was when the save was made.

    Raises:
        ValueError: there are more or fewer processes, or another mesh; the message says what else can be done.
        RuntimeError: a sidecar is damaged.
    """
    first, line = _read(save, 0)
    own, line = (first, line) if first is None or rank >= first.world_size else _read(save, rank)
    if first is None or own is None:
        raise RuntimeError(f"The checkpoint {save} is damaged: {line}. Load another one.")
    size = first.world_size
    same_place = replace(own.topology, axes=first.topology.axes) == topology
    if size != world_size or not (same_place or size == 1):
        raise ValueError(
            f"{save} was saved by {_words(size, own.topology)}, each its own file (sharded_save='per_rank'), and loads on the same "
            f"number of processes and the same mesh only; this is {_words(world_size, topology)}. "
            f"`hasten merge-weights {save.parent} OUTPUT` makes plain weights of it, which load anywhere. To keep the optimizer, "
            "too, load it as it was saved, and save it with sharded_save='dcp': such checkpoints load on any number."
        )


def _words(size: int, topology: Topology) -> str:
    processes = f"{size} process{'es' if size > 1 else ''}"
    if not topology.axes:
        return f"{processes} without sharding"
    return f"{processes} on the mesh {topology.axes} (this one at {topology.place})"


def make_durable(folder: Path) -> None:
    """Let a power cut not take the sidecars that are in a checkpoint's folder, before something older is removed for them.

    They can be seen before the processes that put them there have synced their names.
    """
    for save in saves(folder):
        commit.sync_folder(save)


def remove_outdated(folder: Path) -> None:
    """Remove what the latest complete save of a checkpoint's folder replaces: earlier saves, and files of other forms."""
    import shutil

    found = saves(folder)
    manifest = folder / MANIFEST
    if len(found) < 2 and not manifest.exists():
        return
    whole = next((save for save in found if not problems(save)), None)
    if whole is None or not counts(whole):
        return
    earlier = found[found.index(whole) + 1 :]
    if not earlier and not manifest.exists():
        return
    commit.sync_folder(whole)  # see `make_durable`
    for save in earlier:
        shutil.rmtree(save, ignore_errors=True)
    try:
        old = Manifest.read(folder)
    except RuntimeError:
        old = None
    manifest.unlink(missing_ok=True)  # first: without it, the other files are no checkpoint
    for name in old.files if old is not None else ():
        (folder / name).unlink(missing_ok=True)
    for place in {(folder / name).parent for name in (old.files if old is not None else ())} - {folder}:
        if not any(place.iterdir()):
            place.rmdir()

"""The positions of data loaders in the files of a checkpoint: one file per loader, and one more per rank that differs."""

from __future__ import annotations

import filecmp
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hasten.checkpoint import sidecar
from hasten.checkpoint.manifest import MANIFEST
from hasten.weights.torch_file import read_torch
from hasten.weights.write import FolderWriter

logger = logging.getLogger(__name__)


def file_name(index: int, rank: int = 0) -> str:
    """Name of the file of loader number `index`, of the main process or of another rank."""
    return f"dl_state_dict{f'_{index}' if index else ''}{f'_rank{rank}' if rank else ''}.bin"


def states(loaders: Sequence[Any]) -> dict[int, Any]:
    """Where loaders are now, by their numbers. Those without `state_dict` have no position."""
    return {index: loader.state_dict() for index, loader in enumerate(loaders) if hasattr(loader, "state_dict")}


def write(writer: FolderWriter, states: dict[int, Any], rank: int) -> None:
    """Write this rank's positions."""
    for index, state in states.items():
        writer.save_torch(file_name(index, rank), state)


def drop_repeated(folder: Path) -> None:
    """Remove the files of ranks whose position is the main process's own."""
    for path in folder.glob("dl_state_dict*_rank*.bin"):
        main = path.with_name(re.sub(r"_rank\d+", "", path.name))
        if main.exists() and filecmp.cmp(path, main, shallow=False):
            path.unlink()


def read(folder: Path, loaders: Sequence[Any], rank: int) -> None:
    """Restore the positions that are there; those that are not, or are of another kind, are told in one warning.

    Raises:
        ValueError: a position that this library saved is not one of such a loader.
    """
    lost = []
    for index, loader in enumerate(loaders):
        if not hasattr(loader, "load_state_dict"):
            continue
        path = folder / file_name(index, rank)
        if not path.exists():
            path = folder / file_name(index)
        try:
            loader.load_state_dict(read_torch(path, map_location="cpu"))
        except FileNotFoundError:
            lost.append(index)
        except ValueError:
            if (folder / MANIFEST).exists() or sidecar.is_save(folder):
                raise
            lost.append(index)
    if lost:
        logger.log(
            logging.WARNING if rank == 0 else logging.DEBUG,
            "%s holds no position of data loader %s: its epoch, its order and its place in it are not restored.",
            folder,
            ", ".join(map(str, lost)),
        )

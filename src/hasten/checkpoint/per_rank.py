"""A save in which each process commits its own files; see `sidecar` for how they make a checkpoint.

The processes agree once, at the first such save, on a name for the run. From then on each counts its saves, which gives the same
name to the same save everywhere, and nobody sends or waits for anything.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hasten.checkpoint import commit, sidecar
from hasten.checkpoint.leftovers import remove_leftovers, temporary_name
from hasten.checkpoint.manifest import Manifest
from hasten.checkpoint.roles import Transaction, afterwards, completed, discarding
from hasten.checkpoint.sidecar import Sidecar, Topology
from hasten.collectives.together import from_main
from hasten.weights.stream import Written
from hasten.world.process import World

logger = logging.getLogger(__name__)

_RUN = "saves per rank"  # what is kept of a world
_PATIENCE = 2  # saves after which one that is still unfinished is told of


@dataclass
class _Run:
    """The saves of a world so far.

    Args:
        name: the same on all processes; of a later run, a later one in the order of names.
        count: how many there were.
        pending: on the main process, those that may not be complete yet, oldest first.
    """

    name: str
    count: int = 0
    pending: list[Path] = field(default_factory=list)


class Own:
    """What each process does at the two ends of such a save. No process has all files at hand, so `before_commit` is not called.

    Args:
        target: the checkpoint's folder, the same for all processes.
        world: the processes.
        check: called with the folder by the main process; what it raises in the first save of a run ends it on all processes.
        topology: how this process holds parameters.
    """

    def __init__(self, target: Path, world: World, check: Callable[[Path], object], topology: Topology) -> None:
        self.world = world
        self.topology = topology
        self._replaces: str | None = None
        run = world.attached.get(_RUN)
        first = run is None
        if run is None:
            run = world.attached[_RUN] = _Run(_agree_on_run(target, world, check))
        self._run: _Run = run
        run.count += 1
        self.save = target / sidecar.save_name(run.name, run.count)
        if world.is_main:
            self._look(target, check, first)
        commit.make_folder(self.save)
        temporary = self.save / temporary_name(Path(f"rank_{world.rank}"))
        temporary.mkdir()
        self.transaction = Transaction(target, temporary, leads=world.is_main, is_main=world.is_main)
        if world.is_main:
            self.transaction.after_commit.append(sidecar.remove_outdated)

    def _look(self, target: Path, check: Callable[[Path], object], first: bool) -> None:
        """What the main process finds in the folder, and does there."""
        if target.is_dir():
            others = [name for name in os.listdir(target) if name != self.save.name]
            if others and not first:  # faster processes have made the folder, and nothing else
                check(target)
            remove_leftovers(target)
            commit.finish(target)
            with suppress(OSError):
                sidecar.remove_outdated(target)
            try:
                manifest = Manifest.read(target)
            except RuntimeError:
                manifest = None
            self._replaces = None if manifest is None else manifest.identity
        if len(self._run.pending) > _PATIENCE:
            late = self._run.pending.pop(0)
            lacking = sidecar.unfinished(late) if late.is_dir() else None
            if lacking:
                logger.warning(
                    "%s is not complete yet, although %d checkpoints have been saved since: %s. Every process must call "
                    "`save_state`, with the same folders in the same order.",
                    late,
                    _PATIENCE,
                    lacking,
                )

    def end(self, error: BaseException | None) -> None:
        """Commit this process's files, or give them up; see `roles.Role`."""
        with discarding(self.transaction, always=True):
            if error is not None:
                return
            self._commit()
        if self.world.is_main:
            self._run.pending.append(self.save)
            afterwards(self.transaction)

    def _commit(self) -> None:
        temporary, own = self.transaction.temporary, self.transaction.writer.written
        files: dict[str, Written] = {}
        for name, file in completed(temporary, own).items():
            commit.make_folder((self.save / name).parent)
            if name in own:
                os.replace(temporary / name, self.save / name)
            elif not _take(temporary / name, self.save / name):
                continue  # another process has written it, too, and has come first
            files[name] = file
        for folder in {(self.save / name).parent for name in files} | {self.save}:
            commit.sync_folder(folder)
        name = sidecar.file_name(self.world.rank)
        said = Sidecar(self.save.name, self.world.rank, self.world.size, self.topology, files, self._replaces)
        commit.write_durably(temporary / name, said.text())
        os.replace(temporary / name, self.save / name)
        commit.sync_folder(self.save)


def _take(file: Path, place: Path) -> bool:
    """Give a file a place that nobody has taken; whether that was so."""
    try:
        os.link(file, place)
    except FileExistsError:
        return False
    except OSError:  # a disk that knows no links
        if place.exists():
            return False
        os.replace(file, place)
    return True


def _agree_on_run(target: Path, world: World, check: Callable[[Path], object]) -> str:
    """A name for the run that comes after those of earlier runs whose saves are in the folder."""

    def name() -> str:
        check(target)
        begun = time.time_ns()
        for save in sidecar.saves(target)[:1]:
            begun = max(begun, int(save.name.split("_")[2][:16], 16) + 1)
        return f"{begun:016x}{secrets.token_hex(4)}"

    return from_main(world, f"{target} was not saved", name)

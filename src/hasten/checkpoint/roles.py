"""What each process does at the two ends of a save: the only one, the main one of several, and the others."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from hasten.checkpoint import commit, sidecar
from hasten.checkpoint.leftovers import open_temporary
from hasten.checkpoint.manifest import MANIFEST, Manifest
from hasten.checkpoint.meeting import Meeting
from hasten.checkpoint.remote import RemoteFolder
from hasten.checkpoint.shares import MainShare, MemberShare
from hasten.collectives.together import in_words
from hasten.weights.stream import Written
from hasten.weights.write import FolderWriter
from hasten.world.process import World

logger = logging.getLogger(__name__)

Files = dict[str, Written]


class Transaction:
    """A save that is under way, seen by one process.

    Args:
        target: the folder that is to be written.
        temporary: where its files go until all of them are there.
        leads: whether this process puts the folder in place: the main process does, and the first one of a machine that has a
            disk of its own.
        is_main: whether this is the main process.
        remote: the folder behind a URL that gets the files, if that is what is written; `target` is only a name then.

    The process that leads calls each of `before_commit` with the temporary folder when all files are there, and each of
    `after_commit` with the final one. `share` is what this process may write of files that several write together.
    """

    def __init__(
        self, target: Path, temporary: Path, leads: bool, is_main: bool, remote: RemoteFolder | None = None
    ) -> None:
        self.target = target
        self.remote = remote
        self.temporary = temporary
        self.leads = leads
        self.is_main = is_main
        self.writer = FolderWriter(temporary)
        self.before_commit: list[Callable[[Path], object]] = []
        self.after_commit: list[Callable[[Any], object]] = []
        self.share: MainShare | MemberShare | None = None

    @property
    def place(self) -> Any:
        """Where the files are at the end: the target, or the folder behind the URL."""
        return self.target if self.remote is None else self.remote


class Role(Protocol):
    """What a process does at the two ends of a transaction."""

    transaction: Transaction

    def end(self, error: BaseException | None) -> None:
        """Put the folder in place, or give it up and raise. `error` is what the body raised on this process."""
        ...


class Alone:
    """The only process."""

    def __init__(
        self,
        target: Path,
        is_stale: Callable[[str], bool],
        check: Callable[[Any], object],
        remote: RemoteFolder | None = None,
    ) -> None:
        self.is_stale = is_stale
        check(remote or target)
        self.transaction = Transaction(target, open_temporary(target), leads=True, is_main=True, remote=remote)

    def end(self, error: BaseException | None) -> None:
        """Finish the save; see `Role`."""
        if error is not None:
            discard(self.transaction)
            return
        written, always = self.transaction.writer.written, self.transaction.remote is not None
        with discarding(self.transaction, always), sending(self.transaction, self.is_stale) as files:
            files |= _put_in_place(self.transaction, written, self.is_stale, 1, [0])
        afterwards(self.transaction)


class Main:
    """The main process of several."""

    def __init__(
        self,
        target: Path,
        is_stale: Callable[[str], bool],
        check: Callable[[Any], object],
        world: World,
        label: str,
        remote: RemoteFolder | None = None,
    ) -> None:
        self.is_stale = is_stale
        self.world = world
        self.meeting = Meeting(world)
        try:
            check(remote or target)
            temporary = open_temporary(target)
        except Exception as error:
            self.meeting.open({"label": label, "error": in_words(0, error)})
            self.meeting.close(in_words(0, error))
            raise
        self.transaction = Transaction(target, temporary, leads=True, is_main=True, remote=remote)
        self.transaction.share = self.share = MainShare(self.meeting, temporary, world.size)
        self.meeting.open({"label": label, "target": str(target), "temporary": str(temporary)})

    def end(self, error: BaseException | None) -> None:
        """Finish the save; see `Role`."""
        problem = None if error is None else in_words(0, error)
        try:
            self.meeting.announce(False)  # unless more has been said
            if error is None:
                problem = self._finish()
        except BaseException as failure:
            problem = in_words(0, failure)
            raise
        finally:
            if problem is not None:
                self.meeting.go(None)
                discard(self.transaction)
            self.meeting.close(problem)
        if self.transaction.remote is not None:
            discard(self.transaction)
        if problem is None:
            afterwards(self.transaction)
        elif error is None:
            raise RuntimeError(_given_up(self.transaction.place, problem))

    def _finish(self) -> str | None:
        others = self.meeting.assemble()
        reports = self.meeting.reports(others)
        for rank in others:
            if reports[rank]["error"] is not None:
                return str(reports[rank]["error"])
        self.transaction.writer.written |= self.share.complete(reports)
        ranks = [0, *others]
        with sending(self.transaction, self.is_stale, self.world.size, ranks) as sent:
            self.meeting.go(others)
            files = dict(self.transaction.writer.written)
            for report in reports.values():
                if report["disk"] == 0:
                    files.update(_files(report))
                else:
                    sent |= _files(report)
            sent |= _put_in_place(self.transaction, files, self.is_stale, self.world.size, ranks)
            disks = sorted({report["disk"] for report in reports.values()} - {0})
            problem = next((error for error in self.meeting.placed(disks).values() if error is not None), None)
            if problem is not None:
                sent.clear()
        return problem


class Member:
    """One of the others."""

    def __init__(
        self,
        target: Path,
        is_stale: Callable[[str], bool],
        world: World,
        label: str,
        remote: RemoteFolder | None = None,
    ) -> None:
        self.is_stale = is_stale
        self.world = world
        self.remote = remote
        self.meeting = Meeting(world)
        record, self.in_time = self.meeting.join(label)
        if "error" in record:
            raise RuntimeError(_given_up(remote or target, record["error"]))
        self.disk = 0  # the rank that puts the folder in place in which this process writes
        try:
            main = Path(record["target"])
            if record["label"] == label:  # where folders are numbered, the number of the main process counts
                target = target.with_name(main.name)
                self.remote = remote and remote.with_name(main.name)
            self.transaction = self._begin(target, main, Path(record["temporary"]))
        except BaseException as error:
            if self.in_time:
                self._report(error)
            raise

    def _begin(self, target: Path, main: Path, temporary: Path) -> Transaction:
        if not self.in_time:
            error = self.meeting.result()
            if error is not None:
                raise RuntimeError(_given_up(self.remote or target, error))
            logger.info("Rank %d: the main process has saved %s alone; adding to it.", self.world.rank, target)
            commit.make_folder(target)
            leads = self.world.is_local_main and not _sees(main)
            return Transaction(target, open_temporary(target), leads=leads, is_main=False, remote=self.remote)
        if _sees(temporary):
            opened = Transaction(target, temporary, leads=False, is_main=False, remote=self.remote)
            opened.share = MemberShare(self.meeting, temporary, self.world.rank, self.world.size)
            return opened
        if self.meeting.is_given_up():  # the folder is not elsewhere, but gone
            raise RuntimeError(_given_up(self.remote or target, str(self.meeting.result())))
        self.disk = self.world.rank - self.world.local_rank
        if self.disk != self.world.rank:
            disk = Path(self.meeting.disk_of(self.disk))
            return Transaction(target, disk, leads=False, is_main=False, remote=self.remote)
        opened = Transaction(target, open_temporary(target), leads=True, is_main=False, remote=self.remote)
        self.meeting.announce_disk(str(opened.temporary))
        return opened

    def end(self, error: BaseException | None) -> None:
        """Finish the save; see `Role`."""
        if not self.in_time:
            self._add_late(error)
            return
        self._report(error)
        if error is not None and not isinstance(error, Exception):
            return  # interrupted: do not wait for anybody
        if self.transaction.leads:
            self._place()
        result = self.meeting.result()
        gone = isinstance(error, FileNotFoundError) and not _sees(self.transaction.temporary)
        if result is not None and (error is None or gone):
            raise RuntimeError(_given_up(self.transaction.place, result)) from error
        if self.transaction.leads and result is None and self.transaction.remote is None:
            afterwards(self.transaction)

    def _report(self, error: BaseException | None) -> None:
        written = self.transaction.writer.written if error is None else {}
        files = {name: [file.size, *file.crc32] for name, file in written.items()}
        told = None if error is None else in_words(self.world.rank, error)
        share = self.transaction.share if error is None else None
        shares = share.done if isinstance(share, MemberShare) else []
        self.meeting.report({"error": told, "disk": self.disk, "files": files, "shares": shares})

    def _place(self) -> None:
        """Do for a disk of this machine what the main process does for its own."""
        error: BaseException | None = None
        try:
            present = self.meeting.may_go()
            if present is not None:
                machine = range(self.world.rank, self.world.rank + self.world.local_size)
                reports = self.meeting.reports([rank for rank in present if rank in machine])
                files = {name: file for report in reports.values() for name, file in _files(report).items()}
                _put_in_place(self.transaction, files, self.is_stale, self.world.size, list(reports))
            if present is None or self.transaction.remote is not None:
                discard(self.transaction)
        except Exception as failure:
            error = failure
            discard(self.transaction)
        self.meeting.report_placed(None if error is None else in_words(self.world.rank, error))

    def _add_late(self, error: BaseException | None) -> None:
        """Move files into a folder that is in its place already, each one whole."""
        temporary, target = self.transaction.temporary, self.transaction.target
        with discarding(self.transaction, always=True):
            if self.transaction.remote is not None:
                self.transaction.remote.send(temporary, _names(temporary) if error is None else [])
                return
            for name in _names(temporary) if error is None else []:
                commit.make_folder((target / name).parent)
                os.replace(temporary / name, target / name)
        commit.sync_folder(target)


# -- folders -------------------------------------------------------------------------------------------------------------


def _sees(folder: Path) -> bool:
    """Whether this process is on the disk of the process that made the folder."""
    return folder.is_dir()


def _put_in_place(
    transaction: Transaction, files: Files, is_stale: Callable[[str], bool], world_size: int, ranks: list[int]
) -> Files:
    """Put the files in their places; to a URL they are sent, and the manifest waits for those of other disks."""
    temporary, target = transaction.temporary, transaction.target
    for action in transaction.before_commit:
        action(temporary)
    manifest = Manifest(completed(temporary, files), world_size, tuple(ranks))
    if transaction.remote is not None:
        transaction.remote.send(temporary, manifest.files)
        return manifest.files
    commit.write_durably(temporary / MANIFEST, manifest.text())
    for folder, _, _ in os.walk(temporary, topdown=False):
        commit.sync_folder(Path(folder))
    stale = sorted(set(_replaced(target, is_stale)) - manifest.files.keys())
    commit.put_in_place(temporary, target, [*sorted(manifest.files), MANIFEST], stale)
    return manifest.files


@contextmanager
def sending(
    transaction: Transaction, is_stale: Callable[[str], bool], world_size: int = 1, ranks: Sequence[int] = (0,)
) -> Iterator[Files]:
    """Around the sending of files to a URL: until its end what is there is no checkpoint. Gives a place to list the files in."""
    remote, files = transaction.remote, Files()
    if remote is None:
        yield files
        return
    before = remote.withdraw()
    yield files
    if not files:  # some are missing
        return
    manifest = Manifest(files, world_size, tuple(ranks))
    (transaction.temporary / MANIFEST).write_text(manifest.text(), encoding="utf-8")
    remote.seal(transaction.temporary)
    there = remote.files()
    remote.remove(
        [name for name in there if name not in files and name != MANIFEST and (name in before or is_stale(name))]
    )


def afterwards(transaction: Transaction) -> None:
    """Do what is to be done when the folder is in its place; a failure of that is no failure of the save."""
    for action in transaction.after_commit:
        try:
            action(transaction.place)
        except OSError as error:
            logger.warning("%s is saved, but tidying up after it failed: %s", transaction.place, error)


def completed(temporary: Path, files: Files) -> Files:
    """Every file of the folder, synced, with size and checksums: also those that something else has put there."""
    names = _names(temporary)
    unknown = [name for name in names if name not in files or (temporary / name).stat().st_size != files[name].size]
    with FolderWriter(temporary) as writer:
        for name in unknown:
            writer.adopt(name)
    return {name: writer.written.get(name) or files[name] for name in names}


def _names(folder: Path) -> list[str]:
    found = (Path(path) / name for path, _, names in os.walk(folder) for name in names)
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _replaced(target: Path, is_stale: Callable[[str], bool]) -> list[str]:
    """Names of the earlier checkpoint in a folder: those in its manifest, and those that only a checkpoint has."""
    if not target.is_dir():
        return []
    try:
        manifest = Manifest.read(target)
    except RuntimeError:
        manifest = None
    names = [] if manifest is None else list(manifest.files)
    for save in sidecar.saves(target):
        names += [f"{save.name}/{name}" for name in _names(save)]
    return names + [entry.name for entry in os.scandir(target) if entry.is_file() and is_stale(entry.name)]


@contextmanager
def discarding(transaction: Transaction, always: bool = False) -> Iterator[None]:
    """On an error, or always, remove the temporary folder at the end."""
    done = False
    try:
        yield
        done = True
    finally:
        if always or not done:
            discard(transaction)


def discard(transaction: Transaction) -> None:
    """Remove the temporary folder."""
    shutil.rmtree(transaction.temporary, ignore_errors=True)


def _files(report: dict[str, Any]) -> Files:
    return {name: Written(size, tuple(sums)) for name, (size, *sums) in report["files"].items()}


def _given_up(target: Any, problem: str) -> str:
    kept = (
        ""
        if isinstance(target, RemoteFolder) or commit.is_interrupted(target)
        else " What was there before is still there."
    )
    return f"{target} was not saved: {problem}.{kept}"

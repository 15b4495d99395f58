"""What a disk may hold after a power cut: a recorder of what a save does to a folder, and a model of a file system.

The recorder looks at the folder before and after every call that changes names or syncs, so that it sees the writes of any
writer. Several processes may record the same folder; a lock puts their changes in one order.

The model knows what POSIX promises and no more: the content of a file is safe from its fsync on, a name from the fsync of its
folder on (that of the folder it comes to, if it is renamed). Of everything else each part may be there or not, in any
order; files may hold what they held before, the first half, or zeros in the place of some blocks. Two things are taken from the
file systems that there are: a rename is one change, and changes to the same file or folder keep their order.
"""

from __future__ import annotations

import itertools
import os
import pickle
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_CALLS = ("mkdir", "rename", "replace", "link", "unlink", "remove", "rmdir")
_BLOCK = 64  # bytes that are lost together; of a disk it would be more, but these files are small
ROOT = 0

Entry = tuple[int, str]  # a folder and a name in it
Tree = dict[str, bytes | None]  # the content of files by path; None is a folder


@dataclass(frozen=True)
class Names:
    """Names in folders change, all at once: what they stand for now, or None. They are safe when `home` is synced."""

    changes: dict[Entry, int | None]
    subject: int
    home: int
    is_folder: bool


@dataclass(frozen=True)
class Data:
    """A file has another content."""

    subject: int
    content: bytes


@dataclass(frozen=True)
class Sync:
    """A file or folder was synced."""

    subject: int
    path: str


Event = Names | Data | Sync


@dataclass
class Trace:
    """What happened to a folder.

    Args:
        names, contents: what was there before, safe on the disk.
        events: what happened then.
    """

    names: dict[Entry, int] = field(default_factory=dict)
    contents: dict[int, bytes | None] = field(default_factory=lambda: {ROOT: None})
    events: list[Event] = field(default_factory=list)

    def without(self, numbers: set[int]) -> Trace:
        """The same without some events."""
        events = [event for number, event in enumerate(self.events) if number not in numbers]
        return Trace(self.names, self.contents, events)

    def syncs(self) -> dict[int, str]:
        """Path by number of event; what is different in each save is left out of the paths."""
        return {
            number: re.sub(
                r"\.[^/]*\.partial-[^/]*", "TEMPORARY", re.sub(r"per_rank_[0-9a-f]+_0*", "save ", event.path)
            )
            for number, event in enumerate(self.events)
            if isinstance(event, Sync)
        }


# -- recording -----------------------------------------------------------------------------------------------------------


@dataclass
class _View:
    """The folder as the recorder saw it last."""

    trace: Trace = field(default_factory=Trace)
    paths: dict[str, int] = field(default_factory=dict)
    inodes: dict[int, int] = field(default_factory=dict)
    contents: dict[int, bytes | None] = field(default_factory=dict)

    def look(self, root: Path) -> None:
        """Note what has changed."""
        actual = _read(root)
        for path, (inode, content) in actual.items():
            held = self.paths.get(path)
            if held is None or self.inodes[held] != inode:
                self._appeared(path, inode, content, actual)
        for path in sorted(self.paths.keys() - actual.keys(), key=lambda path: -path.count("/")):
            self._change({self._entry(path): None}, self.paths.pop(path))
        for path, (_, content) in actual.items():
            held = self.paths[path]
            if content is not None and content != self.contents[held]:
                self.trace.events.append(Data(held, content))
                self.contents[held] = content

    def _appeared(self, path: str, inode: int, content: bytes | None, actual: dict[str, Any]) -> None:
        others = [other for other, held in self.paths.items() if self.inodes[held] == inode]
        gone = [other for other in others if other not in actual or actual[other][0] != inode]
        if gone:
            subject = self.paths[gone[0]]
            changes = {self._entry(gone[0]): None, self._entry(path): subject}
            for other in [other for other in self.paths if other == path or other.startswith(path + "/")]:
                del self.paths[other]
            for other in [other for other in self.paths if other == gone[0] or other.startswith(gone[0] + "/")]:
                self.paths[path + other[len(gone[0]) :]] = self.paths.pop(other)
        elif others:
            subject = self.paths[path] = self.paths[others[0]]
            changes = {self._entry(path): subject}
        else:
            subject = self.paths[path] = len(self.inodes) + 1
            self.inodes[subject] = inode
            self.contents[subject] = None if content is None else b""
            changes = {self._entry(path): subject}
        self._change(changes, subject)

    def _entry(self, path: str) -> Entry:
        above, _, name = path.rpartition("/")
        return (self.paths[above] if above else ROOT), name

    def _change(self, changes: dict[Entry, int | None], subject: int) -> None:
        home = list(changes)[-1][0]
        self.trace.events.append(Names(changes, subject, home, self.contents[subject] is None))

    def sync(self, inode: int, root: Path) -> bool:
        """Note that something was synced, if it is the folder or in it."""
        if inode == root.stat().st_ino:
            self.trace.events.append(Sync(ROOT, "."))
            return True
        for path, subject in self.paths.items():
            if self.inodes[subject] == inode:
                self.trace.events.append(Sync(subject, path))
                return True
        return False


def _read(root: Path) -> dict[str, tuple[int, bytes | None]]:
    """Inodes and contents by path, folders before what is in them."""
    found: dict[str, tuple[int, bytes | None]] = {}
    waiting = [""]
    while waiting:
        above = waiting.pop(0)
        for entry in sorted(os.scandir(root / above), key=lambda entry: entry.name):
            path = f"{above}/{entry.name}" if above else entry.name
            if entry.is_dir():
                waiting.append(path)
                found[path] = (entry.inode(), None)
            else:
                found[path] = (entry.inode(), Path(entry.path).read_bytes())
    return found


class Recorder:
    """Records what happens to a folder, by this process or by several at once.

    Args:
        root: the folder.
        log: a file elsewhere, where the processes put what they see.
    """

    def __init__(self, root: Path, log: Path) -> None:
        self.root = root
        self.log = log
        self._lock = threading.RLock()

    def begin(self) -> None:
        """Take what is there for safe on the disk. Only one process does so."""
        view = _View()
        view.look(self.root)
        names: dict[Entry, int] = {}
        for event in view.trace.events:
            if isinstance(event, Names):
                names |= {entry: held for entry, held in event.changes.items() if held is not None}
        view.trace = Trace(names, {ROOT: None, **view.contents})
        self.log.write_bytes(pickle.dumps(view))

    def trace(self) -> Trace:
        """What was recorded."""
        view: _View = pickle.loads(self.log.read_bytes())
        return view.trace

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what this process does."""
        before = {name: getattr(os, name) for name in (*_CALLS, "fsync")}
        for name in _CALLS:
            setattr(os, name, self._watched(before[name]))
        os.fsync = self._synced(before["fsync"])
        try:
            yield
        finally:
            for name, call in before.items():
                setattr(os, name, call)

    @contextmanager
    def _looking(self) -> Iterator[_View]:
        import fcntl

        with self._lock, open(self.log, "rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            view: _View = pickle.load(file)
            view.look(self.root)
            try:
                yield view
            finally:
                view.look(self.root)
                file.seek(0)
                file.truncate()
                pickle.dump(view, file)
                file.flush()

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._looking():
                return call(*args, **kwargs)

        return watched

    def _synced(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def synced(file: Any) -> None:
            with self._looking() as view:
                known = view.sync(os.fstat(file).st_ino, self.root)
            if not known:
                call(file)

        return synced


# -- the disk ------------------------------------------------------------------------------------------------------------


class Disk:
    """What may be on a disk when the power goes after the first events of a trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.changes: list[Names] = []
        self.unsafe: list[int] = []  # numbers of the changes that may be lost
        self.contents: dict[int, list[bytes | None]] = {key: [value] for key, value in trace.contents.items()}

    def go_on(self, event: Event) -> None:
        """Take in one more event."""
        if isinstance(event, Names):
            self.unsafe.append(len(self.changes))
            self.changes.append(event)
            self.contents.setdefault(event.subject, [None if event.is_folder else b""])
        elif isinstance(event, Data):
            self.contents[event.subject].append(event.content)
        else:
            del self.contents[event.subject][:-1]
            synced = [number for number in self.unsafe if self.changes[number].home == event.subject]
            safe = {self.changes[number].subject: number for number in synced}
            self.unsafe = [each for each in self.unsafe if each > safe.get(self.changes[each].subject, -1)]

    def states(self, draw: random.Random, samples: int) -> Iterator[Tree]:
        """What may be on the disk now: the extremes, each change alone lost or kept, and some at random."""
        every = set(self.unsafe)
        choices = [set(), every]
        for number in self.unsafe:
            choices += [every - {number}, {number}]
        contents = [self._oldest, self._newest, self._half, self._zeros]
        yield from (self._tree(names, held) for names in choices[:2] for held in contents)
        yield from (self._tree(names, self._newest) for names in choices[2:])
        dirty = [subject for subject, versions in self.contents.items() if len(versions) > 1]
        for subject, other in itertools.product(dirty, contents):
            yield self._tree(
                every, lambda each, subject=subject, other=other: (other if each == subject else self._newest)(each)
            )
        for _ in range(samples if every or dirty else 0):
            names = {number for number in self.unsafe if draw.random() < 0.5}
            yield self._tree(names, lambda each: self._any(each, draw))

    def _tree(self, kept: set[int], content: Callable[[int], bytes | None]) -> Tree:
        kept = self._in_order(kept)
        names: dict[Entry, int | None] = dict(self.trace.names)
        for number, change in enumerate(self.changes):
            if number in kept or number not in self.unsafe:
                names |= change.changes
        below: dict[int, list[tuple[str, int]]] = {}
        for (folder, name), held in names.items():
            if held is not None:
                below.setdefault(folder, []).append((name, held))
        tree: Tree = {}
        waiting = [("", ROOT)]
        while waiting:
            above, folder = waiting.pop()
            for name, held in below.get(folder, ()):
                path = f"{above}/{name}" if above else name
                tree[path] = content(held)
                waiting.append((path, held))
        return tree

    def _in_order(self, kept: set[int]) -> set[int]:
        """Without those of which an earlier one to the same file or folder is lost."""
        lost: set[int] = set()
        found = set()
        for number in self.unsafe:
            subject = self.changes[number].subject
            if number in kept and subject not in lost:
                found.add(number)
            else:
                lost.add(subject)
        return found

    def _oldest(self, held: int) -> bytes | None:
        return self.contents[held][0]

    def _newest(self, held: int) -> bytes | None:
        return self.contents[held][-1]

    def _half(self, held: int) -> bytes | None:
        old, new = self._oldest(held), self._newest(held)
        return new if new is None or old == new else new[: len(new) // 2]

    def _zeros(self, held: int) -> bytes | None:
        old, new = self._oldest(held), self._newest(held)
        return new if new is None or old == new else bytes(len(new))

    def _any(self, held: int, draw: random.Random) -> bytes | None:
        versions = self.contents[held]
        new = versions[-1]
        if new is None or len(versions) == 1:
            return new
        blocks = [new[at : at + _BLOCK] for at in range(0, len(new), _BLOCK)]
        holes = b"".join(block if draw.random() < 0.5 else bytes(len(block)) for block in blocks)
        return draw.choice([*versions, self._half(held), self._zeros(held), holes])


def states(trace: Trace, samples: int = 2, seed: int = 0) -> Iterator[tuple[int, Tree]]:
    """Every state of the disk that a power cut may leave, with the number of events before it; each state once.

    What is in folders that are only being written counts as one state: nobody may read it.
    """
    disk, draw = Disk(trace), random.Random(seed)
    seen: set[Any] = set()
    for number in range(len(trace.events) + 1):
        ended = number == len(trace.events)
        for tree in disk.states(draw, samples):
            key = (ended, frozenset((path, content) for path, content in tree.items() if ".partial-" not in path))
            if key not in seen:
                seen.add(key)
                yield number, tree
        if not ended:
            disk.go_on(trace.events[number])


def put(tree: Tree, root: Path) -> None:
    """Make a folder with this content."""
    root.mkdir(parents=True)
    for path, content in sorted(tree.items()):
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)

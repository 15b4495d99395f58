"""Files that several processes write together: each one a range of their bytes.

Where every process holds whole models, the large files could be written by any of them. Those that take part in a save and see the
main process's folder write a share each; the main process writes its own, and what nobody else has written: shares of processes
that did not come, that write elsewhere, or that hold other values. That they hold the same is not taken on trust: processes may
train apart (local SGD), and a model may not be replicated at all. The main process computes the checksums of all bytes from its own
values, as the manifest needs them anyway; what others report must agree, or it writes these bytes once more. So a file is
what the main process alone would have written, to the bit.

The main process makes the files in their full size, puts a plan beside them, and tells the others so by a key in the store of the
meeting. The plan holds what lies between the large tensors: headers and small tensors, such as the running means of which
processes may have different values. Nobody needs to know who else takes part: ranges depend on sizes and the number of processes
only. They are cut at multiples of `UNIT`, since over a network two machines must not write to the same page of a file.
"""

from __future__ import annotations

import bisect
import json
import logging
import os
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, BinaryIO

from hasten.checkpoint.meeting import Meeting
from hasten.weights.image import LARGE, Image, Range
from hasten.weights.stream import AHEAD, BLOCK, SYNC_EVERY, Workers, Written, crc32_of

logger = logging.getLogger(__name__)

UNIT = 1 << 20
LEAST = 32 << 20  # bytes; the main process writes less than that alone
_PLAN = ".shares"

Images = Mapping[str, Image]


@dataclass(frozen=True)
class Segment:
    """Bytes of a file, at most a block, and which rank writes them."""

    name: str
    start: int
    stop: int
    rank: int


def divided(sizes: Mapping[str, int], ranks: int) -> list[Segment]:
    """Cut files into segments, by blocks, so that each rank gets the same number of bytes up to `UNIT`."""
    total, base = sum(sizes.values()), 0
    found: list[Segment] = []
    cuts: list[int] = []  # counted through all files; rank r writes from cut r - 1 to cut r
    for size in sizes.values():
        wanted = [total * rank // ranks - base for rank in range(1, ranks)]
        cuts += [base + min(size, round(cut / UNIT) * UNIT) for cut in wanted if 0 <= cut < size]
        base += size
    base = 0
    for name, size in sizes.items():
        inside = {cut - base for cut in cuts if base < cut < base + size}
        points = sorted({*range(0, size, BLOCK), *inside, size})
        for start, stop in pairwise(points):
            found.append(Segment(name, start, stop, bisect.bisect_right(cuts, base + start)))
        base += size
    return found


class MainShare:
    """What the main process does: it writes the plan and its share, and in the end what is missing.

    Args:
        meeting: that of the save.
        folder: where the files go.
        ranks: the number of processes.
    """

    def __init__(self, meeting: Meeting, folder: Path, ranks: int) -> None:
        self._meeting = meeting
        self._folder = folder
        self._ranks = ranks
        self._images: Images = {}
        self._segments: list[Segment] = []
        self._sums = Sums()

    def write(self, images: Callable[[], Images]) -> Collection[str]:
        """Write this process's share, if the files are to be shared. Returns their names; the others are still to be written.

        Args:
            images: gives the large files by name. Their tensors must not change before the end of the save.
        """
        chosen = self._chosen(images)
        self._meeting.announce(bool(chosen))
        if not chosen:
            return ()
        self._images = chosen
        self._segments = divided({name: image.size for name, image in chosen.items()}, self._ranks)
        own = [segment for segment in self._segments if segment.rank == 0]
        self._sums = _write(self._folder, chosen, self._segments, own)
        return chosen.keys()

    def complete(self, reports: Mapping[int, Any]) -> dict[str, Written]:
        """Write what the others have not written, or not with the same values. Returns what is to be known of the files.

        Args:
            reports: by rank, what the others have reported, with their `done` as "shares".

        Raises:
            OSError: these bytes could not be written.
        """
        if not self._images:
            return {}
        told = {(name, start): crc for each in reports.values() for name, start, crc in each.get("shares", ())}
        missing = [
            each
            for each in self._segments
            if each.rank != 0 and told.get((each.name, each.start)) != self._sums.of[each]
        ]
        self._note(missing, told)
        if missing:
            again = _write(self._folder, self._images, missing, missing)
            if any(again.of[each] != self._sums.of[each] for each in missing):
                raise RuntimeError("tensors have changed while they were saved: let no other thread train meanwhile")
        (self._folder / _PLAN).unlink()
        self._images = {}
        return self._sums.files

    def _chosen(self, images: Callable[[], Images]) -> Images:
        """The files to share, made in their full size, with the plan beside them; none if that is not worthwhile."""
        chosen = _tried(images)
        if not chosen or not self._meeting.has_company():
            return {}
        for name, image in chosen.items():
            with open(self._folder / name, "wb") as file:
                file.truncate(image.size)
        Plan.of(chosen).write(self._folder / _PLAN)
        return chosen

    def _note(self, missing: Iterable[Segment], told: Mapping[tuple[str, int], int]) -> None:
        different = [each for each in missing if (each.name, each.start) in told]
        if not different:
            return
        logger.info(
            "Ranks %s hold other values than the main process, which has written its own.",
            sorted({each.rank for each in different}),
        )
        if 2 * len(different) > len(told):
            self._meeting.write_alone()


class MemberShare:
    """What another process does that sees the main process's folder: it writes its share, if it has the same tensors.

    Args:
        meeting: that of the save.
        folder: where the files go.
        rank, ranks: this process, and the number of processes.
    """

    def __init__(self, meeting: Meeting, folder: Path, rank: int, ranks: int) -> None:
        self._meeting = meeting
        self._folder = folder
        self._rank = rank
        self._ranks = ranks
        self._images: Callable[[], Images] = dict
        self.done: list[tuple[str, int, int]] = []  # file, first byte and checksum of what was written

    def take(self, images: Callable[[], Images], copy: bool) -> None:
        """Note what this process could write; with `copy` copy its share of it into host memory, and let go of the rest."""
        self._images = images
        if copy:
            found = _tried(images)
            own = self._own({name: image.size for name, image in found.items()})
            copies = {name: image.copied(_ranges(own, name)) for name, image in found.items()}
            self._images = lambda: copies

    def write(self) -> None:
        """Write this process's share, when the main process has said that files are shared.

        Raises:
            OSError: it could not be written.
            RuntimeError: the main process says nothing.
        """
        if self._meeting.is_shared():
            with suppress(FileNotFoundError):  # given up already, or not seen; nothing of this process is missing then
                self._write()
        self._images = dict

    def _write(self) -> None:
        plan, images = Plan.read(self._folder / _PLAN), _tried(self._images)
        if plan.sizes != {name: image.size for name, image in images.items()}:
            return
        same = {name: image for name, image in images.items() if image.large == plan.large[name]}
        own = [each for each in self._own(plan.sizes) if each.name in same]
        complete = {name: image.with_small(plan.small[name]) for name, image in same.items()}
        sums = _write(self._folder, complete, own, own)
        self.done = [(each.name, each.start, crc) for each, crc in sums.of.items()]

    def _own(self, sizes: Mapping[str, int]) -> list[Segment]:
        return [each for each in divided(sizes, self._ranks) if each.rank == self._rank]


@dataclass
class Plan:
    """What the main process tells the others: by file where large tensors are, and all bytes between them."""

    sizes: dict[str, int]
    large: dict[str, list[Range]]
    small: dict[str, bytes]

    @classmethod
    def of(cls, images: Images) -> Plan:
        """That of these files."""
        items = images.items()
        return cls(
            {name: image.size for name, image in items},
            {name: image.large for name, image in items},
            {name: image.small() for name, image in items},
        )

    def write(self, path: Path) -> None:
        """Write it to a file."""
        lengths = {name: len(small) for name, small in self.small.items()}
        header = json.dumps([self.sizes, self.large, lengths]).encode()
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            for small in self.small.values():
                file.write(small)

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read it from a file."""
        with open(path, "rb") as file:
            [length] = struct.unpack("<Q", file.read(8))
            sizes, large, lengths = json.loads(file.read(length))
            small = {name: file.read(count) for name, count in lengths.items()}
        return cls(sizes, {name: [(start, stop) for start, stop in ranges] for name, ranges in large.items()}, small)


@dataclass
class Sums:
    """Checksums of segments, and of files all of whose segments were given."""

    of: dict[Segment, int] = field(default_factory=dict)
    files: dict[str, Written] = field(default_factory=dict)


def _tried(images: Callable[[], Images]) -> Images:
    """The large files; none if they are not worth to be shared, or hold what can not be taken apart."""
    try:
        found = {name: image for name, image in images().items() if image.size >= UNIT}
    except Exception as error:  # whoever writes such a file alone says what is wrong with it
        logger.debug("Not shared: %s", error)
        return {}
    return found if sum(image.size for image in found.values()) >= LEAST else {}


def _ranges(segments: Iterable[Segment], name: str) -> list[Range]:
    return [(each.start, each.stop) for each in segments if each.name == name]


def _write(folder: Path, images: Images, segments: Sequence[Segment], own: Iterable[Segment]) -> Sums:
    """Write the segments that are one's own, and checksum all that are given; at the end they are on the disk."""
    owned, sums = set(own), Sums()
    waiting: list[tuple[list[Segment], Future[tuple[int, list[int]]]]] = []
    syncs: list[Future[None]] = []
    with ExitStack() as files, closing(Workers(spared=0)) as workers:
        for name, of_file in groupby(segments, key=lambda each: each.name):
            file: BinaryIO = files.enter_context(open(folder / name, "r+b", buffering=0))
            for number, (_, group) in enumerate(groupby(of_file, key=lambda each: each.start // BLOCK)):
                block = list(group)
                parts = [images[name].parts(each.start, each.stop) for each in block]
                for segment, pieces in zip(block, parts, strict=True):
                    if segment in owned:
                        _write_at(file, segment.start, pieces)
                waiting.append((block, workers.sums.submit(_checksums, parts)))
                if len(waiting) > AHEAD:
                    waiting[-AHEAD][1].result()
                if number % SYNC_EVERY == SYNC_EVERY - 1 and all(sync.done() for sync in syncs):
                    syncs.append(workers.syncs.submit(os.fsync, file.fileno()))  # the disk shall work meanwhile
            syncs.append(workers.syncs.submit(os.fsync, file.fileno()))
        for sync in syncs:
            sync.result()
        blocks: dict[str, list[int]] = {}
        for block, future in waiting:
            whole, each = future.result()
            sums.of.update(zip(block, each, strict=True))
            blocks.setdefault(block[0].name, []).append(whole)
    sums.files = {name: Written(images[name].size, tuple(found)) for name, found in blocks.items()}
    return sums


def _write_at(file: BinaryIO, start: int, parts: Iterable[memoryview]) -> None:
    file.seek(start)
    small = bytearray()
    for part in parts:
        if len(part) < LARGE:
            small += part
        else:
            _write_all(file, memoryview(bytes(small)))
            small.clear()
            _write_all(file, part)
    _write_all(file, memoryview(bytes(small)))


def _write_all(file: BinaryIO, view: memoryview) -> None:
    while len(view):
        view = view[file.write(view) :]


def _checksums(segments: Sequence[Sequence[memoryview]]) -> tuple[int, list[int]]:
    """CRC-32 of a block, and of each of the segments that make it up."""
    whole = crc32_of(segments[0])
    found = [whole]
    for parts in segments[1:]:
        whole = crc32_of(parts, whole)
        found.append(crc32_of(parts))
    return whole, found

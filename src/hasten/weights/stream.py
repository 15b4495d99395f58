"""Files that are written once, checksummed and made durable while the writer already goes on."""

from __future__ import annotations

import bisect
import logging
import os
import time
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hasten.weights.memory import bytes_of

_logger = logging.getLogger(__name__)

BLOCK = 16 << 20  # bytes under one checksum: several threads can share the work, and damage is located
AHEAD = 16  # blocks that may wait for their checksum
SYNC_EVERY = 4  # blocks
_TELL_S = 10.0  # between two lines of the log about a long save
_SMALL = 1 << 16  # below this, collecting the bytes costs less than a call of the operating system for each piece


@dataclass(frozen=True)
class Written:
    """Size of a file in bytes, and the CRC-32 of each `BLOCK` bytes of it."""

    size: int
    crc32: tuple[int, ...]


class Workers:
    """The threads that checksum and sync files in the background. Close them when the files are written.

    Args:
        spared: cores that are left to others. Checksums are computed at about the speed of a disk, so a writer needs one.
    """

    def __init__(self, spared: int = 1) -> None:
        self.sums = ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 2) - spared)), "hasten-checksum")
        self.syncs = ThreadPoolExecutor(2, "hasten-fsync")
        self._begin = self._told = time.monotonic()
        self._bytes = 0

    def wrote(self, count: int, path: Path) -> None:
        """Note bytes that have been written; of what takes long, the log hears now and then."""
        self._bytes += count
        now = time.monotonic()
        if now - self._told > _TELL_S:
            self._told = now
            _logger.info("%.1f GB written in %d s, now %s.", self._bytes / 1e9, now - self._begin, path.name)

    def close(self) -> None:
        """Wait for what runs, drop what does not, end the threads."""
        self.sums.shutdown(cancel_futures=True)
        self.syncs.shutdown(cancel_futures=True)


class Stream:
    """A new file that takes bytes from front to back, also from `torch.save`.

    As a context: at the end the file is closed and synced in the background, and `written` becomes a future of its size and
    checksums; on an error it is closed as it is.

    Args:
        path: the file to make; an existing one is replaced by an empty one first.
        workers: the background threads.
        holding: the object whose tensors are being written. It is kept until `written` is done, and its tensors' memory is
            checksummed in place; anything else is copied first. Nothing in it may change until then.
        lean: let go of each tensor as soon as it is written, at the price of waiting for its checksum.
    """

    def __init__(self, path: Path, workers: Workers, holding: Any = None, lean: bool = False) -> None:
        self._path = path
        self._workers = workers
        self._holding = holding
        self._lean = lean
        self._held = sorted(_host_memory(holding))
        self._file: BinaryIO = open(path, "wb", buffering=0)  # noqa: SIM115 - closed in __exit__ or by the syncing thread
        self._small = bytearray()  # short pieces that are not in the file yet
        self._parts: list[Any] = []  # the pieces of the block that is being filled
        self._filled = 0
        self._sums: list[Future[int]] = []
        self._syncs: list[Future[None]] = []
        self._size = 0
        self.written: Future[Written]

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self._append_small()
            self._end_block()
            self.written = self._workers.syncs.submit(self._settle)
            return
        # The memory under the sums may go as soon as the error is handled, and the file is to be closed.
        background: list[Future[Any]] = [*self._sums, *self._syncs]
        for future in background:
            if not future.cancel():
                future.exception()
        self.close()

    def write(self, data: Any) -> int:
        """Append bytes that may be gone after the call, unless they lie in the memory of the object that is held."""
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        if len(view) < _SMALL:
            self._small += view
            if len(self._small) >= _SMALL:
                self._append_small()
        else:
            self._append_small()
            self._append(view, steady=self._is_held(view))
        return len(view)

    def write_tensor(self, tensor: torch.Tensor) -> None:
        """Append the values of a contiguous CPU tensor. It is kept until they are checksummed, and must not change until then."""
        if tensor.numel() == 0:
            return
        view = memoryview(bytes_of(tensor))
        if len(view) < _SMALL:
            self.write(view)
        else:
            self._append_small()
            self._append(view, steady=True)
            if self._lean:
                self._parts = [bytes(part) for part in self._parts]  # less than a block
                for future in self._sums[-AHEAD:]:
                    future.result()

    def close(self) -> None:
        """Close the file as it is."""
        self._file.close()

    def flush(self) -> None:
        """Do nothing: everything is written in the end. `torch.save` calls it."""

    def _append_small(self) -> None:
        if self._small:
            self._append(memoryview(bytes(self._small)), steady=True)
            self._small.clear()

    def _append(self, view: memoryview, steady: bool) -> None:
        start = 0
        while start < len(view):
            part = view[start : start + BLOCK - self._filled]
            self._write_all(part)
            self._parts.append(part if steady else bytes(part))
            self._filled += len(part)
            start += len(part)
            if self._filled == BLOCK:
                self._end_block()

    def _write_all(self, view: memoryview) -> None:
        while len(view):
            count = self._file.write(view)
            self._size += count
            view = view[count:]

    def _end_block(self) -> None:
        if not self._parts:
            return
        if len(self._sums) >= AHEAD:
            # The pieces that wait for their checksum are in memory: a writer that is faster must wait for them.
            self._sums[-AHEAD].result()
        self._sums.append(self._workers.sums.submit(crc32_of, self._parts))
        self._workers.wrote(self._filled, self._path)
        self._parts, self._filled = [], 0
        if len(self._sums) % SYNC_EVERY == 0 and all(future.done() for future in self._syncs):
            # The disk shall work while there is more to write.
            self._syncs.append(self._workers.syncs.submit(os.fsync, self._file.fileno()))

    def _settle(self) -> Written:
        with self._file:
            for future in self._syncs:  # an error is reported once: the last sync may not know of it
                future.result()
            os.fsync(self._file.fileno())
        written = Written(self._size, tuple(future.result() for future in self._sums))
        self._holding = None
        return written

    def _is_held(self, view: memoryview) -> bool:
        if not self._held:
            return False
        import numpy as np

        start = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        place = bisect.bisect_right(self._held, (start, float("inf"))) - 1
        return place >= 0 and start + len(view) <= self._held[place][1]


def crc32_of(parts: Iterable[Any], value: int = 0) -> int:
    """CRC-32 of some pieces of memory, one after the other, going on from that of what was before."""
    for part in parts:
        value = zlib.crc32(part, value)
    return value


def _host_memory(item: Any) -> set[tuple[int, int]]:
    """Start and end of the memory of every CPU tensor in a nested object."""
    found: set[tuple[int, int]] = set()
    seen: set[int] = set()
    waiting = [item]
    while waiting:
        item = waiting.pop()
        if type(item) in (torch.Tensor, torch.nn.Parameter):
            if item.device.type == "cpu" and item.layout == torch.strided:
                storage = item.untyped_storage()
                found.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        elif isinstance(item, (Mapping, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            waiting.extend(item.values() if isinstance(item, Mapping) else item)
    return found


def checksum_file(path: Path, workers: Workers) -> Written:
    """Size and checksums of a file that is there already."""
    size = path.stat().st_size
    sums = [workers.sums.submit(block_crc32, path, start) for start in range(0, size, BLOCK)]
    return Written(size, tuple(future.result() for future in sums))


def block_crc32(path: Path, start: int) -> int:
    """CRC-32 of the `BLOCK` bytes, or as many as there are, from byte `start` of a file."""
    value, left = 0, BLOCK
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while left and (chunk := file.read(min(left, 1 << 20))):
            value = zlib.crc32(chunk, value)
            left -= len(chunk)
    return value

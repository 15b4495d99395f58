"""Pieces of files that are read straight into memory, several at a time."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from hasten.weights.memory import bytes_of

_PIECE = 8 << 20  # bytes that one thread reads at a time
_THREADS = 4


@dataclass
class Reads:
    """Collects what is to be read, and reads it. One thread copies from the cache of the system at half of what memory can do."""

    _pieces: list[tuple[str, int, memoryview]] = field(default_factory=list)

    def add(self, path: str | os.PathLike[str], start: int, target: torch.Tensor) -> None:
        """Read the bytes of a plain tensor from a place in a file. Nothing may use the tensor before `run`."""
        if target.numel():
            view = memoryview(bytes_of(target))
            for first in range(0, len(view), _PIECE):
                self._pieces.append((os.fspath(path), start + first, view[first : first + _PIECE]))

    def run(self) -> None:
        """Read what has been added.

        Raises:
            OSError: a file can not be read.
            RuntimeError: a file ends too early.
        """
        pieces, self._pieces = self._pieces, []
        threads = min(
            _THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        )
        if len(pieces) < 2 or threads < 2:
            _read(pieces)
            return
        # Neighbours go to one thread: of each file it reads one range.
        shares = [
            pieces[len(pieces) * part // threads : len(pieces) * (part + 1) // threads] for part in range(threads)
        ]
        with ThreadPoolExecutor(threads, "hasten-read") as pool:
            for done in [pool.submit(_read, share) for share in shares]:
                done.result()


def _read(pieces: list[tuple[str, int, memoryview]]) -> None:
    opened: Any = None
    try:
        for path, start, view in pieces:
            if opened is None or opened.name != path:
                if opened is not None:
                    opened.close()
                opened = open(path, "rb", buffering=0)  # noqa: SIM115 - closed below
            read_at(opened, start, view)
    finally:
        if opened is not None:
            opened.close()


def read_at(file: Any, start: int, view: memoryview) -> None:
    """Fill memory from a place in an unbuffered file.

    Raises:
        RuntimeError: the file ends too early.
    """
    file.seek(start)
    while len(view):
        count = file.readinto(view)
        if not count:
            raise RuntimeError(f"{file.name} ends too early: it is damaged.")
        view = view[count:]

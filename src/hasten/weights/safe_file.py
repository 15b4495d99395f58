"""A safetensors file that is open for reading: its tensors by name, into new memory or into that of other tensors."""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from hasten.weights.dtypes import DTYPES
from hasten.weights.memory import bytes_of
from hasten.weights.reads import Reads, read_at

_LONGEST_HEADER = 100 << 20  # as the format's own library has it


@dataclass(frozen=True)
class Entry:
    """Type and shape of a tensor, and where its bytes are in the file."""

    dtype: torch.dtype
    shape: torch.Size
    start: int
    end: int


class SafeFile:
    """A safetensors file. Use it as a context.

    Args:
        path: the file.

    Raises:
        FileNotFoundError: there is no such file.
        RuntimeError: the file is damaged, or of another format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        self._file: BinaryIO = open(path, "rb", buffering=0)  # noqa: SIM115 - closed in __exit__
        try:
            self.entries, self.metadata = self._header()
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            self._file.close()
            raise RuntimeError(
                f"{path} is not a readable safetensors file: {error}. It is damaged, or of another format."
            ) from error

    def __enter__(self) -> SafeFile:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._file.close()

    def read(self, name: str) -> torch.Tensor:
        """A tensor on the CPU, in new memory."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self._fill(tensor, entry)
        return tensor

    def read_into(self, name: str, target: torch.Tensor, reads: Reads | None = None) -> None:
        """Read a tensor into the memory of a contiguous CPU tensor of its type and shape; later, with `reads`."""
        entry = self.entries[name]
        assert (target.dtype, target.shape) == (entry.dtype, entry.shape), name
        if reads is None:
            self._fill(target, entry)
        else:
            reads.add(self.path, entry.start, target)

    def read_part(
        self, name: str, starts: Sequence[int], sizes: Sequence[int], into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A part of a tensor on the CPU; nothing else is read.

        Args:
            name: the tensor.
            starts: where the part begins along each dimension.
            sizes: how long it is along each dimension.
            into: a contiguous CPU tensor of its type and size to read into; new memory by default.
        """
        entry = self.entries[name]
        part = torch.empty(tuple(sizes), dtype=entry.dtype) if into is None else into
        assert (part.dtype, tuple(part.shape)) == (entry.dtype, tuple(sizes)), name
        if not part.numel():
            return part
        view = memoryview(bytes_of(part))
        done = 0
        for start, length in _runs(entry, starts, sizes):
            self._read_at(start, view[done : done + length])
            done += length
        return part

    def _fill(self, target: torch.Tensor, entry: Entry) -> None:
        if target.numel():
            self._read_at(entry.start, memoryview(bytes_of(target)))

    def _read_at(self, start: int, view: memoryview) -> None:
        read_at(self._file, start, view)

    def _header(self) -> tuple[dict[str, Entry], dict[str, str]]:
        size = os.fstat(self._file.fileno()).st_size
        begins = self._file.read(8)
        if begins == b"version ":
            raise ValueError("it is a pointer of Git LFS, whose file has not been fetched (`git lfs pull`)")
        (length,) = struct.unpack("<Q", begins)
        if length > min(size - 8, _LONGEST_HEADER):
            raise ValueError(f"its header should have {length} bytes, the whole file has {size}")
        content = json.loads(self._file.read(length))
        metadata = content.pop("__metadata__", {})
        begin = 8 + length
        entries = {}
        for name, entry in content.items():
            start, end = entry["data_offsets"]
            shape, dtype = torch.Size(entry["shape"]), DTYPES[entry["dtype"]]
            if not 0 <= start <= end <= size - begin or end - start != shape.numel() * dtype.itemsize:
                raise ValueError(f"{name!r} lies at {start} to {end} of {size - begin} bytes")
            entries[name] = Entry(dtype, shape, begin + start, begin + end)
        return entries, metadata


def _runs(entry: Entry, starts: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Position and length, in bytes, of the pieces of a part that lie together in the file, in their order."""
    shape = entry.shape
    inner = len(shape)  # the dimensions from here on are whole, so that they lie together
    while inner and (starts[inner - 1], sizes[inner - 1]) == (0, shape[inner - 1]):
        inner -= 1
    outer = max(inner - 1, 0)  # of this one a range lies together
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    length = math.prod(sizes[outer:]) * entry.dtype.itemsize
    first = sum(start * step for start, step in zip(starts[outer:], steps[outer:], strict=True))
    for place in itertools.product(
        *(range(start, start + size) for start, size in zip(starts[:outer], sizes, strict=False))
    ):
        offset = first + sum(index * step for index, step in zip(place, steps, strict=False))
        yield entry.start + offset * entry.dtype.itemsize, length

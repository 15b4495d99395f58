"""A safetensors file that is open for reading: its tensors by name, into new memory or into that of other tensors."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from hasten.weights.dtypes import DTYPES
from hasten.weights.memory import bytes_of

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

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Read a tensor into the memory of a contiguous CPU tensor of its type and shape."""
        entry = self.entries[name]
        assert (target.dtype, target.shape) == (entry.dtype, entry.shape), name
        self._fill(target, entry)

    def _fill(self, target: torch.Tensor, entry: Entry) -> None:
        if not target.numel():
            return
        view = memoryview(bytes_of(target))
        self._file.seek(entry.start)
        while len(view):
            count = self._file.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise RuntimeError(f"{self.path} ends too early: it is damaged.")
            view = view[count:]

    def _header(self) -> tuple[dict[str, Entry], dict[str, str]]:
        size = os.fstat(self._file.fileno()).st_size
        (length,) = struct.unpack("<Q", self._file.read(8))
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

"""Writing tensors and other objects into the files of one folder."""

from __future__ import annotations

import io
import json
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from hasten.weights.dtypes import CODES
from hasten.weights.stream import Stream, Workers, Written, checksum_file


class FolderWriter:
    """Writes files into a folder. As a context: at its end every file is complete and on the disk.

    On an error the files are left as they are. The objects that are written must not change before the end of the context.

    Args:
        folder: the folder.
        lean: keep no more than one tensor in memory at a time, where they are read one by one; it takes a little longer.
    """

    def __init__(self, folder: Path, lean: bool = False) -> None:
        self.folder = folder
        self._lean = lean
        self.written: dict[str, Written] = {}
        self._workers = Workers()
        self._pending: dict[str, Future[Written]] = {}
        self._streams: list[Stream] = []

    def __enter__(self) -> FolderWriter:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if error is None:
                self.settle()
        finally:
            self._workers.close()
            for stream in self._streams:
                stream.close()

    def settle(self) -> None:
        """Wait until every file is on the disk, and fill `written`, which has size and checksums by name.

        Raises:
            OSError: a file could not be synced.
        """
        while self._pending:
            name, future = self._pending.popitem()
            self.written[name] = future.result()

    @contextmanager
    def stream(self, name: str, holding: Any = None) -> Iterator[Stream]:
        """A new file to write to; see `Stream`."""
        with Stream(self.folder / name, self._workers, holding, self._lean) as stream:
            self._streams.append(stream)
            yield stream
        self._pending[name] = stream.written

    def save_safetensors(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        metadata: dict[str, str] | None = None,
        read: Callable[[str], torch.Tensor] | None = None,
    ) -> None:
        """Write tensors in the safetensors format, one after the other, without a copy of those in host memory.

        Tensors must not share memory; see `names.without_shared`. The metadata is {"format": "pt"} by default. With `read`, only
        types and shapes of `tensors` count, which may be on the meta device; it gives their values, called with one name after
        the other in the order of `in_file_order`.

        Raises:
            TypeError: a value is not a dense tensor, or of a type that the format does not know.
            OSError: the file can not be written.
        """
        if read is None:
            check_dense(tensors)
        header, order = safetensors_header(tensors, {"format": "pt"} if metadata is None else metadata)
        read = tensors.__getitem__ if read is None else read
        with self.stream(name) as stream:
            if sys.byteorder == "big":
                import safetensors.torch

                stream.write(safetensors.torch.save({key: read(key) for key in order}, metadata or {"format": "pt"}))
                return
            stream.write(header)
            for key in order:
                stream.write_tensor(read(key).detach().cpu().resolve_conj().contiguous())

    def save_torch(self, name: str, item: Any) -> None:
        """Write an object with `torch.save`, or what `serialized` has made of one.

        Raises:
            OSError: the file can not be written.
        """
        if isinstance(item, Serialized):
            with self.stream(name) as stream:
                stream.write(item.content)
            return
        with self.stream(name, holding=item) as stream, without_zip_checksums():
            try:
                torch.save(item, cast(Any, stream))
            except RuntimeError as error:
                # torch's writer reports a failing write as its own, with the cause behind it.
                raise _cause(error) from error

    def save_text(self, name: str, text: str) -> None:
        """Write a text file."""
        with self.stream(name) as stream:
            stream.write(text.encode())

    def adopt(self, name: str) -> None:
        """Sync and checksum a file that something else wrote into the folder."""
        self._pending[name] = self._workers.syncs.submit(self._adopted, self.folder / name)

    def _adopted(self, path: Path) -> Written:
        with open(path, "rb+" if os.name == "nt" else "rb") as file:
            os.fsync(file.fileno())
        return checksum_file(path, self._workers)


@dataclass(frozen=True)
class Serialized:
    """What a file of `torch.save` holds."""

    content: bytes


def serialized(item: Any) -> Serialized:
    """What `FolderWriter.save_torch` would write of an object, as it is now."""
    buffer = io.BytesIO()
    with without_zip_checksums():
        torch.save(item, buffer)
    return Serialized(buffer.getvalue())


def in_file_order(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The order in which a safetensors file holds tensors: the widest types first, so that every tensor is aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def safetensors_header(tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> tuple[bytes, list[str]]:
    """What a safetensors file begins with, and the order in which the tensors follow."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    order = in_file_order(tensors)
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, order


def check_dense(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise if a safetensors file can not hold these.

    Raises:
        TypeError: names the first value that is not a dense tensor, or of a type that the format does not know.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"safetensors files hold tensors only, but {name!r} is a {type(tensor).__name__}.")
        if hasattr(tensor, "full_tensor"):
            raise TypeError(
                f"{name!r} is sharded over several processes. Save whole tensors, as `get_state_dict` gives them."
            )
        if tensor.is_meta or tensor.layout != torch.strided or tensor.dtype not in CODES:
            kind = "on the meta device, without values" if tensor.is_meta else f"{tensor.layout}, {tensor.dtype}"
            raise TypeError(
                f"safetensors files can not hold {name!r}: it is {kind}. Convert it, or use `safe_serialization=False`."
            )


@contextmanager
def without_zip_checksums() -> Iterator[None]:
    """Let `torch.save` leave out the checksums inside its file: the manifest has better ones, which cost no time."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _cause(error: BaseException) -> BaseException:
    """What was raised first, where torch's own error came on top of it."""
    seen = error
    while isinstance(seen, RuntimeError) and (below := seen.__cause__ or seen.__context__):
        seen = below
    return seen

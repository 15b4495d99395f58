"""What a file will hold, byte for byte, before it is written: so that several processes can write parts of it."""

from __future__ import annotations

import bisect
import io
import pickle
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hasten.weights.memory import bytes_of
from hasten.weights.torch_file import start_of
from hasten.weights.write import check_dense, safetensors_header, without_zip_checksums
from hasten.world import torch_private

LARGE = 1 << 16  # bytes from which on a tensor is one of the large ones

Range = tuple[int, int]  # the first byte, and the one after the last


@dataclass(frozen=True)
class Piece:
    """Some bytes of a file: where they begin and end, and what they are; a tensor stands for its values, one after the other."""

    start: int
    stop: int
    source: bytes | torch.Tensor

    def on_host(self, start: int, stop: int) -> memoryview:
        """Those of its bytes that lie in a range of the file; of a tensor elsewhere only these are copied to the host."""
        first, last = max(start, self.start) - self.start, min(stop, self.stop) - self.start
        if isinstance(self.source, bytes):
            return memoryview(self.source)[first:last]
        flat = self.source.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
        return memoryview(bytes_of(flat[first:last].cpu()))


class Image:
    """The content of a file.

    Args:
        size: its bytes.
        pieces: what is in it, in order.
        large: where its large tensors are.
    """

    def __init__(self, size: int, pieces: Sequence[Piece], large: Sequence[Range] | None = None) -> None:
        self.size = size
        self._pieces = pieces
        self._stops = [piece.stop for piece in pieces]
        if large is None:
            large = [(piece.start, piece.stop) for piece in pieces if _is_large(piece)]
        self.large = list(large)

    def parts(self, start: int, stop: int) -> list[memoryview]:
        """The bytes of a range, one piece after the other; those in host memory are not copied."""
        found = []
        for index in range(bisect.bisect_right(self._stops, start), len(self._pieces)):
            if self._pieces[index].start >= stop:
                break
            found.append(self._pieces[index].on_host(start, stop))
        assert sum(map(len, found)) == stop - start, "the image does not hold this range"
        return found

    def small(self) -> bytes:
        """Everything but the large tensors."""
        return b"".join(bytes(part) for start, stop in self._gaps() for part in self.parts(start, stop))

    def with_small(self, small: bytes) -> Image:
        """The same large tensors between other bytes; see `small`."""
        starts = [start for start, _ in self.large]
        pieces, at = [], 0
        for piece in self._pieces:
            index = bisect.bisect_right(starts, piece.start) - 1
            if index >= 0 and piece.start < self.large[index][1]:
                pieces.append(piece)
        for start, stop in self._gaps():
            pieces.append(Piece(start, stop, small[at : at + stop - start]))
            at += stop - start
        return Image(self.size, sorted(pieces, key=lambda piece: piece.start), self.large)

    def copied(self, ranges: Iterable[Range]) -> Image:
        """Copies of what large tensors have in these ranges, in host memory, and nothing else; `with_small` completes them."""
        pieces = [
            Piece(max(start, piece.start), min(stop, piece.stop), _copy(piece.on_host(start, stop)))
            for start, stop in ranges
            for piece in self._pieces
            if _is_large(piece) and piece.start < stop and piece.stop > start
        ]
        return Image(self.size, sorted(pieces, key=lambda piece: piece.start), self.large)

    def _gaps(self) -> list[Range]:
        ends = [0, *(stop for _, stop in self.large)]
        starts = [*(start for start, _ in self.large), self.size]
        return [(start, stop) for start, stop in zip(ends, starts, strict=True) if start < stop]


def safetensors_image(tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Image:
    """What `FolderWriter.save_safetensors` writes.

    Raises:
        TypeError: a value is not a dense tensor, or of a type that the format does not know.
        NotImplementedError: numbers are not in memory as they are in the file.
    """
    if sys.byteorder == "big":
        raise NotImplementedError("files can be taken apart on little-endian machines only")
    check_dense(tensors)
    header, order = safetensors_header(tensors, {"format": "pt"} if metadata is None else metadata)
    return _joined([header, *(tensors[name] for name in order)])


def torch_image(item: Any) -> Image:
    """What `FolderWriter.save_torch` writes. No tensor is copied, to the host or otherwise.

    Raises:
        ValueError: it holds storages that can not be told apart.
        OSError: there is no room for a small temporary file.
    """
    storages = _storages(item)
    with tempfile.TemporaryDirectory(prefix="hasten-") as folder:
        path = Path(folder) / "archive"  # the name that torch.save gives to a stream, which is in the file
        with without_zip_checksums(), torch.serialization.skip_data():
            torch.save(item, path)
        with open(path, "rb") as file:
            places = _places(file)
            if [stop - start for start, stop in places] != [storage.nbytes() for storage in storages]:
                raise ValueError("the storages in a file of torch.save are not those that were found in the object")
            sources: list[bytes | torch.Tensor] = []
            at = 0
            for (start, stop), storage in zip(places, storages, strict=True):
                file.seek(at)
                sources.append(file.read(start - at))
                sources.append(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
                at = stop
            file.seek(at)
            sources.append(file.read())
    return _joined(sources)


def _joined(sources: Iterable[bytes | torch.Tensor]) -> Image:
    pieces = []
    end = 0
    for source in sources:
        start = end
        end += len(source) if isinstance(source, bytes) else source.numel() * source.element_size()
        if end > start:
            pieces.append(Piece(start, end, source))
    return Image(end, pieces)


def _is_large(piece: Piece) -> bool:
    return isinstance(piece.source, torch.Tensor) and piece.stop - piece.start >= LARGE


def _copy(part: memoryview) -> torch.Tensor:
    return torch.frombuffer(part, dtype=torch.uint8).clone()


def _storages(item: Any) -> list[torch.UntypedStorage]:
    """The storages of an object in the order in which `torch.save` writes them."""
    found: dict[int, torch.UntypedStorage] = {}

    class Finder(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            storage = torch_private.storage_of(obj)
            if storage is None:
                return None
            found.setdefault(storage._cdata, storage)
            return storage._cdata

    Finder(io.BytesIO(), protocol=2).dump(item)
    return list(found.values())


def _places(file: BinaryIO) -> list[Range]:
    """Where a file of `torch.save` has its storages, in order."""
    places = []
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if "/data/" in record.filename:
                start = start_of(file, record)
                places.append((start, start + record.file_size))
    return places

"""Delivery: rank 0 hands every other rank an object of its own, tensors as bytes and everything else by pickle.

A delivery is one broadcast of three numbers and one scatter. An error of the sender arrives in the object's place.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hasten.collectives.wire import wire_of
from hasten.world.process import World

_ALIGNMENT = 16  # bytes: the largest element, complex128
_OBJECT, _END, _ERROR = range(3)


class Package:
    """An object as bytes: the length of its pickle, the pickle, and the tensors that it names by their places."""

    def __init__(self, item: Any) -> None:
        stream = io.BytesIO()
        pickler = _Pickler(stream)
        pickler.dump(item)
        self.text = len(stream.getvalue()).to_bytes(8, "little") + stream.getvalue()
        self.tensors = pickler.tensors
        self.start = _aligned(len(self.text))
        self.nbytes = self.start + pickler.nbytes

    def write(self, buffer: torch.Tensor) -> None:
        """Copy everything to the front of a buffer of bytes."""
        buffer[: len(self.text)].copy_(torch.frombuffer(bytearray(self.text), dtype=torch.uint8))
        for start, tensor in self.tensors:
            _view(buffer, self.start + start, tensor.dtype, tensor.shape).copy_(tensor)


def unpack(buffer: torch.Tensor) -> Any:
    """The object in a buffer; its tensors are views of the buffer."""
    length = int.from_bytes(bytes(buffer[:8].tolist()), "little")
    text = buffer[8 : 8 + length].cpu().numpy().tobytes()
    return _Unpickler(io.BytesIO(text), buffer[_aligned(8 + length) :]).load()


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[int, torch.Tensor]] = []
        self.nbytes = 0

    def persistent_id(self, item: Any) -> Any:
        if (
            type(item) is not torch.Tensor
            or item.layout is not torch.strided
            or item.requires_grad
            or item.is_quantized
        ):
            return None
        start = self.nbytes
        self.tensors.append((start, item))
        self.nbytes = _aligned(start + item.numel() * item.element_size())
        return start, item.dtype, tuple(item.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, data: torch.Tensor) -> None:
        super().__init__(stream)
        self.data = data

    def persistent_load(self, place: Any) -> torch.Tensor:
        return _view(self.data, *place)


def _view(buffer: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return buffer[start : start + nbytes].view(dtype).view(shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Delivery:
    """The way from rank 0 of a world to the others. All ranks must make the same number of calls."""

    def __init__(self, world: World) -> None:
        wire = wire_of(world)
        assert wire is not None, "a world of one process has nobody to deliver to"
        self.wire = wire
        self.rank = world.rank

    def send(self, packages: Sequence[Package], note: int) -> None:
        """Give ranks 1, 2, ... their packages, and all the same note."""
        self._send(_OBJECT, packages, note)

    def send_end(self) -> None:
        """Say that nothing more will come."""
        self._send(_END, (), 0)

    def send_error(self, error: Exception) -> None:
        """Make the others raise this error."""
        try:
            text = pickle.dumps(error)
            pickle.loads(text)
        except Exception:  # an error that can not travel: its text can
            text = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
        self._send(_ERROR, [Package(text)] * (self.wire.size - 1), 0)

    def _send(self, kind: int, packages: Sequence[Package], note: int) -> None:
        device = self.wire.device
        length = max((package.nbytes for package in packages), default=0)
        self.wire.broadcast(torch.tensor([kind, length, note], device=device), 0)
        if packages:
            buffers = [torch.empty(length, dtype=torch.uint8, device=device) for _ in range(self.wire.size)]
            for package, buffer in zip(packages, buffers[1:], strict=True):
                package.write(buffer)
            dist.scatter(torch.empty_like(buffers[0]), buffers, group_src=0, group=self.wire.group)

    def receive(self) -> tuple[Any, int] | None:
        """This rank's next object and the note; None at the end.

        Raises:
            Exception: the one that rank 0 had.
        """
        header = torch.empty(3, dtype=torch.int64, device=self.wire.device)
        self.wire.broadcast(header, 0)
        kind, length, note = header.tolist()
        if kind == _END:
            return None
        buffer = torch.empty(length, dtype=torch.uint8, device=self.wire.device)
        dist.scatter(buffer, None, group_src=0, group=self.wire.group)
        item = unpack(buffer)
        if kind == _ERROR:
            error = pickle.loads(item)
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"Raised by rank 0, which reads for all; seen on rank {self.rank}.")
            raise error
        return item, note

"""Packages: an object as one run of bytes, tensors as they are and everything else by pickle."""

from __future__ import annotations

import io
import math
import pickle
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

_ALIGNMENT = 64  # bytes: those of a cache line; copying to another place takes half as long again
_VIEWS = 256  # places that a buffer remembers


class Header(NamedTuple):
    """What stands at the front of a message: its kind, the bytes of the longest one to any rank, a number for the receiver, and
    the bytes of the pickle.
    """

    kind: int
    nbytes: int
    note: int
    text: int


_HEADER = struct.Struct("<qqqq")


class Buffer:
    """Memory for one message after the other.

    Taking new memory costs more than copying to it. So the receiver, too, uses it again, when no tensor in it is alive any more.

    Args:
        nbytes: its size.
        device: where it is.
    """

    def __init__(self, nbytes: int, device: torch.device | str = "cpu") -> None:
        with torch.inference_mode(False):  # a tensor made inside it could not be written to outside it
            self.data = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.nbytes = nbytes
        self.is_on_host = self.data.is_cpu
        self._bytes: Any = self.data.numpy() if self.is_on_host else None
        self._views: dict[Any, torch.Tensor] = {}
        self._lease: Callable[[], Any] = lambda: None

    @property
    def is_lent(self) -> bool:
        """Whether tensors that were unpacked from it are alive."""
        return self._lease() is not None

    def part(self, start: int, end: int) -> torch.Tensor:
        """Some of its bytes."""
        return self.data if start == 0 and end == self.nbytes else self.data[start:end]

    def write(self, front: bytes) -> None:
        """Overwrite the first bytes."""
        if self._bytes is None:
            self.data[: len(front)].copy_(torch.frombuffer(bytearray(front), dtype=torch.uint8))
        else:
            memoryview(self._bytes)[: len(front)] = front

    def place(self, start: int, like: torch.Tensor) -> torch.Tensor:
        """A view, beginning at a byte, that a tensor can be copied to."""
        key = (start, like.dtype, like.shape)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            with torch.inference_mode(False):
                view = self._views[key] = _view(self.data, self._bytes, start, like.dtype, like.shape)
        return view

    def header(self) -> Header:
        """The front of the message in it."""
        return Header(*_HEADER.unpack_from(self._front(_HEADER.size)))

    def unpack(self, header: Header) -> Any:
        """The object in the message; its tensors are views of this memory."""
        end = _HEADER.size + header.text
        unpickler = _Unpickler(io.BytesIO(self._front(end)[_HEADER.size :]))
        # All tensors hold this array, so that its end is theirs.
        lease = None if self._bytes is None else self._bytes[:]
        unpickler.data, unpickler.memory, unpickler.start = self.data, lease, _aligned(end)
        if lease is not None:
            self._lease = weakref.ref(lease)
        return unpickler.load()

    def _front(self, nbytes: int) -> memoryview:
        front: Any = self.data[:nbytes].cpu().numpy() if self._bytes is None else self._bytes[:nbytes]
        return memoryview(front)


class Package:
    """An object as bytes: a pickle, and the tensors that it names by their places."""

    def __init__(self, item: Any) -> None:
        stream = io.BytesIO()
        pickler = _Pickler(stream)
        pickler.dump(item)
        self.text = stream.getvalue()
        self.tensors = pickler.tensors
        self.start = _aligned(_HEADER.size + len(self.text))
        self.nbytes = self.start + pickler.nbytes
        self.is_on_host = pickler.is_on_host

    def write(self, buffer: Buffer, kind: int = 0, nbytes: int = 0, note: int = 0) -> None:
        """Make the front of a buffer a message."""
        buffer.write(_HEADER.pack(kind, nbytes, note, len(self.text)) + self.text)
        for start, tensor in self.tensors:
            buffer.place(self.start + start, tensor).copy_(tensor)


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[int, torch.Tensor]] = []
        self.nbytes = 0
        self.is_on_host = True

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
        self.is_on_host &= item.is_cpu
        self.nbytes = _aligned(start + item.numel() * item.element_size())
        return start, str(item.dtype).removeprefix("torch."), tuple(item.shape)


class _Unpickler(pickle.Unpickler):
    data: torch.Tensor
    memory: Any
    start: int

    def persistent_load(self, place: Any) -> torch.Tensor:
        start, dtype, shape = place
        return _view(self.data, self.memory, self.start + start, getattr(torch, dtype), shape)


def _view(data: torch.Tensor, memory: Any, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    count = math.prod(shape)
    if memory is None or count == 0:
        return data[start : start + count * dtype.itemsize].view(dtype).view(shape)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)  # fewer operations


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

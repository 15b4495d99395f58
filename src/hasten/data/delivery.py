"""Delivery: rank 0 hands every other rank an object of its own.

A delivery is one scatter, if its object is not larger than those before it, and otherwise two. An error of the sender arrives in
the object's place.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hasten.collectives.wire import wire_of
from hasten.data.package import Buffer, Package
from hasten.world.process import World

_NAME = "the next step of a dispatched loader"
_OBJECT, _END, _ERROR = range(3)
_LEAST = 4 << 10  # bytes of the first scatter: fewer would not be faster
_REMEMBERED = 8  # sizes
_KEPT = 4  # buffers for each rank: the batch in the loop's body, the next one, the one that comes, and one to spare


@dataclass(frozen=True)
class Message:
    """What one delivery sends to ranks 1, 2, ...

    Args:
        buffers: one for each of them; the same one may stand there several times.
        nbytes: the bytes of the longest message.
        expected: the bytes of the first scatter, which all ranks know; a second one takes the rest.
    """

    buffers: list[Buffer]
    nbytes: int
    expected: int


class Delivery:
    """The way from rank 0 of a world to the others. All ranks must make the same number of calls.

    As the others do not know how large an object is, they receive as much as the largest one of the last few had. If it is larger,
    the rest follows. Batches mostly have the same size, or about the same.
    """

    def __init__(self, world: World) -> None:
        wire = wire_of(world)
        assert wire is not None, "a world of one process has nobody to deliver to"
        self.wire = wire
        self.rank = world.rank
        self._moves = wire.device.type != "cpu"
        self._expected = _LEAST
        self._sizes: deque[int] = deque(maxlen=_REMEMBERED)
        self._buffers: deque[Buffer] = deque(maxlen=_KEPT * (1 if self.rank else world.size - 1))

    def _expect_after(self, nbytes: int) -> int:
        """Take note of a message; returns how many bytes of it were expected."""
        expected = self._expected
        self._sizes.append(nbytes)
        self._expected = max(_LEAST, *self._sizes)
        return expected

    def _take(self, size: int, device: torch.device | str) -> Buffer:
        """A buffer of at least that size, the last one that was used if possible."""
        lent: list[Buffer] = []
        taken = None
        while taken is None and self._buffers:  # meanwhile another thread may add some
            buffer = self._buffers.pop()
            if buffer.is_lent:
                lent.append(buffer)
            elif size <= buffer.nbytes <= 2 * size:
                taken = buffer
        self._buffers.extend(reversed(lent))
        return Buffer(size, device) if taken is None else taken

    def _keep(self, buffer: Buffer) -> None:
        if buffer.is_on_host:  # on a device, memory is kept by torch, and for each stream
            self._buffers.append(buffer)

    # -- rank 0 ------------------------------------------------------------------------------------------------------

    def message(self, packages: Sequence[Package], note: int, kind: int = _OBJECT) -> Message:
        """Make the message that gives ranks 1, 2, ... their packages, and all the same note.

        Messages must be sent in the order in which they were made. They may be made in another thread than the one that sends.
        """
        nbytes = max(package.nbytes for package in packages)
        size = max(nbytes, self._expected)
        on_host = all(package.is_on_host for package in packages)
        written: dict[int, Buffer] = {}
        for package in packages:
            if id(package) not in written:
                buffer = self._take(size, "cpu" if on_host else self.wire.device)
                package.write(buffer, kind, nbytes, note)
                written[id(package)] = buffer
        if not on_host:
            torch.accelerator.current_stream().synchronize()  # another one may send it
        return Message([written[id(package)] for package in packages], nbytes, self._expect_after(nbytes))

    def send(self, message: Message) -> None:
        """Send a message, and wait until it has arrived.

        Making the next one meanwhile does not help: on one machine it takes from the transfer what it saves.
        """
        self._send_part(message.buffers, 0, message.expected)
        if message.nbytes > message.expected:
            self._send_part(message.buffers, message.expected, message.nbytes)
        for buffer in {id(buffer): buffer for buffer in message.buffers}.values():
            self._keep(buffer)

    def _send_part(self, buffers: list[Buffer], start: int, end: int) -> None:
        sent = [buffer.part(start, end) for buffer in buffers]
        if self._moves:
            moved = {id(buffer): part.to(self.wire.device) for buffer, part in zip(buffers, sent, strict=True)}
            sent = [moved[id(buffer)] for buffer in buffers]
        # Rank 0 gets nothing: a part that it has already.
        self._scatter(sent[0], [sent[0], *sent])

    def _scatter(self, own: torch.Tensor, parts: list[torch.Tensor] | None) -> None:
        arrivals = self.wire.arrivals
        arrivals.begin(_NAME)
        arrivals.wait(dist.scatter(own, parts, group_src=0, group=self.wire.group, async_op=True))

    def send_end(self) -> None:
        """Say that nothing more will come."""
        self._send_to_all(None, _END)

    def send_error(self, error: Exception) -> None:
        """Make the others raise this error."""
        try:
            text = pickle.dumps(error)
            pickle.loads(text)
        except Exception:  # an error that can not travel: its text can
            text = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
        self._send_to_all(text, _ERROR)

    def _send_to_all(self, item: Any, kind: int) -> None:
        self.send(self.message([Package(item)] * (self.wire.size - 1), 0, kind))

    # -- the others --------------------------------------------------------------------------------------------------

    def receive(self) -> tuple[Any, int] | None:
        """This rank's next object and the note; None at the end.

        Raises:
            Exception: the one that rank 0 had.
        """
        expected, device = self._expected, self.wire.device
        buffer = self._take(expected, device)
        self._receive_into(buffer.part(0, expected))
        header = buffer.header()
        if self._expect_after(header.nbytes) < header.nbytes:
            front, buffer = buffer, self._take(header.nbytes, device)
            buffer.part(0, expected).copy_(front.part(0, expected))
            self._receive_into(buffer.part(expected, header.nbytes))
        if header.kind == _END:
            return None
        item = buffer.unpack(header)
        self._keep(buffer)
        if header.kind == _ERROR:
            error = pickle.loads(item)
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"Raised by rank 0, which reads for all; seen on rank {self.rank}.")
            raise error
        return item, header.note

    def _receive_into(self, part: torch.Tensor) -> None:
        self._scatter(part, None)

"""The frames of a world: messages of one fixed size, on which the processes agree before anything else travels."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from hasten.settings import environment
from hasten.world.agreement import DIGEST_BYTES, Statement, disagreement, failure
from hasten.world.arrivals import Arrivals, call_site
from hasten.world.context import CONTEXT

if TYPE_CHECKING:
    from hasten.world.process import World

_LENGTHS = struct.Struct("<QQ")  # of the body, wherever it travels; of the statement's text
HEADER_BYTES = DIGEST_BYTES + _LENGTHS.size
_LARGEST_FRAME = 16 << 10
_SMALLEST_FRAME = 512
_ALL_FRAMES = 256 << 10  # bytes that all frames together have, while each is larger than the smallest
_FEW = 8
_SINGLE = hasattr(dist, "all_gather_single")


def frame_bytes(size: int) -> int:
    """Size of a frame among `size` processes: a function of nothing else, so that all processes know it."""
    return min(_LARGEST_FRAME, max(_SMALLEST_FRAME, _ALL_FRAMES // size // 16 * 16))


class Frames:
    """How the processes of one world exchange frames, and what follows them.

    A frame is a header (digest of the sender's statement, two lengths) and a body. As it has the same size everywhere, the
    exchange itself cannot fail over what the processes hold. The buffers are kept: sending a structure of a known form
    allocates nothing.

    Args:
        world: more than one process.
        staged: keep the header on the host and the frame on the device; by default where the backend needs it.
    """

    def __init__(self, world: World, staged: bool | None = None) -> None:
        assert world.group is not None
        self.world = world
        self.rank, self.size, self.group = world.rank, world.size, world.group
        self.device = torch.device("cpu") if world.backend == "gloo" or world.row.is_cpu else world.device
        self.staged = self.device.type != "cpu" if staged is None else staged
        self._debug = bool(environment.get("debug"))
        self.capacity = frame_bytes(self.size) - HEADER_BYTES
        self.arrivals = self._arrivals()
        self._stream: Any = None
        with torch.inference_mode(False):  # tensors made inside it could not be written to outside it
            self.frames = torch.zeros(self.size, HEADER_BYTES + self.capacity, dtype=torch.uint8, device=self.device)
            own = self.frames[self.rank]
            self.frame = own if self.is_pair else torch.zeros_like(own)
            self.body = self.frame[HEADER_BYTES:]
            self.bodies = self.frames[:, HEADER_BYTES:]
            self._out = torch.zeros_like(self.frame, device="cpu") if self.staged else self.frame
        self._bytes = memoryview(self._out.numpy())  # type: ignore[arg-type]
        self._rows = None if self.staged else _rows(self.frames)
        self._digests = None if self.staged else self.frames[:, :DIGEST_BYTES].numpy()

    @property
    def debug(self) -> bool:
        """Whether statements name the line of the call; `PartialState().debug` may be changed at any time."""
        return bool(CONTEXT.partial_state.get("debug", self._debug))

    @property
    def fills_rows(self) -> bool:
        """Whether large tensors are gathered by `fill_rows`.

        gloo's all-gather receives into memory of its own and copies from there, which takes as long as the way itself: on one
        machine, straight into the result takes 0.55 to 0.8 of its time. From machine to machine more would be sent.
        """
        return self.world.backend == "gloo" and self.size <= _FEW and self.world.local_size == self.size

    @property
    def is_pair(self) -> bool:
        """Whether two processes send each other frames, and large tensors to be summed, straight.

        It takes two thirds of the time of gloo's all-gather, and saves a copy before an all-reduce.
        """
        return self.world.backend == "gloo" and self.size == 2

    # -- the exchange ------------------------------------------------------------------------------------------------

    def meet(self, statement: Statement, length: int = 0, meanwhile: Callable[[], None] | None = None) -> None:
        """Exchange the frames, whose body has been filled, and check that all processes say the same.

        Args:
            length: of the body, if it is not a part of the form.
            meanwhile: something to do while the frames travel. It must not fail: the others would wait for what comes next.

        Raises:
            DistributedOperationException: they do not, the same error everywhere.
        """
        digest = statement.digest
        self.arrivals.begin(statement.operation)
        self._bytes[:HEADER_BYTES] = digest + _LENGTHS.pack(length, statement.nbytes)
        if self.staged:
            self._settle()
            self.frame[:HEADER_BYTES].copy_(self._out[:HEADER_BYTES])
        work = self._begin_exchange()
        if meanwhile is not None:
            meanwhile()
        self.arrivals.wait(work, on_host=True)
        found = self.frames[:, :DIGEST_BYTES].cpu().numpy() if self._digests is None else self._digests
        if found.tobytes() != digest * self.size:
            raise disagreement(self._statements(statement))

    def agree(self, operation: str, **arguments: Any) -> None:
        """Wait for all processes to call `operation` with the same arguments, which can be written as JSON.

        Raises:
            DistributedOperationException: they called something else; the same error everywhere.
        """
        self.meet(Statement(operation, arguments, site=call_site() if self.debug else None))

    def talk(self, statement: Statement, body: bytes) -> list[memoryview]:
        """Exchange bodies of any length; in one collective if they all fit in a frame.

        Returns:
            The body of each process; valid until the next exchange.
        """
        if len(body) <= self.capacity:
            self._bytes[HEADER_BYTES : HEADER_BYTES + len(body)] = body
            if self.staged:
                end = HEADER_BYTES + len(body)
                self.frame[HEADER_BYTES:end].copy_(self._out[HEADER_BYTES:end])
        self.meet(statement, len(body))
        rows = self._rows or _rows(self.frames)
        lengths = [_LENGTHS.unpack_from(row, DIGEST_BYTES)[0] for row in rows]
        if max(lengths) <= self.capacity:
            return [row[HEADER_BYTES : HEADER_BYTES + length] for row, length in zip(rows, lengths, strict=True)]
        return self._ragged(body, lengths)

    def fail(self, operation: str, error: Exception) -> NoReturn:
        """Tell the other processes that this one cannot take part in `operation`, and raise.

        Raises:
            DistributedOperationException: the others do not fail in the same way.
            Exception: `error` itself, if they do.
        """
        try:
            self.meet(failure(operation, error, call_site() if self.debug else None))
        except Exception as others:
            raise others from error
        raise error

    def gather_into(self, output: torch.Tensor, tensor: torch.Tensor, group: Any = None) -> None:
        """One all-gather, in this world or in a group of some of its processes.

        Raises:
            RuntimeError: the process group has been ended.
            MissingProcessError: some process did not come.
        """
        self.arrivals.wait(self.begin_gather(output, tensor, group))

    def _begin_exchange(self) -> Any:
        if self.is_pair:  # this process's frame is in its row already
            return self._send_straight(1 - self.rank, 1 - self.rank, self.frame, self.frames[1 - self.rank])
        return self.begin_gather(self.frames.view(-1), self.frame)

    def begin_gather(self, output: torch.Tensor, tensor: torch.Tensor, group: Any = None) -> Any:
        """Begin an all-gather, which the caller waits for; see `gather_into`."""
        self.world.check_alive()
        gather: Any = dist.all_gather_single if _SINGLE else dist.all_gather_into_tensor  # the latter before torch 2.13
        return gather(output, tensor, group=group or self.group, async_op=True)

    def fill_rows(self, rows: Sequence[torch.Tensor] | torch.Tensor, own: torch.Tensor) -> None:
        """Receive the `own` of every other process into its row, in place, in one collective less than there are processes.

        In turn k every process sends to the k-th one after it and receives from the k-th one before it.
        """
        works = []
        for turn in range(1, self.size):
            to, source = (self.rank + turn) % self.size, (self.rank - turn) % self.size
            works.append(self._send_straight(to, source, own, rows[source]))
        for work in works:
            self.arrivals.wait(work)

    def _send_straight(self, to: int, source: int, own: torch.Tensor, row: torch.Tensor) -> Any:
        self.world.check_alive()
        sent = [own.numel() * (rank == to) for rank in range(self.size)]
        received = [row.numel() * (rank == source) for rank in range(self.size)]
        return dist.all_to_all_single(row, own, received, sent, group=self.group, async_op=True)

    def broadcast(self, tensor: torch.Tensor, source: int, *, name: str = "") -> None:
        """One broadcast, in place, from the process of rank `source` in this world.

        Args:
            tensor: of the same size everywhere.
            source: whose values all get.
            name: what errors call it, if it belongs to no call that has been agreed on.
        """
        if name:
            self.arrivals.begin(name)
        self.arrivals.wait(dist.broadcast(tensor, group_src=source, group=self.group, async_op=True))

    def all_reduce(self, tensor: torch.Tensor, operation: Any, *, name: str = "") -> None:
        """One all-reduce, in place, by an operation of `torch.distributed.ReduceOp`; `name` as in `broadcast`."""
        if name:
            self.arrivals.begin(name)
        self.arrivals.wait(dist.all_reduce(tensor, operation, group=self.group, async_op=True))

    def _arrivals(self) -> Arrivals:
        arrivals: Arrivals | None = self.world.attached.get("arrivals")
        if arrivals is None:
            arrivals = self.world.attached["arrivals"] = Arrivals(self.world, polls=self.device.type != "cpu")
        return arrivals

    def _statements(self, own: Statement) -> list[Statement]:
        lengths = [_LENGTHS.unpack_from(row, DIGEST_BYTES)[1] for row in self._rows or _rows(self.frames)]
        return [Statement.parse(bytes(text)) for text in self._ragged(own.told(call_site()), lengths)]

    def _ragged(self, body: bytes, lengths: Sequence[int]) -> list[memoryview]:
        """Exchange bodies whose lengths all processes know."""
        total = sum(lengths)
        # One long body must not make everyone allocate its length times the number of processes.
        shared = min(max(lengths), max(2 * total // self.size, self.capacity))
        send = self._padded(body[:shared], shared)
        received = torch.empty(self.size * shared, dtype=torch.uint8, device=self.device)
        self.gather_into(received, send)
        rows = _rows(received.view(self.size, shared))
        bodies = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        for rank, length in enumerate(lengths):
            if length > shared:
                rest = self._padded(body[shared:] if rank == self.rank else b"", length - shared)
                self.broadcast(rest, rank)
                bodies[rank] = memoryview(bytes(rows[rank]) + rest.cpu().numpy().tobytes())
        return bodies

    def _padded(self, body: bytes, length: int) -> torch.Tensor:
        padded = torch.zeros(length, dtype=torch.uint8)
        padded.numpy()[: len(body)] = memoryview(body)
        return padded.to(self.device)

    def _settle(self) -> None:
        """Let what another stream still reads from the frames be read before they are overwritten."""
        if self.device.type == "cpu":
            return
        stream = torch.accelerator.current_stream()
        if self._stream is not None and stream != self._stream:
            torch.accelerator.synchronize()
        self._stream = stream


def _rows(packed: torch.Tensor) -> list[memoryview]:
    return [memoryview(row) for row in packed.cpu().numpy()]


def frames_of(world: World) -> Frames:
    """The frames of a world of several processes. They are made at the first exchange and live as long as the world."""
    frames: Frames | None = world.attached.get("frames")
    if frames is None:
        frames = world.attached["frames"] = Frames(world)
    return frames

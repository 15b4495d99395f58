"""The wire of a world: frames of one fixed size, on which the processes agree before anything else travels."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from hasten.collectives.layout import flatten, paths
from hasten.collectives.nested import ONLY_TENSORS
from hasten.collectives.verify import (
    DIGEST_BYTES,
    Statement,
    call_site,
    disagreement,
    failure,
)
from hasten.settings import environment
from hasten.world import process, torch_private
from hasten.world.context import CONTEXT
from hasten.world.process import World

P = TypeVar("P")

_LENGTHS = struct.Struct("<QQ")  # of the body, wherever it travels; of the statement's text
HEADER_BYTES = DIGEST_BYTES + _LENGTHS.size
_LARGEST_FRAME = 16 << 10
_SMALLEST_FRAME = 512
_ALL_FRAMES = 256 << 10  # bytes that all frames together have, while each is larger than the smallest
_PLANS = 64
# What the form of a tensor is: all that plans depend on.
_SIZED = attrgetter("shape", "dtype", "device")
_UNSIZED = attrgetter("ndim", "dtype", "is_nested")
_DTENSOR = (
    "`{}` got a DTensor, which is spread over the processes already. Pass `tensor.full_tensor()` for the whole, or "
    "`tensor.to_local()` for this process's part."
)
_SINGLE = hasattr(dist, "all_gather_single")


def frame_bytes(size: int) -> int:
    """Size of a frame among `size` processes: a function of nothing else, so that all processes know it."""
    return min(_LARGEST_FRAME, max(_SMALLEST_FRAME, _ALL_FRAMES // size // 16 * 16))


@dataclass(frozen=True)
class Form:
    """A call of a collective on tensors: all that it has in common with the next call on a structure of the same form."""

    operation: str
    arguments: dict[str, Any]
    site: str | None
    names: list[str]
    leaves: list[torch.Tensor]

    def statement(self) -> Statement:
        """That this process brings tensors of these names, dtypes and shapes."""
        told = sorted(
            (name, str(leaf.dtype).removeprefix("torch."), str(list(leaf.shape)))
            for name, leaf in zip(self.names, self.leaves, strict=True)
        )
        return Statement(self.operation, self.arguments, tuple(told), site=self.site)


class Wire:
    """How the processes of one world exchange frames.

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
        self._plans: dict[Any, Any] = {}
        self._stream: Any = None
        with torch.inference_mode(False):  # tensors made inside it could not be written to outside it
            self.frame = torch.zeros(HEADER_BYTES + self.capacity, dtype=torch.uint8, device=self.device)
            self.frames = torch.zeros(self.size, HEADER_BYTES + self.capacity, dtype=torch.uint8, device=self.device)
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

    # -- what a function on tensors needs ----------------------------------------------------------------------------

    def plan(
        self, build: Callable[[Wire, Form], P], operation: str, data: Any, *, sized: bool = True, **arguments: Any
    ) -> tuple[list[torch.Tensor], P]:
        """The tensors of a nested structure, and what `build` has prepared for structures of its form.

        An error of this process (a leaf of a wrong type, say) is told to the others, so that none of them waits for it.

        Args:
            build: makes it, once for each form.
            sized: whether the shapes are part of the form, or the numbers of dimensions only.
            arguments: those of the operation that all processes must give alike.
        """
        try:
            leaves, trace = flatten(operation, data)
            site = call_site() if self.debug else None
            key = (
                operation,
                *arguments.values(),
                site,
                *trace,
                *map(_SIZED if sized else _UNSIZED, leaves),
            )
            plan: P | None = self._plans.get(key)
            if plan is None:
                with torch.inference_mode(False):
                    plan = build(self, Form(operation, arguments, site, paths(data), leaves))
                if len(self._plans) >= _PLANS:
                    del self._plans[next(iter(self._plans))]
                self._plans[key] = plan
            if any(hasattr(kind, "full_tensor") for kind in set(map(type, leaves)) - ONLY_TENSORS):
                raise TypeError(_DTENSOR.format(operation))
        except Exception as error:
            self.fail(operation, error)
        return leaves, plan

    def pack(self, operation: str, into: list[torch.Tensor], leaves: list[torch.Tensor], away: bool) -> None:
        """Copy tensors, some of which may be `away` on another device, into views of what will be sent."""
        try:
            copy_all(into, leaves, away)
        except Exception as error:
            self.fail(operation, error)

    def ready(self, operation: str, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors as a collective can take them: detached, contiguous, on the wire's device; copied only if they must be."""
        try:
            return [leaf.detach().to(self.device).resolve_conj().resolve_neg().contiguous() for leaf in leaves]
        except Exception as error:
            self.fail(operation, error)

    # -- the exchange ------------------------------------------------------------------------------------------------

    def meet(self, statement: Statement, length: int = 0) -> None:
        """Exchange the frames, whose body has been filled, and check that all processes say the same.

        Raises:
            DistributedOperationException: they do not, the same error everywhere.
        """
        digest = statement.digest
        self._bytes[:HEADER_BYTES] = digest + _LENGTHS.pack(length, len(statement.text))
        if self.staged:
            self._settle()
            self.frame[:HEADER_BYTES].copy_(self._out[:HEADER_BYTES])
        self.gather_into(self.frames.view(-1), self.frame)
        found = self.frames[:, :DIGEST_BYTES].cpu().numpy() if self._digests is None else self._digests
        if found.tobytes() != digest * self.size:
            raise disagreement(self._statements(statement))

    def talk(self, statement: Statement, body: bytes) -> list[memoryview]:
        """Exchange bodies of any length; in one collective if they all fit in a frame.

        Returns:
            The body of each process; valid until the next exchange.
        """
        if len(body) <= self.capacity:
            self._bytes[HEADER_BYTES : HEADER_BYTES + len(body)] = body
            if self.staged:
                self.body.copy_(self._out[HEADER_BYTES:])
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

    def gather_into(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """One all-gather; raises if the process group has been ended."""
        self.world.check_alive()
        if _SINGLE:
            dist.all_gather_single(output, tensor, group=self.group)
        else:  # torch before 2.13
            dist.all_gather_into_tensor(output, tensor, group=self.group)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """One broadcast, in place, from the process of rank `source` in this world."""
        dist.broadcast(tensor, group_src=source, group=self.group)

    def all_reduce(self, tensor: torch.Tensor, operation: Any) -> None:
        """One all-reduce, in place."""
        dist.all_reduce(tensor, operation, group=self.group)

    def is_away(self, leaves: list[torch.Tensor]) -> bool:
        """Whether some tensors lie on another device than the wire's."""
        return any(leaf.device != self.device for leaf in leaves)

    def check_source(self, from_process: int) -> None:
        """Raise if there is no process of that rank."""
        if not 0 <= from_process < self.size:
            raise ValueError(f"from_process={from_process}: it must be a rank from 0 to {self.size - 1}.")

    def _statements(self, own: Statement) -> list[Statement]:
        lengths = [_LENGTHS.unpack_from(row, DIGEST_BYTES)[1] for row in self._rows or _rows(self.frames)]
        return [Statement.parse(bytes(text)) for text in self._ragged(own.text, lengths)]

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


def copy_all(into: list[torch.Tensor], tensors: list[torch.Tensor], away: bool) -> None:
    """Overwrite tensors by others of the same shapes, whatever their strides, and devices if some are `away`."""
    with torch.no_grad():
        if away:
            for target, tensor in zip(into, tensors, strict=True):
                target.copy_(tensor)
        elif tensors:  # torch refuses empty lists
            torch_private.copy_each(into, tensors)


def _rows(packed: torch.Tensor) -> list[memoryview]:
    return [memoryview(row) for row in packed.cpu().numpy()]


def wire_of(world: World | None) -> Wire | None:
    """The wire of a world (by default this process's own); None where nothing has to be sent.

    It is made at the first exchange and lives as long as the world.
    """
    world = world or process.current()
    if world.size == 1:
        return None
    wire: Wire | None = world.attached.get("wire")
    if wire is None:
        wire = world.attached["wire"] = Wire(world)
    return wire

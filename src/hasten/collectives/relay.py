"""Relay: a tensor that one process has, about which the others know nothing, on all of them."""

from __future__ import annotations

import json
from typing import Any

import torch

from hasten.collectives.parcels import as_bytes
from hasten.collectives.wire import Wire, wire_of
from hasten.world import process
from hasten.world.agreement import Statement
from hasten.world.arrivals import call_site
from hasten.world.process import World

# Numbers for dtypes, as the reference gives them; others have none.
TENSOR_TYPE_TO_INT = {
    torch.float32: 1,
    torch.float64: 2,
    torch.float16: 3,
    torch.bfloat16: 4,
    torch.uint8: 5,
    torch.int8: 6,
    torch.int16: 7,
    torch.int32: 8,
    torch.int64: 9,
    torch.bool: 10,
}
TENSOR_INT_TO_DTYPE = {number: dtype for dtype, number in TENSOR_TYPE_TO_INT.items()}


def copy_tensor_to_devices(tensor: torch.Tensor | None = None, *, world: World | None = None) -> torch.Tensor:
    """Give every process the tensor of the last one, such as the output of a pipeline's last stage.

    Two collectives.

    Args:
        tensor: on the last process the tensor, of any dtype and shape; on the others it does not count and may be None.
        world: the processes to copy to; by default all.

    Returns:
        A tensor on this process's device; on the last process, and where a process is alone, the one given, if it is there.

    Raises:
        DistributedOperationException: the last process gives no tensor; the same error on every process.
        ValueError: the same, where a process is alone.
    """
    here = world or process.current()
    wire = wire_of(world)
    if wire is None:
        return _known(tensor).to(here.device)
    name, last = "copy_tensor_to_devices", wire.size - 1
    own = wire.prepare(name, lambda: wire.ready(_known(tensor))) if wire.rank == last else None
    described = _describe(own) if own is not None else b""
    shape, dtype = _read(wire.talk(_statement(name, wire), described)[last])
    sent = torch.empty(shape, dtype=dtype, device=wire.device) if own is None else own
    if sent.numel():
        wire.broadcast(as_bytes(sent), last)
    return (sent if own is None else _known(tensor)).to(here.device)


def gather_tensor_shape(tensor: torch.Tensor | None, *, world: World | None = None) -> tuple[torch.Tensor, int]:
    """The shape and dtype of the tensor of the last process that has one.

    One collective.

    Args:
        tensor: a tensor, or None on the processes that have none.
        world: the processes to ask; by default all.

    Returns:
        The shape, as int32 numbers in one column, and the number of the dtype in TENSOR_TYPE_TO_INT.

    Raises:
        ValueError: no process has a tensor, or its dtype has no number.
    """
    wire = wire_of(world)
    described = b"" if tensor is None else _describe(tensor)
    told = [described] if wire is None else wire.talk(_statement("gather_tensor_shape", wire), described)
    found = [body for body in told if len(body)]
    if not found:
        raise ValueError("gather_tensor_shape: no process has given a tensor.")
    shape, dtype = _read(found[-1])
    if dtype not in TENSOR_TYPE_TO_INT:
        raise ValueError(
            f"gather_tensor_shape: {dtype} has no number in TENSOR_TYPE_TO_INT. Use copy_tensor_to_devices."
        )
    return torch.tensor(shape, dtype=torch.int32).view(-1, 1), TENSOR_TYPE_TO_INT[dtype]


def _known(tensor: torch.Tensor | None) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"copy_tensor_to_devices: the last process must give a tensor, but gave {type(tensor)}.")
    return tensor


def _describe(tensor: torch.Tensor) -> bytes:
    return json.dumps([list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]).encode()


def _read(described: Any) -> tuple[list[int], torch.dtype]:
    shape, dtype = json.loads(bytes(described))
    return shape, getattr(torch, dtype)


def _statement(name: str, wire: Wire) -> Statement:
    return Statement(name, {}, site=call_site() if wire.debug else None)

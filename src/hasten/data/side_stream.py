"""A side stream: the next batch is copied to the device while the device works on the batch before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from hasten.collectives.nested import children, send_to_device


class Started(NamedTuple):
    """A batch on its way, and the event that says that it has arrived; None if nothing must be waited for."""

    batch: Any
    event: torch.Event | None


class SideStream:
    """A stream of its own for the copies of one pass.

    A copy is started as soon as the batch is fetched; what the loop's body has put on the device's current stream is not waited
    for. Before the batch is handed out the current stream is told to wait for the copy, which costs the host nothing. Copies
    from pinned memory (`pin_memory=True`) run beside everything else; those from other memory hold up the host, as ever, but
    no longer until the device has done its work.

    Args:
        device: where the batches go; see `has_streams`.
        non_blocking: how batches are moved that can not be copied ahead, since they hold tensors that nobody sees.
    """

    def __init__(self, device: torch.device, non_blocking: bool = False) -> None:
        self.device = device
        self._non_blocking = non_blocking
        self._stream = torch.Stream(device)

    def start(self, batch: Any) -> Started:
        """Begin to copy a batch."""
        tensors: list[torch.Tensor] = []
        if not _find(batch, tensors) or all(tensor.device == self.device for tensor in tensors):
            return Started(send_to_device(batch, self.device, self._non_blocking), None)
        elsewhere = [tensor for tensor in tensors if not tensor.is_cpu]
        if elsewhere:  # their values may be made by work that is still to be done
            self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self._stream:
            moved = send_to_device(batch, self.device, non_blocking=True)
        _record(elsewhere, self._stream)
        return Started(moved, self._stream.record_event())

    def hand_out(self, started: Started) -> Any:
        """The batch, for the device's current stream: its work waits until the batch is there, and its memory stays until then."""
        if started.event is not None:
            current = torch.accelerator.current_stream(self.device)
            current.wait_event(started.event)
            tensors: list[torch.Tensor] = []
            _find(started.batch, tensors)
            _record(tensors, current)
        return started.batch


def has_streams(device: torch.device) -> bool:
    """Whether work on this device is put on streams."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "Stream")


def _find(data: Any, found: list[torch.Tensor]) -> bool:
    """Collect the tensors of a structure; returns whether it shows all that moving it will move."""
    if isinstance(data, torch.Tensor):
        found.append(data)
        return data.layout is torch.strided
    inner = children(data)
    if inner is None:
        return not hasattr(data, "to")
    return all(_find(value, found) for _, value in inner)


def _record(tensors: Iterable[torch.Tensor], stream: torch.Stream) -> None:
    """Let the memory of tensors not be used again before the work that a stream has now is done."""
    for tensor in tensors:
        tensor.record_stream(stream)

"""Pad: tensors get the same length on all processes."""

from __future__ import annotations

import struct
import warnings
from typing import Any

import torch

from hasten.collectives.layout import flatten
from hasten.collectives.nested import recursively_apply, refill
from hasten.collectives.wire import Form, Wire, wire_of
from hasten.world.agreement import Statement, grouped
from hasten.world.process import World

_NESTED = "A nested tensor has no single length, so `pad_across_processes` leaves it as it is; pad its parts instead."


_WITHOUT = (
    "`pad_across_processes(dim={dim})` leaves {name} as it is: it has {count}, and its shapes differ between the processes: "
    "{shapes}. Pad it along a dimension that it has."
)


class CannotPadNestedTensorWarning(UserWarning):
    """A `torch.nested` tensor was given to `pad_across_processes`; it has no one length and stays as it is."""


def pad_across_processes(
    tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False, *, world: World | None = None
) -> Any:
    """Make the tensors of a nested structure as long along `dim` as the longest one on any process.

    One collective exchanges the lengths of all of them (two if they are more than some 2000); the padding is local. Names,
    dtypes and numbers of dimensions must be the same on every process; the other dimensions may differ.

    Args:
        tensor: any nesting of containers around tensors.
        dim: the dimension to pad, from the end if negative; a tensor without that dimension stays as it is, with a warning if
            it then still differs between the processes.
        pad_index: the value to pad with; it must be one that the tensors' dtype can hold.
        pad_first: pad at the beginning.
        world: the processes that pad together; by default all.

    Returns:
        The same structure; tensors that are long enough are the same objects, the others new ones of the same dtype.

    Raises:
        TypeError: a leaf is not a tensor.
        ValueError: `pad_index` is needed in a tensor that cannot hold it.
        DistributedOperationException: the processes do not hold the same; the same error on every one.

    Example:
        >>> pad_across_processes(torch.ones(rank + 1, dtype=torch.bool))  # on 2 processes; rank 0 gets
        tensor([ True, False])
    """
    wire = wire_of(world)
    if wire is None:
        leaves, _ = flatten("pad_across_processes", tensor)
        return refill(tensor, iter(leaves))
    leaves, plan = wire.plan(_Lengths, "pad_across_processes", tensor, sized=False, dim=dim)
    longest, uneven = plan.exchange(leaves)
    if uneven:
        _check_value(pad_index, {leaves[index].dtype for index in uneven})
        for index in uneven:
            leaves[index] = _pad(leaves[index], dim, longest[index], pad_index, pad_first)
    return refill(tensor, iter(leaves))


class _Lengths:
    """An exchange of the lengths of some tensors along one dimension."""

    def __init__(self, wire: Wire, form: Form) -> None:
        self.wire, self.dim = wire, form.arguments["dim"]
        ranks = ["nested" if leaf.is_nested else f"{leaf.dim()}-dimensional" for leaf in form.leaves]
        dtypes = [str(leaf.dtype).removeprefix("torch.") for leaf in form.leaves]
        told = sorted(zip(form.names, dtypes, ranks, strict=True))
        self.statement = Statement(form.operation, form.arguments, tuple(told), site=form.site)
        # In an order that all processes share, whatever that of their dictionaries.
        dense = [
            index
            for index in sorted(range(len(form.leaves)), key=form.names.__getitem__)
            if not form.leaves[index].is_nested
        ]
        self.able = [index for index in dense if -form.leaves[index].dim() <= self.dim < form.leaves[index].dim()]
        # Of tensors that do not have the dimension all are sent, to see whether it was needed.
        self.unable = [
            (form.names[index], index, form.leaves[index].dim()) for index in dense if index not in set(self.able)
        ]
        self.lengths = struct.Struct(f"<{len(self.able) + sum(dims for *_, dims in self.unable)}q")
        self.has_nested = any(leaf.is_nested for leaf in form.leaves)

    def exchange(self, leaves: list[torch.Tensor]) -> tuple[dict[int, int], list[int]]:
        """The largest length of each tensor on any process, and which tensors are shorter than that on some."""
        if self.has_nested:
            warnings.warn(_NESTED, CannotPadNestedTensorWarning, stacklevel=3)
        dim = self.dim
        lengths = [leaves[index].shape[dim] for index in self.able]
        for _, index, _ in self.unable:
            lengths += leaves[index].shape
        own = self.lengths.pack(*lengths)
        bodies = self.wire.talk(self.statement, own)
        if all(body == own for body in bodies):
            return {}, []
        everyone = [self.lengths.unpack(body) for body in bodies]
        self._warn(everyone)
        columns = list(zip(*everyone, strict=True))[: len(self.able)]
        uneven = [index for index, lengths in zip(self.able, columns, strict=True) if min(lengths) < max(lengths)]
        return dict(zip(self.able, map(max, columns), strict=True)), uneven

    def _warn(self, everyone: list[tuple[int, ...]]) -> None:
        """Say which tensors would have to be padded but do not have the dimension."""
        start = len(self.able)
        for name, _, dims in self.unable:
            shapes = grouped([str(list(lengths[start : start + dims])) for lengths in everyone])
            start += dims
            if len(shapes) > 1:
                count = f"{dims} dimension{'s' * (dims > 1)}"
                told = "; ".join(f"{shape} on {ranks}" for shape, ranks in shapes)
                warnings.warn(_WITHOUT.format(dim=self.dim, name=name, count=count, shapes=told), stacklevel=4)


def _pad(leaf: torch.Tensor, dim: int, length: int, value: float, first: bool) -> torch.Tensor:
    size = leaf.shape[dim]
    if size == length:
        return leaf
    shape = list(leaf.shape)
    shape[dim] = length
    padded = leaf.new_full(shape, value)
    padded.narrow(dim, length - size if first else 0, size).copy_(leaf)
    return padded


def _check_value(value: float, dtypes: set[torch.dtype]) -> None:
    for dtype in dtypes:
        if dtype.is_floating_point or dtype.is_complex:
            continue
        low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        if not (low <= value <= high and int(value) == value):
            raise ValueError(
                f"pad_index={value} cannot be held by a tensor of {dtype}, which takes whole numbers from {low} to {high}. Pad "
                "that tensor on its own with another value, or convert it first."
            )


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Append zeros to the tensors of a batch until their length can be divided by the number of processes.

    Nothing is sent.

    Args:
        tensor: any nesting of containers around tensors, all `batch_size` long along `dim`.
        batch_size: their length now.
        num_processes: the number of parts that it is to be cut into.
        dim: the dimension that counts samples.

    Returns:
        The same structure; its tensors have the smallest length that is a multiple of `num_processes`.

    Raises:
        TypeError: a leaf is not a tensor.
        ValueError: a tensor has another length.
    """
    missing = -batch_size % num_processes

    def pad_input_tensor(leaf: torch.Tensor) -> torch.Tensor:
        if not -leaf.dim() <= dim < leaf.dim() or leaf.shape[dim] != batch_size:
            raise ValueError(
                f"pad_input_tensors(batch_size={batch_size}, dim={dim}) got a tensor of shape {list(leaf.shape)}; all tensors of "
                f"the batch must be {batch_size} long along that dimension."
            )
        return _pad(leaf, dim, batch_size + missing, 0, False)

    return recursively_apply(pad_input_tensor, tensor, error_on_other_type=True)

"""Reduce: every process gets the sum, mean, largest or smallest of the tensors of all, element by element."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from hasten.collectives.layout import Layout, flatten
from hasten.collectives.nested import refill
from hasten.collectives.parcels import Parcels, as_bytes
from hasten.collectives.wire import Form, Wire, wire_of
from hasten.world.process import World

_WANTS_GRADIENT = attrgetter("requires_grad")
REDUCTIONS = ("mean", "sum", "max", "min", "none")

_HALVES = (torch.float16, torch.bfloat16)
# Backends (and some of torch's own sums) do not know these types: they are combined in another one and converted back.
_WIDER = {
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0, *, world: World | None = None) -> Any:
    """Combine a nested structure of tensors over all processes, element by element.

    All tensors travel in one collective if they are small (16 KB in all); otherwise the check is followed by one collective
    per dtype, and tensors of 1 MB and more travel one by one (under gloo, two processes send theirs straight to each other).
    The processes first agree on names, dtypes and shapes.

    Args:
        tensor: any nesting of containers around dense tensors; the same names, dtypes and shapes on every process.
        reduction: "mean", "sum", "max", "min", or "none" for each process's own values.
        scale: the result is multiplied by it.
        world: the processes to combine; by default all.

    Returns:
        The same structure with new tensors of the same dtypes and shapes (integers become floating point if `scale` is not 1).
        The gradient of a result flows into this process's own tensor only, as if the others' were constants.

    Raises:
        TypeError: a leaf is not a dense tensor.
        ValueError: an unknown reduction; the mean of integers or booleans; the largest of complex numbers.
        DistributedOperationException: the processes do not hold the same; the same error on every one.

    Example:
        >>> reduce({"loss": torch.tensor(rank + 1.0)}, "mean")  # on 2 processes
        {'loss': tensor(1.5000)}
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is unknown; it can be {', '.join(map(repr, REDUCTIONS))}.")
    wire = wire_of(world)
    if wire is None or reduction == "none":
        leaves, _ = flatten("reduce", tensor)
        return refill(tensor, iter([leaf.clone() if scale == 1.0 else leaf * scale for leaf in leaves]))
    leaves, plan = wire.plan(_plan, "reduce", tensor, reduction=reduction)
    with torch.no_grad():
        results = plan.run(leaves)
    if scale != 1.0:
        results = [result * scale for result in results]
    if torch.is_grad_enabled() and any(map(_WANTS_GRADIENT, leaves)):
        factor = scale / wire.size if reduction == "mean" else scale
        results = [
            _OwnGradient.apply(leaf, result, factor) if leaf.requires_grad else result
            for leaf, result in zip(leaves, results, strict=True)
        ]
    return refill(tensor, iter(results))


class _OwnGradient(torch.autograd.Function):
    """A reduced value whose gradient flows into this process's share of it."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, reduced: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return reduced

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient * ctx.factor, None, None


def _plan(wire: Wire, form: Form) -> _InFrame | _Beside:
    reduction = form.arguments["reduction"]
    for name, leaf in zip(form.names, form.leaves, strict=True):
        if reduction == "mean" and not (leaf.is_floating_point() or leaf.is_complex()):
            raise ValueError(
                f"reduce(..., 'mean') of {name} ({leaf.dtype}): the mean of whole numbers is not a whole number. Convert first "
                "(`tensor.float()`), or use reduction='sum'."
            )
        if reduction in ("max", "min") and leaf.is_complex():
            raise ValueError(f"reduce(..., {reduction!r}) of {name} ({leaf.dtype}): complex numbers have no order.")
    layout = Layout(form.names, form.leaves)
    return _InFrame(wire, form, layout) if layout.nbytes <= wire.capacity else _Beside(wire, form)


class _InFrame:
    """A reduction whose tensors travel in the frames themselves: every process combines them itself, in rank order."""

    def __init__(self, wire: Wire, form: Form, layout: Layout) -> None:
        self.wire, self.statement, self.reduction = wire, form.statement(), form.arguments["reduction"]
        self.away = wire.is_away(form.leaves)
        self.sent = layout.views(wire.body)
        total = torch.empty(layout.nbytes, dtype=torch.uint8, device=wire.device)
        self.steps = [(run.within(wire.bodies), run.within(total)) for run in layout.runs]
        self.totals = layout.views(total)

    def run(self, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        self.wire.pack("reduce", self.sent, leaves, self.away)
        self.wire.meet(self.statement)
        for rows, total in self.steps:
            self._combine(rows, total)
        if self.away:
            return [total.to(leaf.device, copy=True) for total, leaf in zip(self.totals, leaves, strict=True)]
        return [total.clone() for total in self.totals]

    def _combine(self, rows: torch.Tensor, total: torch.Tensor) -> None:
        reduction, dtype = self.reduction, total.dtype
        wide = torch.float32 if dtype in _HALVES else _wider(dtype)
        if reduction == "min":
            total.copy_(rows.to(wide).amin(0))
        elif _takes_largest(reduction, dtype):
            total.copy_(rows.to(wide).amax(0))
        elif wide is dtype:
            torch.sum(rows, 0, dtype=dtype, out=total)
            if reduction == "mean":
                total.div_(self.wire.size)
        else:
            combined = rows.to(wide).sum(0)
            total.copy_(combined / self.wire.size if reduction == "mean" else combined)


class _Beside:
    """A reduction whose tensors follow the frames."""

    def __init__(self, wire: Wire, form: Form) -> None:
        self.wire, self.statement, self.reduction = wire, form.statement(), form.arguments["reduction"]
        self.away = wire.is_away(form.leaves)
        self.parcels = Parcels(form.names, form.leaves)

    def run(self, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        wire, parcels, layout = self.wire, self.parcels, self.parcels.layout
        packed = torch.empty(layout.nbytes, dtype=torch.uint8, device=wire.device)
        views = layout.views(packed)
        wire.pack("reduce", views, [leaves[index] for index in parcels.together], self.away)
        sent = wire.prepare("reduce", lambda: [wire.ready(leaves[index]) for index in parcels.alone])
        alone = wire.prepare("reduce", lambda: list(map(torch.empty_like, sent)))
        pairs = [wire.is_pair and self._is_plain(tensor.dtype) for tensor in sent]
        copies = [(total, own) for total, own, pair in zip(alone, sent, pairs, strict=True) if not pair]
        wire.meet(self.statement, meanwhile=lambda: _copy(copies))
        for run in layout.runs:
            self._exchange(run.within(packed))
        for total, own, pair in zip(alone, sent, pairs, strict=True):
            if pair:
                self._combine_pair(total, own)
            else:
                self._exchange(total)
        results = dict(zip(parcels.together, (view.clone() for view in views), strict=True))
        results.update(zip(parcels.alone, alone, strict=True))
        if self.away:
            return [results[index].to(leaf.device) for index, leaf in enumerate(leaves)]
        return [results[index] for index in range(len(leaves))]

    def _is_plain(self, dtype: torch.dtype) -> bool:
        """Whether tensors of this dtype are combined as they are, by one operation on two of them."""
        return _wider(dtype) is dtype and not (self.reduction == "mean" and dtype in _HALVES)

    def _combine_pair(self, total: torch.Tensor, own: torch.Tensor) -> None:
        """Receive the other process's tensor into `total` and combine it with `own` there, which saves a copy."""
        self.wire.fill_rows([as_bytes(total)] * 2, as_bytes(own))
        if self.reduction == "max":
            torch.maximum(total, own, out=total)
        elif self.reduction == "min":
            torch.minimum(total, own, out=total)
        else:
            total.add_(own)
        if self.reduction == "mean":
            total.div_(2)

    def _exchange(self, tensor: torch.Tensor) -> None:
        wide = _wider(tensor.dtype)
        total = tensor if wide is tensor.dtype else tensor.to(wide)
        # The sum of halves may overflow where their mean does not.
        early = self.reduction == "mean" and tensor.dtype in _HALVES
        if early:
            total.div_(self.wire.size)
        self.wire.all_reduce(total, _operation(self.reduction, tensor.dtype))
        if self.reduction == "mean" and not early:
            total.div_(self.wire.size)
        if total is not tensor:
            tensor.copy_(total)


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source)


def _wider(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point and dtype.itemsize == 1:
        return torch.float32
    return _WIDER.get(dtype, dtype)


def _takes_largest(reduction: str, dtype: torch.dtype) -> bool:
    # The sum of booleans is a boolean: whether any of them is true.
    return reduction == "max" or dtype is torch.bool


def _operation(reduction: str, dtype: torch.dtype) -> Any:
    if reduction == "min":
        return dist.ReduceOp.MIN
    return dist.ReduceOp.MAX if _takes_largest(reduction, dtype) else dist.ReduceOp.SUM

"""The order in which DDP exchanges gradients: learned in the first exchange of a run, and repeated by a run that continues it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hasten.world import torch_private


class ExchangeOrder:
    """Notes in which order the gradients of a DDP model become ready for their first exchange.

    DDP gathers gradients in buckets: at first in the reverse order of the parameters, and after the first exchange in the order in
    which they became ready on rank 0. Among three ranks and more a sum depends, in its last bit, on its place in a bucket. So a
    run that is to continue another one exactly must begin with the buckets that the other one had.

    Args:
        model: not exchanged yet. Only what is noted on rank 0 counts.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.names: list[str] = []
        self._model = weakref.ref(model)
        self._expected = _trainable(model)
        self._watches = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._note(name))
            for name, parameter in self._expected.items()
        ]

    @property
    def is_known(self) -> bool:
        """Whether every gradient has been exchanged."""
        return len(self.names) == len(self._expected)

    def _note(self, name: str) -> None:
        model = self._model()
        if model is None or not model.require_backward_grad_sync:
            return
        if name in self.names:  # an exchange that was not finished begins again
            self.names.clear()
        self.names.append(name)
        if self.is_known:
            while self._watches:
                self._watches.pop().remove()


def matters(model: Any, ranks: int) -> bool:
    """Whether DDP rearranges this model's gradients, whether that shows, and whether an exchange of nothing leaves no trace."""
    rearranges = not (model.find_unused_parameters or model.static_graph)
    return ranks > 2 and rearranges and not torch_private.has_communication_hook(model)


def repeat(model: DistributedDataParallel, names: Sequence[str]) -> None:
    """Exchange gradients of zero in a given order, so that DDP arranges the next ones by it; call it on every rank.

    Gradients that are there stay. Does nothing if the model's trainable parameters are not those of `names`.
    """
    parameters = _trainable(model)
    if sorted(names) != sorted(parameters):
        return
    kept = [(parameter, parameter.grad) for parameter in parameters.values()]
    for parameter, _ in kept:
        parameter.grad = None
    model.reducer.prepare_for_backward([])
    for name in names:
        torch.autograd.backward(parameters[name], torch.zeros_like(parameters[name]))
    for parameter, gradient in kept:
        parameter.grad = gradient


def _trainable(model: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    ignored = model.parameters_to_ignore
    return {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }

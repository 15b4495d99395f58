"""Local SGD: each process trains its own copy of the model for some steps, then the copies are averaged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hasten.collectives import average
from hasten.training.local_steps import LocalSteps, floating


class LocalSGD(LocalSteps):
    """A context in which gradients are not exchanged; instead the parameters are averaged after every N-th `step` and at the end.

    Averaging takes one collective per dtype, after a small one in which the processes agree, and memory for one copy of the
    parameters while it runs. Buffers (the statistics of BatchNorm) stay each process's own until the first forward pass after
    the context, in which DDP sends those of rank 0 to all. On one process it does nothing. After an error in the body nothing is
    averaged.

    `step` counts its calls, so under `accelerator.accumulate` the steps are micro-batches.

    Args:
        accelerator: the one that prepared the model.
        model: the prepared model, which DDP replicates.
        local_sgd_steps: steps between two averagings.
        enabled: False leaves everything as it is.
        optimizer: also average its state, so that its momenta belong to the averaged parameters: the floating-point tensors, on
            their parameters' device, but for counters named "step". By default each process keeps its own.
        trainable_only: leave out parameters that do not require gradients. They are equal everywhere unless you change them
            yourself, so with adapters on a frozen model this saves nearly all of the exchange.

    Raises:
        ValueError: `local_sgd_steps` is not positive, the model is not prepared, or the optimizer's state can not be averaged.
        NotImplementedError: the model is sharded.

    Source: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", arXiv 1808.07217.

    Example:
        >>> with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
        ...     for batch in loader:
        ...         accelerator.backward(loss_of(model, batch))
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         local_sgd.step()
    """

    def __init__(
        self,
        accelerator: Any,
        model: torch.nn.Module,
        local_sgd_steps: int,
        enabled: bool = True,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        trainable_only: bool = False,
    ) -> None:
        super().__init__(accelerator, model, local_sgd_steps, enabled, "local_sgd_steps")
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            raise ValueError(f"LocalSGD(optimizer={optimizer!r}): it must be an optimizer, or None.")
        self.enabled = self.enabled and accelerator.num_processes > 1
        self.local_sgd_steps = local_sgd_steps
        self.optimizer = optimizer
        self.trainable_only = trainable_only

    def _meet(self, end: bool) -> None:
        tensors: dict[str, torch.Tensor] = dict(floating(self.model, self.trainable_only))
        if self.optimizer is not None:
            tensors.update(_state(self.optimizer))
        in_round = self.num_steps % self._steps
        average.average_(tensors, "LocalSGD", world=self.accelerator.world, end=end, in_round=in_round)


def _state(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an optimizer's state that can be averaged, by the place of their parameter and their name."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        for name, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor) or name == "step" or value.device != parameter.device:
                continue
            if not (value.is_floating_point() or value.is_complex()):
                raise ValueError(
                    f"LocalSGD(optimizer=...): {type(optimizer).__name__} keeps {name!r} in {value.dtype}, which can not be "
                    "averaged. Leave `optimizer` out; each process then keeps its own state."
                )
            yield f"optimizer state {name!r} of parameter {index}", value

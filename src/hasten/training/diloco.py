"""DiLoCo: each process trains its own copy of the model for many steps; an outer optimizer moves all by the mean of their ways."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from hasten.collectives import average
from hasten.training.local_steps import LocalSteps, floating, unwrapped
from hasten.world import torch_private


class DiLoCo(LocalSteps):
    """A context in which gradients are not exchanged; after every N-th `step` all copies of the model become the same again.

    That happens in a round. How far each process has come since the last round, the old parameters minus its present ones, is
    averaged over the processes and taken for a gradient (the pseudo-gradient), with which an outer SGD with Nesterov momentum
    steps from the old parameters. All processes go on from there; each keeps the state of its own (inner) optimizer. Steps after
    the last whole round are ended by a round, too, when the body ends; an error in the body leaves the copies as they are.

    `step` counts updates: under `accelerator.accumulate` micro-batches inside a window do not count. The loop stays as it is but
    for the calls of `step`. With `outer_lr=1` and `outer_momentum=0` it is local SGD.

    A round takes one collective per dtype after a small one in which the processes agree. In memory there are two more copies of
    the parameters (the old ones and the momentum; of half-precision parameters in float32), and two more while a round runs.
    Only parameters that require gradients take part. Buffers stay each process's own until the first forward pass after the
    context, in which DDP sends those of rank 0 to all.

    Register it with `accelerator.register_for_checkpointing`, and save after a round (`in_round` is 0): in between, a checkpoint
    has the parameters of rank 0 only.

    Args:
        accelerator: the one that prepared the model.
        model: the prepared model, which DDP replicates; it also works on one process.
        inner_steps: updates between two rounds (N); the source takes 500.
        enabled: False leaves everything as it is.
        outer_lr: learning rate of the outer optimizer.
        outer_momentum: its Nesterov momentum; 0 for plain SGD.

    Attributes:
        in_round: updates since the last round.
        outer_optimizer: the outer `torch.optim.SGD`, for which there may be a schedule.

    Raises:
        ValueError: a setting is not legal, or the model is not prepared.
        NotImplementedError: the model is sharded.

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105.

    Example:
        >>> diloco = DiLoCo(accelerator, model, inner_steps=500)
        >>> accelerator.register_for_checkpointing(diloco)
        >>> with diloco:
        ...     for batch in loader:
        ...         accelerator.backward(loss_of(model, batch))
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         diloco.step()
    """

    def __init__(
        self,
        accelerator: Any,
        model: torch.nn.Module,
        inner_steps: int,
        enabled: bool = True,
        *,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
    ) -> None:
        super().__init__(accelerator, model, inner_steps, enabled, "inner_steps")
        if not 0 < outer_lr < math.inf or not 0 <= outer_momentum < 1:
            raise ValueError(
                f"DiLoCo(outer_lr={outer_lr}, outer_momentum={outer_momentum}): the first must be a finite number above 0, the "
                "second at least 0 and below 1."
            )
        self.inner_steps = inner_steps
        self.in_round = 0
        # By the names that checkpoints know, without DDP's prefix.
        self._inner = dict(floating(unwrapped(self.model), trainable_only=True))
        if not self._inner:
            raise ValueError(
                f"DiLoCo: no parameter of {type(model).__name__} requires gradients, so there is nothing to train."
            )
        self._outer = {name: _copy(parameter) for name, parameter in self._inner.items()}
        self.outer_optimizer = torch.optim.SGD(
            self._outer.values(), lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0
        )

    def __enter__(self) -> DiLoCo:
        if self.enabled and self.in_round == 0:
            self._begin()
        return super().__enter__()

    def step(self) -> None:
        """Count an update, if one was made; after every N-th there is a round. Call it after the optimizer's step."""
        if not self.enabled or not self.accelerator.sync_gradients:
            return
        if self._quiet is None:
            raise RuntimeError("DiLoCo.step belongs into its context: `with diloco: ...`.")
        self.num_steps += 1
        self.in_round += 1
        if self.in_round == self.inner_steps:
            self._meet(end=False)

    def _begin(self) -> None:
        """Take over parameters that were changed since the last round, by loading weights, say."""
        with torch.no_grad():
            for name, parameter in self._inner.items():
                outer = self._outer[name]
                # What was rounded to the model's precision in a round is not a change.
                if not torch.equal(outer.to(parameter.dtype), parameter):
                    outer.copy_(parameter)

    @torch.no_grad()
    def _meet(self, end: bool) -> None:
        """The round."""
        ways = {}
        if self.in_round:
            ways = {name: outer - self._inner[name] for name, outer in self._outer.items()}
        ways = average.average(ways, "DiLoCo", world=self.accelerator.world, end=end, in_round=self.in_round)
        if not self.in_round:
            return
        for name, outer in self._outer.items():
            outer.grad = ways[name]
        self.outer_optimizer.step()
        self.outer_optimizer.zero_grad()
        torch_private.copy_each(list(self._inner.values()), list(self._outer.values()))
        self.in_round = 0

    def state_dict(self) -> dict[str, Any]:
        """The parameters after the last round, the outer optimizer's state, and the counts."""
        if self.in_round and self.accelerator.num_processes > 1:
            warnings.warn(
                f"DiLoCo is saved {self.in_round} steps after a round, when the copies of the model differ: those of the other "
                f"processes are not in the checkpoint. Save when `in_round` is 0: after every {self.inner_steps}. step.",
                stacklevel=2,
            )
        return {
            "parameters": {name: outer.detach() for name, outer in self._outer.items()},
            "outer_optimizer": self.outer_optimizer.state_dict(),
            "num_steps": self.num_steps,
            "in_round": self.in_round,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state; the model's own parameters are loaded with the model.

        Raises:
            ValueError: it belongs to a model with other parameters.
        """
        saved = state_dict["parameters"]
        shapes, own = ({name: value.shape for name, value in held.items()} for held in (saved, self._outer))
        differing = sorted(name for name in {*shapes, *own} if shapes.get(name) != own.get(name))
        if differing:
            raise ValueError(
                f"This state of DiLoCo belongs to another model. The parameters that are not in both, or not of the same shape: "
                f"{', '.join(differing[:8])}{', ...' if len(differing) > 8 else ''}."
            )
        with torch.no_grad():
            for name, outer in self._outer.items():
                outer.copy_(saved[name])
        self.outer_optimizer.load_state_dict(state_dict["outer_optimizer"])
        self.num_steps, self.in_round = state_dict["num_steps"], state_dict["in_round"]


def _copy(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    # In half precision most outer steps would be rounded away.
    half = parameter.is_floating_point() and parameter.dtype.itemsize <= 2
    return torch.nn.Parameter(parameter.detach().to(torch.float32 if half else parameter.dtype, copy=True))

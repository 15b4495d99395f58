"""A moving average of the weights: of each parameter, what this process holds of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import nn

from hasten.weights.gradients import local_parts
from hasten.weights.whole import is_divided, own_name, stream
from hasten.world import process, torch_private
from hasten.world.context import CONTEXT
from hasten.world.process import World

_SHOWN = 3


class ExponentialMovingAverage:
    """The exponential moving average of the parameters that a model trains, to be evaluated and saved instead of them.

    It holds fp32 averages of this process's shards only (of the whole where nothing is divided), so its memory is that of the
    trained parameters in fp32, and `update` exchanges nothing. Buffers are copied as they are. Make it before or after `prepare`;
    parameters that begin to be trained later are not averaged.

    Args:
        model: the model, prepared or not.
        decay: how much of the average stays in one update, from 0 to 1.
        warmup: begin with a smaller decay, (1 + n) / (10 + n) in update n = 1, 2, ..., while that is less.
        update_after: for so many steps the average is only a copy of the parameters.
        update_every: update at each so manieth step.

    Raises:
        ValueError: a number is not legal, nothing is trained, or parameters have no values yet.

    Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992, in its exponential form.

    Example:
        >>> average = ExponentialMovingAverage(model, decay=0.999)
        >>> accelerator.register_for_checkpointing(average)
        >>> for batch in loader:
        ...     with accelerator.accumulate(model):
        ...         accelerator.backward(loss_of(model, batch))
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         average.update()
        >>> with average.swapped():
        ...     evaluate(model)
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float = 0.999,
        *,
        warmup: bool = True,
        update_after: int = 0,
        update_every: int = 1,
    ) -> None:
        _check_numbers(decay, update_after, update_every)
        self.decay, self.warmup = decay, warmup
        self.update_after, self.update_every = update_after, update_every
        self.steps = 0
        self._model = _own(model)
        self._reshard()
        self._places, self._names = _places(self._model, "_parameters")
        self._buffer_places, self._buffer_names = _places(self._model, "_buffers")
        self._check_values()
        with torch.no_grad():
            self._known = self._read()
            self._averages: list[Any] = [each.detach().to(torch.float32, copy=True) for each in self._known]
            self._buffers = [each.detach().clone() for each in self._read_buffers()]
        self._is_swapped = False

    def _check_values(self) -> None:
        if not self._places:
            raise ValueError(
                f"{type(self._model).__name__} trains no parameter (`requires_grad`), so there is nothing to average."
            )
        empty = [name for name, each in zip(self._names, self._read(), strict=True) if each.is_meta]
        if empty:
            raise ValueError(
                f"{type(self._model).__name__} has parameters without values, on the meta device ({empty[0]}, ...). Make the "
                "average after they have been loaded."
            )

    # -- averaging ---------------------------------------------------------------------------------------------------

    def update(self) -> bool:
        """Take the parameters into the average, if the present micro-batch completes its accumulation window.

        Returns whether it did; otherwise this is no step. No collective, and a few operations for all parameters.

        Raises:
            RuntimeError: the parameters are the averages at present (`swapped`), or whole for a while (`gathered`).
        """
        if not CONTEXT.gradient_state.get("sync_gradients", True):
            return False
        self._check_not_swapped("update")
        self.steps += 1
        if self.steps > self.update_after and (self.steps - self.update_after) % self.update_every:
            return False
        weight = 1.0 - self.decay_at(self.steps)
        with torch.no_grad():
            parameters = self._parameters()
            for averages, now in _by_format(local_parts(self._averages), local_parts(parameters)):
                torch_private.move_each(averages, now, weight)
            if self._buffers:
                torch_private.copy_each(self._buffers, self._read_buffers())
        return True

    def decay_at(self, step: int) -> float:
        """The decay in a step, counted from 1; 0 while the average is a copy."""
        if step <= self.update_after:
            return 0.0
        count = (step - self.update_after) // self.update_every
        return min(self.decay, (1 + count) / (10 + count)) if self.warmup else self.decay

    # -- using -------------------------------------------------------------------------------------------------------

    @contextmanager
    def swapped(self) -> Iterator[nn.Module]:
        """Inside, the model has the averages; after it, also after an error, bit for bit what it had before.

        Gives the model. Needs memory for a copy of this process's shards. Call it on all processes that evaluate.
        """
        self._check_not_swapped("swapped")
        own, averages = self._parts()
        with torch.no_grad():
            backup = [each.clone() for each in own]
            torch_private.copy_each(own, averages)
        self._is_swapped = True
        try:
            yield self._model
        finally:
            self._is_swapped = False
            self._reshard()
            with torch.no_grad():
                torch_private.copy_each(own, backup)

    def _parts(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """This process's part of the parameters and buffers, and of what is held for them."""
        self._reshard()  # what a forward pass has left whole would not change
        own = [*local_parts(each.detach() for each in self._parameters()), *self._read_buffers()]
        return own, [*local_parts(self._averages), *self._buffers]

    def copy_to(self, model: nn.Module, world: World | None = None) -> None:
        """Give the averages, and the buffers, to another model, or to this one for good.

        A model that is divided in the same way takes its shards; a whole one gets whole tensors, for which all processes must
        call this.

        Args:
            model: the other model.
            world: those processes; by default all of the job.

        Raises:
            ValueError: it has no parameter of such a name and shape.
        """
        self._check_not_swapped("copy_to")
        target = _own(model)
        _reshard(target)
        found: dict[str, Any] = {}
        found |= {own_name(name): value for name, value in target.named_parameters(remove_duplicate=False)}
        found |= {own_name(name): value for name, value in target.named_buffers(remove_duplicate=False)}
        entries = {**dict(zip(self._names, self._averages, strict=True)), **self._named_buffers()}
        _check_names(entries, {name: value for name, value in found.items() if name in entries}, type(target).__name__)
        with torch.no_grad():
            spread = {name for name, value in entries.items() if is_divided(value) and not is_divided(found[name])}
            for name in entries.keys() - spread:
                _copy(found[name], entries[name])
            whole = [([name], value) for name, value in entries.items() if name in spread]
            for name, value in stream(whole, world or process.current(), "ExponentialMovingAverage.copy_to"):
                found[name].copy_(value)

    # -- keeping -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The averages by qualified name, in a sharded run as DTensors, each with this process's shard; the buffers; the steps.

        `torch.distributed.checkpoint` saves and divides them anew. `accelerator.save_state` asks for `whole_state_dict`.
        """
        self._parameters()
        return {
            "steps": self.steps,
            "averages": dict(zip(self._names, self._averages, strict=True)),
            "buffers": self._named_buffers(),
        }

    def whole_state_dict(self, world: World | None = None) -> dict[str, Any]:
        """As `state_dict`, with whole tensors, in a sharded run on the CPU of rank 0.

        Args:
            world: the processes, which all call this; by default all of the job.
        """
        state = self.state_dict()
        world = world or process.current()
        if world.size == 1 or not any(map(is_divided, self._averages)):
            return state
        entries = [([name], value) for name, value in state["averages"].items()]
        whole = stream(entries, world, "ExponentialMovingAverage.whole_state_dict")
        state["averages"] = {name: value.cpu() for name, value in whole if world.is_main}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state that was saved with any number of processes; each takes its part of what is whole.

        Raises:
            ValueError: names or shapes differ.
        """
        self._check_not_swapped("load_state_dict")
        self._parameters()
        held = {**dict(zip(self._names, self._averages, strict=True)), **self._named_buffers()}
        saved = {**state_dict["averages"], **state_dict["buffers"]}
        _check_names(held, saved, "the saved average")
        unknown = sorted(saved.keys() - held.keys())
        if unknown:
            raise ValueError(
                f"The saved average has {_some(unknown)}, which {type(self._model).__name__} does not train."
            )
        with torch.no_grad():
            for name, tensor in held.items():
                _copy(tensor, saved[name])
        self.steps = state_dict["steps"]

    # -- the model's tensors -----------------------------------------------------------------------------------------

    def _read(self) -> list[Any]:
        return [module._parameters[key] for module, key in self._places]

    def _read_buffers(self) -> list[Any]:
        return [module._buffers[key] for module, key in self._buffer_places]

    def _named_buffers(self) -> dict[str, torch.Tensor]:
        return dict(zip(self._buffer_names, self._buffers, strict=True))

    def _parameters(self) -> list[Any]:
        """The parameters as the model has them now; the averages are moved and divided as they are."""
        found = self._read()
        if not all(map(is_, found, self._known)) or found[0].device != self._averages[0].device:
            self._reshard()
            found = self._read()
            for index, (parameter, average) in enumerate(zip(found, self._averages, strict=True)):
                self._averages[index] = self._alike(average, parameter)
            self._buffers = [held.to(now.device) for held, now in zip(self._buffers, self._read_buffers(), strict=True)]
            self._known = found
        return found

    def _alike(self, average: Any, parameter: Any) -> Any:
        if is_divided(average) and not is_divided(parameter):
            raise RuntimeError(
                "The model has whole parameters at present: use its average outside of `with accelerator.gathered(model)`."
            )
        if not is_divided(parameter) or is_divided(average):
            return average if average.device == parameter.device else average.to(parameter.device)
        from hasten.weights.parts import copy_own_part

        divided = torch.empty_like(parameter.detach(), dtype=torch.float32, requires_grad=False)
        copy_own_part(divided, average)
        return divided

    def _reshard(self) -> None:
        _reshard(self._model)

    def _check_not_swapped(self, name: str) -> None:
        if self._is_swapped:
            raise RuntimeError(
                f"{name} inside `with average.swapped()`: the model has the averages at present. Leave the context first."
            )


def _check_numbers(decay: float, update_after: int, update_every: int) -> None:
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"decay={decay}: it must be from 0 to 1, say 0.999.")
    if update_after < 0 or update_every < 1:
        raise ValueError(
            f"update_after={update_after}, update_every={update_every}: steps are counted, from 0 and from 1 on."
        )


def _own(model: Any) -> nn.Module:
    """The user's own module inside what DDP and torch.compile have made of it."""
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, nn.parallel.DistributedDataParallel):
        inner = inner.module
    return getattr(inner, "_orig_mod", inner)


def _reshard(model: nn.Module) -> None:
    for module in model.modules():
        reshard: Any = getattr(module, "reshard", None)
        if reshard is not None:
            reshard()


def _places(model: nn.Module, kind: str) -> tuple[list[tuple[nn.Module, str]], list[str]]:
    """Where a model has the parameters that it trains, or the buffers that it saves, each once, and their names."""
    found: dict[int, tuple[tuple[nn.Module, str], str]] = {}
    for prefix, module in model.named_modules():
        for key, value in getattr(module, kind).items():
            wanted = value is not None and (
                value.requires_grad if kind == "_parameters" else key not in module._non_persistent_buffers_set
            )
            if wanted:
                found.setdefault(id(value), ((module, key), own_name(f"{prefix}.{key}" if prefix else key)))
    return [place for place, _ in found.values()], [name for _, name in found.values()]


def _by_format(averages: Sequence[torch.Tensor], now: Sequence[torch.Tensor]) -> Iterator[tuple[list[Any], list[Any]]]:
    """Both lists, divided by the format and device of the second one."""
    groups: dict[Any, tuple[list[Any], list[Any]]] = {}
    for average, value in zip(averages, now, strict=True):
        pair = groups.setdefault((value.dtype, value.device), ([], []))
        pair[0].append(average)
        pair[1].append(value)
    yield from groups.values()


def _copy(into: Any, source: Any) -> None:
    """Copy what this process has of a tensor, from one that is divided in the same way, or whole."""
    if is_divided(source):
        source_part, target_part = local_parts([source, into])
        target_part.copy_(source_part)
    elif is_divided(into):
        from hasten.weights.parts import copy_own_part

        copy_own_part(into, source)
    else:
        into.copy_(source)


def _check_names(wanted: dict[str, Any], found: dict[str, Any], where: str) -> None:
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ValueError(f"There is no {_some(missing)} in {where}.")
    for name, value in wanted.items():
        if value.shape != found[name].shape:
            raise ValueError(f"{name} has the shape {list(value.shape)}, but {list(found[name].shape)} in {where}.")
        both = is_divided(value) and is_divided(found[name])
        if both and (value.device_mesh, value.placements) != (found[name].device_mesh, found[name].placements):
            raise ValueError(f"{name} is divided over the processes in another way in {where}. Use whole tensors.")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")

"""What must be alike on all ranks: the units that each pass through a model gathers."""

from __future__ import annotations

import functools
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hasten.parallel.units import Unit
from hasten.weights.names import class_name
from hasten.world import torch_private
from hasten.world.agreement import DistributedOperationException, grouped
from hasten.world.frames import Frames, frames_of
from hasten.world.process import World

_FIRST = 4  # passes in which ranks agree on every unit; what always differs between them differs there
_EVERY = 8  # passes from one comparison to the next: an exchange costs about as much as a small layer
_SHOWN = 12
_ADVICE = (
    "All processes must run the same layers in the same order: multiply the result of a layer that one of them leaves out by 0, "
    "draw what is left out from the same random numbers everywhere, and call the model on all of them."
)
_WATCHED = "_watched_passes"  # on a model
_BACKENDS = ("gloo", "nccl", "timed out", "connection closed", "connection reset")


def inside(model: Any) -> AbstractContextManager[None]:
    """The context of a method that runs parts of a model; does nothing if the model is not sharded."""
    passes: Passes | None = getattr(model, _WATCHED, None)
    return nullcontext() if passes is None else passes.inside()


class Passes:
    """Watches that all ranks gather the same units in the same order, whatever they compute.

    A backend sees only sizes: where ranks go through different layers, it would stop the process, wait, or take one layer for
    another. In the first passes, and always in debug mode, the ranks agree on each unit before it is gathered. Later they compare
    what they have gathered every few passes, while they go on; `check` raises before the next update or pass, and `compare`
    before anything is saved.

    Args:
        model: the root of a sharded model.
        units: what is gathered together.
        world: the ranks.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], world: World) -> None:
        self._model = weakref.ref(model)
        self._kind = class_name(model)
        self._world = world
        self._units = [unit for unit in units if unit.parameters]
        self._depth = 0  # of forward passes, and of methods that run as they do
        self._passes = 0
        self._gathered: list[int] = []
        self._last = "nothing"
        self._exchanges: deque[_Exchange] = deque()
        # What is compiled must not look into it: it counts.
        enter = torch.compiler.disable(self._enter)
        for number, unit in enumerate(self._units):
            prefix, _, key = unit.parameters[0].rpartition(".")
            held = model.get_submodule(prefix)._parameters
            for name in unit.modules:
                hook = functools.partial(enter, number, name or "the model", held, key)
                model.get_submodule(name).register_forward_pre_hook(hook, prepend=True)
        setattr(model, _WATCHED, self)
        model.register_forward_pre_hook(torch.compiler.disable(lambda *_: self.begin()), prepend=True)
        model.register_forward_hook(torch.compiler.disable(lambda *_: self.end()), always_call=True)

    def begin(self) -> None:
        """Enter a pass, or a method that runs parts of the model."""
        if self._depth == 0:
            self.check()
        self._depth += 1

    def end(self) -> None:
        """Leave it; what it has gathered is compared."""
        self._depth -= 1
        error = sys.exc_info()[1]
        if error is not None:
            self.locate(error)
        elif self._depth == 0 and self._gathered:
            if self._agrees:
                self._agree("(the end of the pass)")
                self._gathered = []
            self._passes += 1
            if self._gathered and self._passes % _EVERY == 0:
                self._exchange()

    def compare(self) -> None:
        """Compare what has been gathered since the last time, now; every rank calls it.

        Raises:
            DistributedOperationException: see `check`.
        """
        frames_of(self._world).agree("save_state")  # whoever does not come is named
        self._exchange()
        while self._exchanges:
            self._look(self._exchanges.popleft())

    def _exchange(self) -> None:
        self._exchanges.append(_Exchange(frames_of(self._world), self._gathered))
        self._gathered = []

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A pass, or a method that runs parts of the model, as a context."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def check(self) -> None:
        """Raise if ranks have gathered different units in a pass.

        Raises:
            DistributedOperationException: names the ranks, and what this one has gathered. On every rank.
        """
        while self._exchanges and self._exchanges[0].is_there:
            self._look(self._exchanges.popleft())

    def _look(self, exchange: _Exchange) -> None:
        found = exchange.digests()
        if len(set(found)) == 1:
            return
        ways = " and ".join(ranks for _, ranks in grouped(found))
        raise DistributedOperationException(
            f"{ways} went different ways through {self._kind}, so that some took the weights or gradients of one layer for those "
            f"of another: results of the last {_EVERY} passes are wrong. Go on from the last checkpoint. Rank {self._world.rank} "
            f"gathered {self._spell(exchange.gathered)}. {_ADVICE} In debug mode (`hasten launch --debug`) the error comes before "
            "anything is computed, and names the layer."
        )

    def locate(self, error: BaseException) -> None:
        """Add to an error of the backend where this rank is in the model."""
        text = str(error)
        if isinstance(error, RuntimeError) and any(word in text.lower() for word in _BACKENDS) and _ADVICE not in text:
            error.args = (
                f"{text}\nOf {self._kind} rank {self._world.rank} had last gathered {self._last}. If others went through other "
                f"layers, or none: {_ADVICE} `hasten launch --debug` names the layer and the processes.",
            )

    @property
    def _agrees(self) -> bool:
        return self._passes < _FIRST or frames_of(self._world).debug

    def _enter(self, number: int, name: str, held: dict[str, Any], key: str, module: Any, inputs: Any) -> None:
        if not isinstance(held.get(key), DTensor):
            return  # it is gathered already
        if self._depth == 0 and not torch_private.in_backward():  # there a layer may run again
            self._from_outside(number, name, module)
        self._gathered.append(number)
        self._last = self._name(number)
        if self._agrees:
            self._agree(name)

    def _agree(self, name: str) -> None:
        try:
            frames_of(self._world).agree("forward", unit=name)
        except DistributedOperationException as error:
            raise DistributedOperationException(f"{error}\n{_ADVICE}") from None

    def _from_outside(self, number: int, name: str, module: Any) -> None:
        """A unit runs although the model does not: one that is gathered by itself may."""
        others = [each or "the model" for each in self._units[number].modules if (each or "the model") != name]
        if others:
            raise RuntimeError(
                f"{name!r} of {self._kind} was called outside of a forward pass of the model, but is gathered together with "
                f"{', '.join(map(repr, others))}, by the model. Call the model. If a method of yours calls it, let that run as "
                "forward does: `accelerator.register_forward_method(model, name_of_the_method)`, once after `prepare`."
            )
        model = self._model()
        if model is not None and hasattr(model, "reshard"):
            torch_private.prepare_root(model)  # this module must not become the root
        if not torch.is_grad_enabled():  # what stays gathered would not follow the next update

            def free(*_: Any) -> None:
                handle.remove()
                module.reshard()

            handle = module.register_forward_hook(free, always_call=True)

    def _name(self, number: int) -> str:
        return " + ".join(name or "the model" for name in self._units[number].modules)

    def _spell(self, gathered: Sequence[int]) -> str:
        names = [self._name(number) for number in gathered[:_SHOWN]]
        rest = len(gathered) - len(names)
        return ", ".join(names) + (f" and {rest} more" if rest else "")


@dataclass
class _Exchange:
    """The comparison of one pass, under way."""

    frames: Frames
    gathered: list[int]
    _work: Any = field(init=False)
    _found: torch.Tensor = field(init=False)
    _event: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        device = self.frames.device
        with torch.inference_mode(False):
            own = torch.tensor([zlib.crc32(repr(self.gathered).encode())], dtype=torch.int64, device=device)
            self._found = torch.empty(self.frames.size, dtype=torch.int64, device=device)
        self._work = self.frames.begin_gather(self._found, own)
        if device.type != "cpu":  # nobody waits for the device: what has arrived is looked at
            self._work.wait()
            self._found = torch.empty_like(self._found, device="cpu", pin_memory=True).copy_(
                self._found, non_blocking=True
            )
            self._event = torch.Event(device)
            self._event.record()

    @property
    def is_there(self) -> bool:
        return self._event is None or bool(self._event.query())

    def digests(self) -> list[int]:
        if self._event is None:
            self._work.wait()
        else:
            self._event.synchronize()
        return [int(each) for each in self._found.tolist()]

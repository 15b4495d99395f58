"""Activation checkpointing: a layer keeps its input only, and runs again in the backward pass."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hasten.parallel.units import Choose
from hasten.world.context import CONTEXT

_logger = logging.getLogger(__name__)


class Recomputed(nn.Module):
    """What is mixed into the class of a layer that runs again in the backward pass; its names stay what they are.

    Random numbers are drawn again as they were drawn the first time, and buffers are found as they were (running statistics are
    not counted twice). Hooks of the layer run again too. A pickle holds the layer of its own class, which keeps everything.
    """

    _own: type[nn.Module]
    _recompute: Recompute | None = None  # a layer that is made from another one of this class, like a slice, has none

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, keeping its input and, with a policy, the results of some operations."""
        run = super().__call__
        how = self._recompute
        if how is None or not torch.is_grad_enabled():
            return run(*args, **kwargs)
        if not torch.compiler.is_compiling() and any(True for _ in self.buffers()):
            run = _Repeated(self, run)
        # Everything that is saved inside is recomputed, so that only the layer's input reaches the outer hooks.
        with torch.autograd.graph.save_on_cpu(pin_memory=True) if how.offload else nullcontext():
            return checkpoint(run, *args, use_reentrant=False, **how.arguments, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in self.__dict__.items() if name != "_recompute"}
        return _bare, (self._own,), state

    def __deepcopy__(self, memo: dict[int, Any]) -> Recomputed:
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__.update(copy.deepcopy({**self.__dict__, "_recompute": None}, memo), _recompute=self._recompute)
        return twin


def _bare(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


class _Repeated:
    """One call of a layer that can be made again: with the buffers of the first time, and without a trace."""

    def __init__(self, layer: nn.Module, run: Callable[..., Any]) -> None:
        self._layer = layer
        self._run = run
        self._before: list[tuple[dict[str, Any], str, torch.Tensor]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is None:
            return self._first(*args, **kwargs)
        now = [(buffers, name, buffers.get(name)) for buffers, name, _ in self._before]
        copies = {id(value): value.clone() for _, _, value in self._before}  # a graph that is kept runs once more
        for buffers, name, value in self._before:
            buffers[name] = copies[id(value)]
        try:
            return self._run(*args, **kwargs)
        finally:  # a second run stops early, by an exception, when everything is there
            for buffers, name, current in now:
                buffers[name] = current

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        """Run, and keep what the buffers were of those that have changed."""
        # Tensors of inference mode can not change outside of it. What batch norms do to their statistics counts as no change.
        found = [
            (module._buffers, name, buffer, -1 if name.startswith("running_") else buffer._version)
            for module in self._layer.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]
        copies = {id(buffer): buffer.detach().clone() for _, _, buffer, _ in found}  # a shared one stays shared
        result = self._run(*args, **kwargs)
        self._before = [
            (buffers, name, copies[id(buffer)])
            for buffers, name, buffer, version in found
            if buffers.get(name) is not buffer or buffer._version != version
        ]
        return result


class Recompute:
    """The transform that makes layers run again instead of keeping what they computed.

    Args:
        choose: makes, for a model, the function that says which modules are layers.
        every: of the layers, every so manieth, the first included.
        keep: operations (`torch.ops.aten.mm.default`, ...) whose results are kept all the same, or a policy as
            `torch.utils.checkpoint.create_selective_checkpoint_contexts` takes it.
        offload: keep the inputs of layers in the memory of the host, pinned where there is an accelerator.
    """

    name = "activation checkpointing"

    def __init__(
        self,
        choose: Callable[[nn.Module], Choose | None],
        every: int = 1,
        keep: Sequence[Any] | Callable[..., Any] | None = None,
        offload: bool = False,
    ) -> None:
        self.choose = choose
        self.every = every
        self.keep = keep
        self.offload = offload
        self.arguments: dict[str, Any] = {}
        if keep is not None:
            self.arguments["context_fn"] = partial(
                create_selective_checkpoint_contexts, keep if callable(keep) else list(keep)
            )

    def apply(self, model: nn.Module) -> nn.Module:
        """Change the class of each chosen layer that is within no other.

        A model whose configuration asks for a cache of keys and values (`use_cache`, as in transformers) is told not to keep
        one: what the forward pass has put into it would be found there when a layer runs again.
        One that runs its layers again by itself (`gradient_checkpointing`) is told not to.

        Raises:
            ValueError: no layer is chosen.
        """
        layers = outermost(model, self.choose(model))
        if not layers:
            raise ValueError(
                f"Activation checkpointing needs to know the layers of {type(model).__name__}: set "
                "`transformer_cls_names_to_wrap` or `auto_wrap_policy`. A model that is one unit would keep its input and compute "
                "everything twice."
            )
        _forgo_cache(model)
        _forgo_own(model)
        for layer in layers[:: self.every]:
            if not isinstance(layer, Recomputed):
                layer.__class__ = _class_of(type(layer))  # type: ignore[arg-type]
            layer._recompute = self  # type: ignore[assignment]
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        """Give the layers their own classes back."""
        for layer in model.modules():
            if isinstance(layer, Recomputed) and "_own" in type(layer).__dict__:
                layer.__class__ = type(layer).__dict__["_own"]
                layer.__dict__.pop("_recompute", None)
        return model

    def __repr__(self) -> str:
        parts = [self.name, f"every {self.every} layers" if self.every > 1 else "every layer"]
        parts += ["keeping some results"] if self.keep is not None else []
        parts += ["inputs on the host"] if self.offload else []
        return ", ".join(parts)


def outermost(model: nn.Module, choose: Choose | None) -> list[nn.Module]:
    """The chosen modules beneath a model that are within no other chosen one, each once, in their order."""
    if choose is None:
        return []
    found: dict[int, nn.Module] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if choose(child):
                found.setdefault(id(child), child)
            else:
                visit(child)

    visit(model)
    return list(found.values())


def _forgo_cache(model: nn.Module) -> None:
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False  # type: ignore[union-attr]
            if (CONTEXT.world is None or CONTEXT.world.is_main) and CONTEXT.first_time("a cache is given up"):
                _logger.warning(
                    "%s.config.use_cache is set to False: layers that run again in the backward pass can not keep a cache.",
                    type(module).__name__,
                )


def _forgo_own(model: nn.Module) -> None:
    own = [module for module in model.modules() if getattr(module, "gradient_checkpointing", None) is True]
    for module in own:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    if (
        own
        and (CONTEXT.world is None or CONTEXT.world.is_main)
        and CONTEXT.first_time("a model's own checkpointing is given up")
    ):
        _logger.warning(
            "%s checkpoints its activations itself (gradient_checkpointing): that is switched off, since its layers would run "
            "three times. Ask for one of the two.",
            type(model).__name__,
        )


@cache  # layers of one class must stay so: torch.compile would compile one graph for each class
def _class_of(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Recomputed{kind.__name__}", (Recomputed, kind), {"_own": kind, "__module__": kind.__module__})

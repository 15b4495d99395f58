"""Activation checkpointing: a layer keeps its input only, and runs again in the backward pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hasten.parallel.units import Choose
from hasten.world.context import CONTEXT

_logger = logging.getLogger(__name__)


class Recomputed(nn.Module):
    """What is mixed into the class of a layer that runs again in the backward pass; its names stay what they are.

    Random numbers are drawn again as they were drawn the first time. Hooks of the layer run again too.
    """

    _recompute: Recompute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, keeping its input and, with a policy, the results of some operations."""
        run = super().__call__
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        how = self._recompute
        # Everything that is saved inside is recomputed, so that only the layer's input reaches the outer hooks.
        with torch.autograd.graph.save_on_cpu(pin_memory=True) if how.offload else nullcontext():
            return checkpoint(run, *args, use_reentrant=False, **how.arguments, **kwargs)


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
        for layer in layers[:: self.every]:
            if not isinstance(layer, Recomputed):
                layer.__class__ = _class_of(type(layer))
            layer._recompute = self  # type: ignore[assignment]
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        """Give the layers their own classes back."""
        for layer in model.modules():
            if isinstance(layer, Recomputed) and "_own" in type(layer).__dict__:
                layer.__class__ = type(layer).__dict__["_own"]
                del layer.__dict__["_recompute"]
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


def _class_of(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Recomputed{kind.__name__}", (Recomputed, kind), {"_own": kind, "__module__": kind.__module__})

"""Methods other than `forward` that run a model: what must happen around a forward pass happens around them, too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hasten.parallel import alike, passes
from hasten.weights.whole import is_divided
from hasten.world import torch_private

_REGISTERED = "_forward_methods"  # on a module: by name, the methods as they would run by themselves


def register_forward_method(
    model: Any, name: str, around: Callable[[Any], Any] | None = None, roots: Sequence[nn.Module] = ()
) -> None:
    """Let a method of a prepared model gather what it needs, and exchange the gradients that come from it.

    Args:
        model: the prepared model, or a sharded module within it.
        name: of the method.
        around: given the method, returns what runs it (under autocast, say).
        roots: models that `model` may be a part of.

    Raises:
        ValueError: there is no such method, or the module shares a unit with what is around it.
    """
    replicated = isinstance(model, DistributedDataParallel)
    inner = model.module if replicated else getattr(model, "_orig_mod", model)
    method = getattr(inner, name, None)
    if not callable(method):
        raise ValueError(f"register_forward_method: {type(inner).__name__} has no method {name!r}.")
    _check_whole(inner, name)
    owner = model if replicated else inner
    if name in registered(owner):
        return
    method = method if around is None else around(method)
    owner.__dict__.setdefault(_REGISTERED, {})[name] = method
    if replicated:
        setattr(model, name, _through_forward(model, method))
    else:
        if around is not None:
            setattr(inner, name, method)
        if hasattr(inner, "reshard"):
            _through_shards(inner, name, roots)


def registered(module: nn.Module) -> dict[str, Any]:
    """The methods of a module that have been registered, as they would run by themselves."""
    found: dict[str, Any] = module.__dict__.get(_REGISTERED, {})
    return found


def _through_forward(model: DistributedDataParallel, method: Callable[..., Any]) -> Callable[..., Any]:
    """Call a method of the module in DDP by way of DDP's own forward pass, which prepares the exchange."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        inner = model.module
        held = inner.__dict__.get("forward")

        def instead(*args: Any, **kwargs: Any) -> Any:
            restore()  # the method may call the module itself
            return method(*args, **kwargs)

        def restore() -> None:
            inner.__dict__.pop("forward", None)
            if held is not None:
                inner.__dict__["forward"] = held

        inner.__dict__["forward"] = instead
        try:
            return model(*args, **kwargs)
        finally:
            restore()

    return call


def _through_shards(module: Any, name: str, roots: Sequence[Any]) -> None:
    from torch.distributed.fsdp import register_fsdp_forward_method

    register_fsdp_forward_method(module, name)
    around = [root for root in roots if any(module is part for part in root.modules())]
    run = passes.without_gradients(getattr(module, name), around)

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for root in around:
                if hasattr(root, "reshard"):
                    torch_private.prepare_root(root)  # which must not be the first part that happens to run
                stack.enter_context(alike.inside(root))
            return run(*args, **kwargs)

    setattr(module, name, call)


def _check_whole(module: nn.Module, name: str) -> None:
    """Raise if some of a module's parameters are gathered by the module around it."""
    waiting, own = [] if hasattr(module, "reshard") else [module], []
    while waiting:
        part = waiting.pop()
        own += [key for key, value in part.named_parameters(recurse=False) if is_divided(value)]
        waiting += [child for child in part.children() if not hasattr(child, "reshard")]
    if own:
        raise ValueError(
            f"register_forward_method({type(module).__name__}, {name!r}): its parameters ({own[0]}, ...) are gathered together "
            "with others, by the module around it. Register the method of a module that is a unit of its own, as "
            "`accelerator.explain(model)` shows, or of the model."
        )

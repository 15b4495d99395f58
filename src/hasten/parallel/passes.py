"""What passes through sharded models need beyond torch's own hooks, and what no sharded model can do."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import _pytree

from hasten.weights.empty import check_values, find_empty

_logger = logging.getLogger(__name__)

_WHOLE = (torch.Tensor, nn.Parameter)
_OPEN = "_gathers_in_a_method"  # on a model, while a method of it runs


def check(model: nn.Module) -> None:
    """Refuse what would be lost without a word, or fail in the middle of training.

    Raises:
        ValueError: a trained embedding has sparse gradients or limits norms in place, or a parameter has hooks.
    """
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or not module.weight.requires_grad:
            continue
        if module.sparse:
            raise ValueError(
                f"{name!r} makes sparse gradients, which can not be sharded: build it with `sparse=False`."
            )
        if module.max_norm is not None:
            raise ValueError(
                f"{name!r} limits the norms of its rows in place (max_norm={module.max_norm}), in copies that sharding throws "
                "away: build it without `max_norm` and limit the norms of what it returns."
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"{name!r} has hooks for its gradient, which would be lost: a sharded parameter is another tensor. Remove them, "
                "and call `register_post_accumulate_grad_hook` on the parameters of the prepared model."
            )


def warn_of_ignored(model: nn.Module, ignored: Set[nn.Parameter]) -> None:
    """Say that nothing averages the gradients of parameters that the user has left out."""
    trained = [name for name, parameter in model.named_parameters() if parameter in ignored and parameter.requires_grad]
    if trained:
        _logger.warning(
            "`ignored_modules` leaves out %s trained parameters of %s (%r, ...): nothing averages their gradients, so each process "
            "trains its own. Freeze them, or average their gradients before the step (`accelerator.reduce`).",
            len(trained),
            type(model).__name__,
            trained[0],
        )


def make_contiguous(model: nn.Module) -> None:
    """Give parameters of another memory format (transposed, channels last) the usual one: rows are what is divided."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


class Alone:
    """A parameter without dimensions: every rank keeps it, and its gradient is averaged as that of shards is."""

    def __init__(self, parameter: nn.Parameter, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.exchanges = True
        frozen = not parameter.requires_grad
        parameter.requires_grad_(True).register_post_accumulate_grad_hook(self)  # it may be trained later
        parameter.requires_grad_(not frozen)

    def __call__(self, parameter: torch.Tensor) -> None:
        """Average what has come together since the last exchange."""
        if self.exchanges and parameter.grad is not None:
            for axis in range(self.mesh.ndim):
                dist.all_reduce(parameter.grad, group=self.mesh.get_group(axis))
            parameter.grad /= self.mesh.size()


def answer_no_view(module: nn.Module) -> None:
    """Let a linear layer answer with a tensor of its own: a view that is changed in place loses torch's hook that gathers."""
    if type(module).forward is nn.Linear.forward and module.bias is not None:  # only then it is a view, of a matrix
        module.register_forward_hook(_own)


def _own(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._unsafe_view.default(output, output.shape)


def keep_what_is_hidden(module: Any) -> None:
    """Keep a module gathered from its forward to its backward pass, once it has hidden its results.

    torch gathers again when the backward pass reaches what a module returned. It finds tensors in containers, but not in objects of
    the user's, nor those that are handed on by other ways.
    """

    def look(module: Any, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not any(each.requires_grad for each in _tensors(output)):
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()

    if any(parameter.requires_grad for parameter in module.parameters()):
        module.register_forward_hook(look)


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    for leaf in _pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, each.name) for each in dataclasses.fields(leaf)])


def free_without_gradients(model: nn.Module, units: Sequence[Any]) -> None:
    """Free what a pass without gradients has gathered and torch would keep for a backward pass, which does not come.

    An optimizer changes shards: the next pass would run with what was gathered before its step. And `model.parameters()` would not
    be the shards, whose gradients a limit of norms looks for.
    """

    def free(module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled() and not getattr(model, _OPEN, False):
            for unit in units:
                unit.reshard()

    model.register_forward_hook(free)


def without_gradients(call: Callable[..., Any], roots: Sequence[Any]) -> Callable[..., Any]:
    """Let a method that gathers do without gradients what a forward pass does: leave inference mode, and free at its end."""

    @functools.wraps(call)
    def method(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return call(*args, **kwargs)
        inner = [root for root in roots if not getattr(root, _OPEN, False)]
        for root in inner:
            setattr(root, _OPEN, True)  # forward passes within free nothing: the method may go on with the weights
        try:
            with torch.inference_mode(False), torch.no_grad():
                return call(*args, **kwargs)
        finally:
            for root in inner:
                delattr(root, _OPEN)
                for unit in root.modules():
                    if hasattr(unit, "reshard"):
                        unit.reshard()

    return method


def require_values(model: nn.Module) -> None:
    """Refuse the first pass of a model that still has tensors on the meta device."""

    def look(module: nn.Module, inputs: Any) -> None:
        check_values(module)
        handle.remove()

    if find_empty(model):
        handle = model.register_forward_pre_hook(look, prepend=True)


def accept_whole_states(model: nn.Module) -> None:
    """Let `model.load_state_dict` take whole tensors, which every rank has: each keeps its part of them."""

    def divide(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            value: Any = state.get(prefix + name)
            if isinstance(parameter, DTensor) and type(value) in _WHOLE and value.shape == parameter.shape:
                mesh, placements = parameter.device_mesh, parameter.placements
                value = value.detach().to(parameter.to_local().device)
                state[prefix + name] = distribute_tensor(value, mesh, placements, src_data_rank=None)

    model.register_load_state_dict_pre_hook(divide)


def leave_inference_mode(model: nn.Module) -> None:
    """Let a model under `torch.inference_mode` run as under `torch.no_grad`.

    What is gathered there would be tensors of inference mode, which can not be filled again outside of it.
    """
    entered: list[list[Any]] = []

    def before(module: nn.Module, inputs: Any) -> None:
        if torch.is_inference_mode_enabled():
            contexts = [torch.inference_mode(False), torch.no_grad()]
            for each in contexts:
                each.__enter__()
            entered.append(contexts)

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        while entered:
            for each in reversed(entered.pop()):
                each.__exit__(None, None, None)

    model.register_forward_pre_hook(before, prepend=True)
    model.register_forward_hook(after, always_call=True)

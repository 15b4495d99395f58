"""The steps of sharding by the names that other libraries know; `accelerator.prepare` does all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from hasten.collectives.broadcast import broadcast
from hasten.collectives.objects import broadcast_object_list
from hasten.parallel.fsdp import FullyShardedDataParallelPlugin
from hasten.parallel.recompute import Recompute
from hasten.parallel.shard import Shard
from hasten.parallel.values import materialise
from hasten.weights.names import find_ties
from hasten.weights.parts import copy_own_part
from hasten.weights.successors import current
from hasten.weights.whole import state_of

_SHOWN = 3


def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """Shard a model in place, as the Accelerator's plugin says; one that is sharded already stays as it is.

    Raises:
        ValueError: the Accelerator does not shard.
    """
    return _shard_of(accelerator, "fsdp2_prepare_model").wrap(model)


def fsdp2_apply_ac(accelerator: Any, model: nn.Module) -> nn.Module:
    """Let the layers of a model run again in the backward pass; unlike the reference's, their names stay what they are.

    Raises:
        ValueError: the Accelerator does not shard, or no layer is chosen.
    """
    sharding = _shard_of(accelerator, "fsdp2_apply_ac").sharding
    recompute = next((each for each in sharding.transforms if isinstance(each, Recompute)), None)
    return (recompute or Recompute(sharding.choose)).apply(model)


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: FullyShardedDataParallelPlugin, model: nn.Module
) -> Callable[[nn.Module], bool] | None:
    """Which modules of a model are units; None for the model as a whole.

    Raises:
        ValueError: the model has no module of a class that the plugin names.
    """
    return fsdp2_plugin.choose(model)


def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: dict[str, Any], cpu_offload: bool = False
) -> None:
    """Give a sharded model, which may be on the meta device, the whole tensors that rank 0 has; all ranks call it.

    Args:
        accelerator: the one that has sharded the model.
        model: the model.
        full_sd: on rank 0 whole tensors by qualified name, of tied ones any name; on the others it does not count.
        cpu_offload: keep the shards on the CPU.

    Raises:
        KeyError: a name is missing, on every rank.
        ValueError: the Accelerator does not shard.
        DistributedOperationException: a shape differs, on every rank.
    """
    world = _shard_of(accelerator, "fsdp2_load_full_state_dict").world
    entries = state_of(model)
    values = {names[0]: next((full_sd[name] for name in names if name in full_sd), None) for names, _ in entries}
    problems: list[Any] = [[names[0] for names, _ in entries if values[names[0]] is None] if world.is_main else []]
    broadcast_object_list(problems, world=world)
    if problems[0]:
        more = f", and {len(problems[0]) - _SHOWN} more" if len(problems[0]) > _SHOWN else ""
        raise KeyError(f"full_sd has no {', '.join(problems[0][:_SHOWN])}{more}, which {type(model).__name__} has.")
    materialise(model, torch.device("cpu") if cpu_offload else world.device)
    with torch.no_grad():
        for names, tensor in state_of(model):
            value = values[names[0]] if world.is_main else None
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device) if value is None else value
            copy_own_part(tensor, broadcast(whole.to(world.device, tensor.dtype), world=world))


def fsdp2_switch_optimizer_parameters(optimizer: torch.optim.Optimizer, mapping: dict[int, torch.Tensor]) -> None:
    """Let an optimizer hold other parameters in place of its own.

    Args:
        optimizer: a torch optimizer. A placeholder in it may have the address as its attribute `data_ptr`.
        mapping: the new parameter by the address of the old one; those that were prepared are known without it.

    Raises:
        KeyError: an address is not in the mapping.
    """
    for group in optimizer.param_groups:
        group["params"] = [_switched(each, mapping) for each in group["params"]]


def _switched(parameter: Any, mapping: dict[int, torch.Tensor]) -> Any:
    new = current(parameter)
    if new is not parameter:
        return new
    address = parameter.data_ptr() if callable(parameter.data_ptr) else parameter.data_ptr
    if address not in mapping:
        raise KeyError(
            f"A parameter of shape {list(parameter.shape)} in the optimizer couldn't be switched to its sharded version, since the "
            "mapping has no address of it. `accelerator.prepare(model, optimizer)` needs no mapping."
        )
    return mapping[address]


def fsdp2_canonicalize_names(named_params: dict[str, Any]) -> dict[str, Any]:
    """The same values by names without what activation checkpointing and torch.compile may put into them."""
    return {
        name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): value
        for name, value in named_params.items()
    }


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any], model: nn.Module, device: torch.device
) -> Callable[[nn.Module], Any]:
    """A function that initialises a module and ties again what was tied in the model; the given one, if nothing was.

    `FullyShardedDataParallelPlugin(param_init_fn=...)` does so by itself.

    Args:
        param_init_fn: is called with a module, and gives memory and values to its own tensors.
        model: the model before. Ties are found because they are the same object.
        device: what the values are on; it is the function that puts them there.
    """
    ties = find_ties(model)
    if not ties:
        return param_init_fn
    places = {
        (id(model.get_submodule(name.rpartition(".")[0])), name.rpartition(".")[2]): number
        for number, group in enumerate(ties)
        for name in group
    }
    tied: dict[int, nn.Parameter] = {}

    def initialise(module: nn.Module) -> Any:
        result = param_init_fn(module)
        for part in module.modules():
            for key, parameter in part.named_parameters(recurse=False):
                number = places.get((id(part), key))
                if number is not None and not parameter.is_meta:
                    setattr(part, key, tied.setdefault(number, parameter))
        return result

    return initialise


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device | str
) -> set[nn.Parameter]:
    """The parameters of modules, which are moved to a device.

    Args:
        modules: modules, or a pattern that the whole names of the model's modules match.
        model: the model.
        device: where every process keeps them whole.
    """
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    return {parameter for module in modules or () for parameter in module.to(device).parameters()}


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Torch's scaler, whose ranks agree over DTensors; by default for the device that there is."""
    here = torch.accelerator.current_accelerator()
    return torch.amp.GradScaler(**{"device": "cpu" if here is None else here.type, **kwargs})


def _shard_of(accelerator: Any, name: str) -> Shard:
    engine = accelerator._session.engine
    if not isinstance(engine, Shard):
        raise ValueError(
            f"{name}: this Accelerator does not shard. Make it with `fsdp_plugin=FullyShardedDataParallelPlugin(...)` in a job of "
            "several processes."
        )
    return engine

"""Every private symbol of torch that hasten uses, in one place; each has a contract test."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the longest wait of every later collective of `group`."""
    distributed_c10d._set_pg_timeout(timeout, group)


def group_timeouts(group: dist.ProcessGroup) -> dict[str, timedelta]:
    """The longest wait of a group, by the device type of each of its backends."""
    return {device.type: group._get_backend(device).options._timeout for device in group._device_types}


def new_group(ranks: Sequence[int], timeout: timedelta | None, **options: Any) -> dist.ProcessGroup:
    """Make a group of some ranks of the job; only they call this, whatever groups each of them has made before.

    torch names such a group after its ranks and the number of groups that this process has made, which differs among the members
    as soon as one of them is in more groups than another: they would wait for each other under different names.
    """
    original = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = _name_of_group
    try:
        options["use_local_synchronization"] = True
        return dist.new_group(list(ranks), timeout=timeout, **options)
    finally:
        distributed_c10d._hash_ranks_to_str = original


def _name_of_group(ranks: list[int]) -> str:
    members = hashlib.sha1("_".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()
    # Each member counts for itself, in the store, which lives as long as the names do.
    return f"{members}_{default_store().add(f'hasten/group/{members}/{dist.get_rank()}', 1)}"


@contextmanager
def groups_of_a_mesh(timeout: timedelta | None) -> Iterator[None]:
    """Inside, the groups that a DeviceMesh makes wait for `timeout`, and only their members need to make them.

    By themselves they would wait for torch's default, and every rank of the job would have to make them, in the same order.
    """
    from torch.distributed import device_mesh

    original = device_mesh.new_group

    def make(ranks: Sequence[int], **options: Any) -> Any:
        return new_group(ranks, **{**options, "timeout": timeout})

    device_mesh.new_group = make  # type: ignore[assignment]
    try:
        yield
    finally:
        device_mesh.new_group = original


def all_groups() -> list[dist.ProcessGroup]:
    """Every process group of this process, the default one included."""
    return list(distributed_c10d._world.pg_map)


def default_store() -> Any:
    """The store of the default group: keys and values that all ranks share."""
    return distributed_c10d._get_default_store()


def is_inside_elastic_agent() -> bool:
    """Whether torchrun's agent already serves the store of this job."""
    return dist.is_torchelastic_launched()


def storage_of(item: Any) -> torch.UntypedStorage | None:
    """The storage that something is that pickle meets inside a tensor; None for anything else."""
    if isinstance(item, torch.storage.TypedStorage):
        return item._untyped_storage
    return item if isinstance(item, torch.UntypedStorage) else None


def is_unscaled(scaler: Any, optimizer: Any) -> bool:
    """Whether a gradient scaler has unscaled an optimizer's gradients since its last update."""
    from torch.amp.grad_scaler import OptState

    return bool(scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY)


def found_infinite(scaler: Any, optimizer: Any) -> bool:
    """Whether a gradient scaler has met infinite gradients of an optimizer since its last update; waits for the device."""
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return any(bool(value.item()) for value in found.values())


def must_learn_graph(model: Any) -> bool:
    """Whether a DDP model with a static graph has not seen its first backward pass yet, which must exchange gradients."""
    return not model._static_graph_delay_allreduce_enqueued


def has_communication_hook(model: Any) -> bool:
    """Whether something other than DDP's own sum exchanges the gradients of a DDP model."""
    return bool(model._comm_hooks)


class LoaderOverIndices(DataLoader[Any]):
    """A DataLoader that takes the indices of its batches from `self.indices` and not from its samplers themselves."""

    indices: Any

    @property
    def _index_sampler(self) -> Any:
        return self.indices


def forget_iterator(loader: DataLoader[Any]) -> None:
    """Make a copied DataLoader start its own workers and not share those of its original."""
    loader._iterator = None


def keeps_workers(loader: DataLoader[Any]) -> bool:
    """Whether a DataLoader has workers running that its next pass will use again."""
    return loader.persistent_workers and loader._iterator is not None


def copy_each(into: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    """Copy each tensor into its partner, in one operation; the lists are not empty."""
    torch._foreach_copy_(into, tensors)


def multiply_each(tensors: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply each tensor in place by one number, in one operation; the list is not empty."""
    torch._foreach_mul_(tensors, factor)


def local_block(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes of the block of a DTensor that this process holds, and where it begins in the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(sizes), tuple(starts)


def with_local(tensor: Any, local: torch.Tensor) -> Any:
    """A DTensor like another one, over another local part of the same shape, wherever that is."""
    from torch.distributed.tensor import DTensor

    make: Any = DTensor
    return make(local, tensor._spec, requires_grad=False)


def is_resting(module: Any) -> bool:
    """Whether a sharded module (FSDP2) is in neither a forward nor a backward pass."""
    return bool(module._get_fsdp_state()._training_state.name == "IDLE")


def spoil_graphs(module: Any) -> None:
    """Make backward passes fail that would use the whole parameters which a sharded module has had in a forward pass.

    Their memory is freed and gathered again in between, which torch hides from autograd.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # an older torch has one, or none
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    for group in groups:
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                torch.autograd.graph.increment_version(parameter._unsharded_param)


def is_sharding_hook(hook: Any) -> bool:
    """Whether a forward hook of a module is one of those that gather and free its parameters (FSDP2)."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp._fully_shard")


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def prepare_root(module: Any) -> None:
    """Make a sharded module (FSDP2) the root of what is beneath it, as its first forward pass would."""
    module._get_fsdp_state()._lazy_init()


def move_each(tensors: list[torch.Tensor], towards: list[torch.Tensor], weight: float) -> None:
    """Move each tensor in place by a part of the way to its partner, of any format, in a few operations for all."""
    if [tensor.dtype for tensor in tensors] == [tensor.dtype for tensor in towards]:
        torch._foreach_lerp_(tensors, towards, weight)
    else:  # sums are taken in the wider format, and nothing is copied
        torch._foreach_mul_(tensors, 1.0 - weight)
        torch._foreach_add_(tensors, towards, alpha=weight)


def tensors_without_values() -> Any:
    """A context in which new tensors have a shape and a format, but no values and no memory; it can be entered again."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def trial_without_values() -> Iterator[None]:
    """Inside, torch does not log which operations on tensors without values fail; random states of DTensors stay as they are."""
    from torch.distributed.tensor import _random

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, tracker = logger.disabled, _random._rng_tracker
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled, _random._rng_tracker = before, tracker

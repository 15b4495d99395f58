"""Every private symbol of torch that hasten uses, in one place; each has a contract test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the longest wait of every later collective of `group`."""
    distributed_c10d._set_pg_timeout(timeout, group)


def group_timeouts(group: dist.ProcessGroup) -> dict[str, timedelta]:
    """The longest wait of a group, by the device type of each of its backends."""
    return {device.type: group._get_backend(device).options._timeout for device in group._device_types}


@contextmanager
def groups_of_a_mesh(timeout: timedelta | None) -> Iterator[None]:
    """Inside, the groups that a DeviceMesh makes wait for `timeout`, and only their members need to make them.

    By themselves they would wait for torch's default, and every rank of the job would have to make them, in the same order.
    """
    from torch.distributed import device_mesh

    original = device_mesh.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "timeout": timeout, "use_local_synchronization": True})

    device_mesh.new_group = new_group
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


def is_unscaled(scaler: Any, optimizer: Any) -> bool:
    """Whether a gradient scaler has unscaled an optimizer's gradients since its last update."""
    from torch.amp.grad_scaler import OptState

    return bool(scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY)


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

"""Every private symbol of torch that hasten uses, in one place; each has a contract test."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the longest wait of every later collective of `group`."""
    distributed_c10d._set_pg_timeout(timeout, group)


def group_timeouts(group: dist.ProcessGroup) -> dict[str, timedelta]:
    """The longest wait of a group, by the device type of each of its backends."""
    return {
        device.type: group._get_backend(device).options._timeout
        for device in group._device_types
    }


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

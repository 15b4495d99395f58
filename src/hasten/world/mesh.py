"""The mesh: the one builder of DeviceMesh, and the questions about data that it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from hasten.settings.parallelism import AXES, ParallelismSizes
from hasten.world import torch_private
from hasten.world.process import World, current

# Names for several axes seen as one, as sharding and loss averaging use them.
_FLATTENED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}


@dataclass
class ParallelismConfig(ParallelismSizes):
    """The size of each mesh axis, and the mesh that is built from them; see `ParallelismSizes` for the arguments."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._mesh: DeviceMesh | None = None

    def build_device_mesh(self, device_type: str) -> DeviceMesh:
        """Build the mesh of the default world and keep it."""
        self._mesh = build_mesh(self, current(), device_type)
        return self._mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """The mesh, built at the first call.

        Raises:
            ValueError: there is no mesh yet and no device type is given, or the mesh is on another device type.
        """
        if self._mesh is None:
            if device_type is None:
                raise ValueError(
                    "There is no mesh yet: name the device type of its ranks, e.g. get_device_mesh('cpu')."
                )
            return self.build_device_mesh(device_type)
        if device_type is not None and self._mesh.device_type != device_type:
            raise ValueError(
                f"The mesh was built on {self._mesh.device_type!r}; a mesh on {device_type!r} was asked for."
            )
        return self._mesh

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mesh": None}


def build_mesh(
    sizes: ParallelismSizes, world: World, device_type: str | None = None, *, sharded: bool = False
) -> DeviceMesh:
    """Arrange the ranks of `world` in a mesh with the active axes of `sizes`, in the order dp_replicate, dp_shard, cp, sp, tp.

    A mesh without any active axis has one axis of size 1: dp_replicate, or dp_shard if `sharded`. Several data axes are also
    reachable as one, as "dp", "dp_shard_cp" and "dp_cp". Every group that is made waits as long as the world's own.

    Raises:
        ValueError: the sizes do not multiply to the number of ranks.
    """
    if sizes.total_size != world.size:
        chosen = " x ".join(f"{axis}={sizes.size(axis)}" for axis in AXES)
        raise ValueError(
            f"The mesh {chosen} has {sizes.total_size} ranks, but the job has {world.size}. Change an axis or start "
            f"{sizes.total_size} processes (`hasten launch --num_processes {sizes.total_size}`)."
        )
    if world.group is None:
        raise ValueError("A mesh needs a process group: start the script with `hasten launch` or torchrun.")
    axes = tuple(sizes.active_mesh_dims) or ("dp_shard" if sharded else "dp_replicate",)
    shape = tuple(sizes.size(axis) for axis in axes)
    with torch_private.groups_of_a_mesh(world.timeout):
        ranks = torch.tensor(world.ranks).reshape(shape)
        mesh = DeviceMesh(device_type or world.device.type, ranks, mesh_dim_names=axes)
        for name, parts in _FLATTENED.items():
            active = tuple(axis for axis in parts if axis in axes)
            if active:
                mesh[active]._flatten(name)
    return mesh


def axis_rank(world: World, sizes: ParallelismSizes, axis: str) -> int:
    """This process's position along one axis; 0 where the axis is off."""
    inner = 1
    for name in AXES[AXES.index(axis) + 1 :]:
        inner *= sizes.size(name)
    return world.rank // inner % sizes.size(axis)


def data_rank(world: World, sizes: ParallelismSizes | None) -> int:
    """Which of the different batches of a step this process sees."""
    return world.rank if sizes is None else world.rank // sizes.non_data_parallel_size


def data_size(world: World, sizes: ParallelismSizes | None) -> int:
    """How many different batches a step has over all processes."""
    return world.size if sizes is None else max(1, world.size // sizes.non_data_parallel_size)

"""The world: the processes of a job, and this process's place among them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hasten.settings import environment
from hasten.settings.enums import DistributedType
from hasten.settings.place import Place, read_place, threads_are_chosen
from hasten.world import torch_private
from hasten.world.context import CONTEXT
from hasten.world.devices import DEVICES, Device, best_device, device_row

_TORCH_TIMEOUT = timedelta(minutes=30)
# Before a group is destroyed, and at the end of a process; each glance lets go of the interpreter's lock.
_FEW_GLANCES, _LAST_GLANCES, _GLANCE_S = 2, 10, 0.003


@dataclass(frozen=True, eq=False)
class World:
    """Some processes that work together, and this process's place among them.

    `ranks` are the members' numbers in the whole job, `machine` those of all processes on this machine; `rank` is this
    process's index among the members. `group` is None where the world is this process alone and nothing is ever communicated.
    `attached` is for what lives as long as the world does, such as buffers for its exchanges.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: dist.ProcessGroup | None = None
    backend: str | None = None
    ranks: tuple[int, ...] = (0,)
    machine: range = range(1)
    forced_cpu: bool = False
    attached: dict[str, Any] = field(default_factory=dict, repr=False)

    def __reduce__(self) -> Any:
        # A process group cannot travel; what is unpickled lives in the default world of the process that unpickles it.
        if self is not CONTEXT.world:
            raise TypeError(
                "A world that is a part of the job (`ranks=`) cannot be pickled; only the default world can."
            )
        return current, ()

    @property
    def row(self) -> Device:
        """The row of this world's device type in the device table."""
        return device_row(self.device)

    @property
    def timeout(self) -> timedelta | None:
        """The longest wait of its group's collectives; None without a group."""
        return None if self.group is None else torch_private.group_timeouts(self.group).get(self.device.type)

    @property
    def label(self) -> DistributedType:
        """What this world reports as its type."""
        return DistributedType.NO if self.group is None else self.row.label

    @property
    def is_main(self) -> bool:
        """Whether this is the first process."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process on its machine."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last process."""
        return self.rank == self.size - 1

    def barrier(self, operation: str = "wait_for_everyone") -> None:
        """Wait until every process of the world is here, at most the group's timeout.

        Args:
            operation: the name under which errors speak of it.

        Raises:
            RuntimeError: the process group has been ended, or a process did not come in time (`MissingProcessError`).
            DistributedOperationException: another process called something else; the same error on every one.
        """
        if self.size > 1:
            from hasten.world import frames

            frames.frames_of(self).agree(operation)

    @property
    def patience(self) -> timedelta:
        """How long a wait for other processes may last: the group's timeout, else torch's default for groups."""
        return self.timeout or _TORCH_TIMEOUT

    def check_alive(self) -> None:
        """Raise if this world's process group has been ended."""
        if self.group is not None and not dist.is_initialized():
            raise RuntimeError(
                f"Rank {self.rank} of {self.size}: the process group was ended (by `end_training()` or "
                "`destroy_process_group()`), so nothing can be exchanged any more. Call `end_training()` last."
            )

    def part(self, ranks: Sequence[int]) -> World:
        """The world of some of this world's processes; called by its members only.

        Args:
            ranks: indices in this world, all different.

        Raises:
            ValueError: a rank does not exist, is named twice, or this process is not among them.
        """
        members = tuple(sorted(ranks))
        if not members or len(set(members)) != len(members) or members[0] < 0 or members[-1] >= self.size:
            raise ValueError(
                f"ranks={list(ranks)}: each must be a different number from 0 to {self.size - 1}; this job has {self.size} "
                f"process{'es' if self.size > 1 else ''}. Start more with `hasten launch --num_processes N`."
            )
        if self.rank not in members:
            raise ValueError(
                f"ranks={list(ranks)} does not contain this process, rank {self.rank} of {self.size}. Build the "
                "Accelerator only on its own ranks, e.g. `ranks=[0, 1] if PartialState().process_index < 2 else [2, 3]`."
            )
        whole = tuple(self.ranks[index] for index in members)
        neighbours = [index for index in members if self.ranks[index] in self.machine]
        return World(
            rank=members.index(self.rank),
            size=len(members),
            local_rank=neighbours.index(self.rank),
            local_size=len(neighbours),
            device=self.device,
            group=self._new_group(whole),
            backend=self.backend,
            ranks=whole,
            machine=self.machine,
            forced_cpu=self.forced_cpu,
        )

    def twin(self) -> World:
        """The same processes in a group of their own, for what they exchange from host memory beside the rest; all call this."""
        if self.group is None:
            return self
        group = torch_private.new_group(self.ranks, self.timeout, backend="gloo")
        return replace(self, group=group, backend="gloo", attached={})

    def _new_group(self, whole: tuple[int, ...]) -> dist.ProcessGroup | None:
        if self.group is None:
            return None
        # Only the members meet: the other ranks may be building another world at this moment.
        return torch_private.new_group(whole, self.timeout, backend=self.backend)

    @contextmanager
    def first(self, goes_first: bool) -> Iterator[None]:
        """Let the processes with `goes_first` run the body before the others.

        The others are released when the body is done or has raised; only where it raised, the error is that process's own.
        """
        if not goes_first:
            self.barrier("main_process_first")
        try:
            yield
        finally:
            if goes_first:
                self.barrier("main_process_first")


def current() -> World:
    """The default world of this process, joined now if nothing has joined it yet."""
    return CONTEXT.world if CONTEXT.world is not None else start()


def start(
    cpu: bool = False,
    backend: str | None = None,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    **group_options: Any,
) -> World:
    """Join the job that the environment describes, and make it this process's default world.

    Args:
        cpu: use the CPU even where there is an accelerator.
        backend: communication backend; the device's own by default.
        timeout: the longest wait of any collective, on this and every later group.
        init_method: URL of the rendezvous; by default that of torchrun, SLURM or MPI.
        group_options: other arguments of `torch.distributed.init_process_group`.

    Raises:
        ValueError: the environment is contradictory, the backend is not available, or the CPU is asked for after the process
            has settled on another device.
    """
    if CONTEXT.world is not None:
        return _same_world(CONTEXT.world, cpu, backend, timeout)
    cpu = cpu or bool(environment.get("use_cpu"))
    row, chosen = _choose_device(cpu)
    place = _find_place()
    device = chosen if chosen is not None else row.at(place.local_rank)
    if chosen is None:
        row.select(device)
    if place.launcher is None:
        world = World(device=device, forced_cpu=cpu)
    else:
        found = dist.is_initialized()
        if not found:
            _join(place, backend or row.backend, timeout, init_method, group_options)
        world = _from_group(place, device, cpu)
        _share_cores(world)
        if found:
            _same_world(world, cpu, backend, timeout)
    CONTEXT.world = world
    return world


def shutdown() -> None:
    """End the process group, if there is one. Safe to call at any time, any number of times."""
    if dist.is_available() and dist.is_initialized():
        let_threads_finish(_FEW_GLANCES)
        dist.destroy_process_group()


def _same_world(world: World, cpu: bool, backend: str | None, timeout: timedelta | None) -> World:
    if cpu and not world.row.is_cpu:
        raise ValueError(
            f"cpu=True was asked for, but this process already uses {world.device}. Ask for the CPU when the first "
            "Accelerator or PartialState is built, or set ACCELERATE_USE_CPU=true before the start."
        )
    if world.group is None:
        return world
    if backend is not None and backend != world.backend:
        raise ValueError(
            f"backend={backend!r} was asked for, but this process already communicates through {world.backend!r}. Name the "
            "backend when the first Accelerator or PartialState is built."
        )
    if timeout is not None:
        torch_private.set_group_timeout(world.group, timeout)
    return world


def _find_place() -> Place:
    place = read_place()
    if not dist.is_initialized() or (place.launcher is not None and place.world_size == dist.get_world_size()):
        return place
    # Somebody made the group and has not told the environment: take all its ranks to be on this machine.
    rank, size = dist.get_rank(), dist.get_world_size()
    return Place(rank, size, rank, size, launcher="torch.distributed")


def _choose_device(cpu: bool) -> tuple[Device, torch.device | None]:
    named = environment.get("torch_device")
    if named is not None:
        try:
            device = torch.device(named)
        except RuntimeError as error:
            raise ValueError(f"ACCELERATE_TORCH_DEVICE={named!r} is not a torch device: {error}") from None
        return device_row(device), device
    return (DEVICES["cpu"] if cpu else best_device()), None


def _join(
    place: Place, backend: str, timeout: timedelta | None, init_method: str | None, options: dict[str, Any]
) -> None:
    for name in (part.rpartition(":")[2] for part in backend.split(",")):
        if not dist.is_backend_available(name):
            available = [
                known
                for known in dist.Backend.backend_list
                if known != "undefined" and dist.is_backend_available(known)
            ]
            raise ValueError(f"The communication backend {name!r} is not available here; available: {available}.")
    if place.launcher != "torchrun":
        from hasten.settings import export

        # torch and other libraries look for a process's place in torchrun's variables.
        export.variables(place.as_environment())
    try:
        dist.init_process_group(
            backend, init_method=init_method, timeout=timeout, rank=place.rank, world_size=place.world_size, **options
        )
    except (RuntimeError, ValueError) as error:
        raise type(error)(
            f"Rank {place.rank} of {place.world_size} could not join the job at {place.master_addr}:{place.master_port} "
            f"({place.launcher}, backend {backend}): {error}. Check that all {place.world_size} processes were started, that "
            "they can reach that address, and that no other job uses the port (`--main_process_port 0` picks a free one)."
        ) from error
    _end_at_exit()


def _from_group(place: Place, device: torch.device, cpu: bool) -> World:
    group = dist.group.WORLD
    assert group is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    first = rank - place.local_rank
    return World(
        rank=rank,
        size=size,
        local_rank=place.local_rank,
        local_size=place.local_world_size,
        device=device,
        group=group,
        backend=dist.get_backend(),
        ranks=tuple(range(size)),
        machine=range(first, first + place.local_world_size),
        forced_cpu=cpu,
    )


def _end_at_exit() -> None:
    import atexit

    atexit.register(_leave)


def _leave() -> None:
    # After an uncaught error the other ranks may be gone, and a backend that waits for them would hide the error.
    if not hasattr(sys, "last_value"):
        shutdown()
    let_threads_finish(_LAST_GLANCES)


def let_threads_finish(glances: int) -> None:
    """Give the backend's threads the time to let go of the last exchange's tensors.

    They need the interpreter's lock for it. A group that is destroyed waits for its threads and may hold that lock meanwhile, for
    ever; and a thread of C++ that asks for the lock of an interpreter that has begun to end takes the whole process down with it
    (SIGABRT, "terminate called without an active exception").
    """
    import time

    for _ in range(glances):
        time.sleep(_GLANCE_S)


def _share_cores(world: World) -> None:
    """Give each of several CPU processes of a machine its share of the cores, unless threads were chosen already."""
    if world.row.is_cpu and world.local_size > 1 and not threads_are_chosen():
        import os

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.local_size))

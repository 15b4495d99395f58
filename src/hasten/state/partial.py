"""`PartialState`: the default world, seen through the names that the reference gives it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any, TypeVar

import torch

from hasten.settings import environment
from hasten.world import process
from hasten.world.context import CONTEXT
from hasten.world.devices import best_device
from hasten.world.process import World

F = TypeVar("F", bound=Callable[..., Any])


class ProcessView:
    """The questions about a world that user code asks; both state objects and the Accelerator answer them."""

    @property
    def world(self) -> World:
        """The world that is looked at."""
        raise NotImplementedError

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.world.size > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first process of all."""
        return self.world.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.world.is_local_main

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process of all."""
        return self.world.is_last

    def wait_for_everyone(self) -> None:
        """Wait until every process has come here, at most the group's timeout."""
        self.world.barrier()

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """Give each process its part of `inputs` (list, tuple, dict of equally long values, tensor, `datasets.Dataset`).

        The first processes get one more element where the number does not divide; with `apply_padding` all get the same
        number, the last element being repeated.
        """
        from hasten.collectives import split

        return split.split_between_processes(inputs, apply_padding=apply_padding, world=self.world)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let the first process run the body before all others; they are released even if it raises."""
        return self.world.first(self.world.is_main)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let the first process of each machine run the body before the others there; they are released even if it raises."""
        return self.world.first(self.world.is_local_main)

    def on_main_process(self, function: F | None = None) -> F:
        """Run a function on the first process only; elsewhere the call returns None."""
        return self._only(function, "on_main_process", lambda: self.world.is_main)

    def on_local_main_process(self, function: F | None = None) -> F:
        """Run a function on the first process of each machine only."""
        return self._only(function, "on_local_main_process", lambda: self.world.is_local_main)

    def on_last_process(self, function: F) -> F:
        """Run a function on the last process only."""
        return self._only(function, "on_last_process", lambda: self.world.is_last)

    def on_process(self, function: F | None = None, process_index: int | None = None) -> Any:
        """Run a function on one process only; without processes to choose from it runs."""
        if function is None and process_index is not None:
            return partial(self.on_process, process_index=process_index)
        self._check_index("on_process", "process_index", process_index)
        return self._only(function, "on_process", lambda: self.world.rank == process_index or self.world.size == 1)

    def on_local_process(self, function: F | None = None, local_process_index: int | None = None) -> Any:
        """Run a function on the process of each machine with this local index only."""
        if function is None and local_process_index is not None:
            return partial(self.on_local_process, local_process_index=local_process_index)
        self._check_index("on_local_process", "local_process_index", local_process_index)
        return self._only(
            function,
            "on_local_process",
            lambda: self.world.local_rank == local_process_index or self.world.size == 1,
        )

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per machine."""
        if self.world.is_local_main:
            print(*args, **kwargs)

    @staticmethod
    def _check_index(name: str, argument: str, index: int | None) -> None:
        if index is None:
            raise ValueError(f"`{name}` needs to know which process: `@{name}({argument}=0)`.")

    @staticmethod
    def _only(function: F | None, name: str, chosen: Callable[[], bool]) -> F:
        if function is None:
            raise ValueError(f"`{name}` decorates a function: write `@{name}` above it or call `{name}(function)`.")
        chosen()  # raises where there is no world; which process runs it is decided by each call

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if chosen() else None

        return run  # type: ignore[return-value]


class PartialState(ProcessView):
    """The default world of this process. All instances share one dictionary; attributes that users add stay.

    Args:
        cpu: use the CPU even where there is an accelerator.
        kwargs: arguments of `torch.distributed.init_process_group` (`backend`, `timeout`, `init_method`, ...).

    Raises:
        ValueError: see `hasten.world.process.start`.
    """

    _shared_state: dict[str, Any] = CONTEXT.partial_state
    _known_attrs = (
        "_cpu",
        "backend",
        "debug",
        "device",
        "distributed_type",
        "fork_launched",
        "local_process_index",
        "num_processes",
        "process_index",
    )

    device: torch.device
    num_processes: int
    process_index: int
    local_process_index: int
    debug: bool

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if kwargs.pop("_use_sagemaker_dp", None):
            raise NotImplementedError("SageMaker's data-parallel backend is not built yet (area: launchers).")
        world = process.start(cpu, **kwargs)
        if not self.initialized:
            self.__dict__.update(describe(world))

    @property
    def world(self) -> World:
        """The default world of this process.

        Raises:
            ValueError: the state was reset.
        """
        if not self.initialized:
            raise ValueError("The `PartialState` or `Accelerator` must be initialized before calling this function.")
        return process.current()

    @property
    def initialized(self) -> bool:
        """Whether a PartialState has been built since the start or the last reset."""
        return bool(self._shared_state)

    @property
    def default_device(self) -> torch.device:
        """The device type that a process of this machine would use."""
        return torch.device(best_device().type)

    def set_device(self) -> None:
        """Make this process's device the current one."""
        self.world.row.select(self.world.device)

    def destroy_process_group(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        """End `group`, or the default process group; does nothing where there is none."""
        if self.fork_launched and group is None:
            return
        if group is not None:
            torch.distributed.destroy_process_group(group)
        else:
            process.shutdown()

    @staticmethod
    def _reset_state() -> None:
        """Forget the default world; the process group stays."""
        PartialState._shared_state.clear()
        CONTEXT.world = None

    def __getattr__(self, name: str) -> Any:
        if name in type(self)._known_attrs:
            raise AttributeError(
                f"`PartialState` object has no attribute `{name}`. This happens if `PartialState._reset_state()` was called and "
                "an `Accelerator` or `PartialState` was not reinitialized."
            )
        raise AttributeError(f"'PartialState' object has no attribute '{name}'")

    def __repr__(self) -> str:
        return summary(self)


def describe(world: World) -> dict[str, Any]:
    """The attributes by which the reference's state objects know a world."""
    return {
        "_cpu": world.forced_cpu,
        "backend": world.backend,
        "device": world.device,
        "debug": bool(environment.get("debug")),
        "distributed_type": world.label,
        "num_processes": world.size,
        "process_index": world.rank,
        "local_process_index": world.local_rank,
        "fork_launched": bool(environment.get("fork_launched")),
    }


def summary(state: Any) -> str:
    """A world in five lines."""
    backend = f"  Backend: {state.backend}" if state.backend else ""
    return (
        f"Distributed environment: {state.distributed_type}{backend}\n"
        f"Num processes: {state.num_processes}\n"
        f"Process index: {state.process_index}\n"
        f"Local process index: {state.local_process_index}\n"
        f"Device: {state.device}\n"
    )

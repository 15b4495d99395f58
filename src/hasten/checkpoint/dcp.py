"""Writing folders of torch's distributed checkpoints: each process writes its own shards, and the main one says where all are.

The planning is torch's. Files are written through the writer of the transaction, so that they are checksummed and synced on
the way; the metadata is written last.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor
from torch.futures import Future

from hasten.collectives.objects import gather_object
from hasten.collectives.together import together
from hasten.weights.write import FolderWriter, without_zip_checksums
from hasten.world.process import World

_SHARD = ".distcp"
Place = tuple[Any, ...]  # keys and indices that lead to a value of a nested state


@dataclass
class _Known:
    """The plan of an earlier save, which counts again if nobody's part has changed."""

    local: list[Any]
    final: SavePlan
    metadata: Metadata | None  # on the main process


def write(
    writer: FolderWriter, name: str, state: dict[str, Any], aliases: Mapping[Place, Place], world: World | None
) -> None:
    """Write a folder of shards; every process of the world calls this.

    Args:
        writer: of the folder in which this folder is made.
        name: of the folder.
        state: nested dictionaries and lists; DTensors are written shard by shard, copies of shards and other tensors once.
        aliases: further places of the state, and those that hold the same tensors: they are listed, but written once.
        world: the processes, or None for this one alone.

    Raises:
        OSError: this process could not write.
        RuntimeError: another process could not.
    """
    planner = DefaultSavePlanner()
    is_main = world is None or world.is_main

    def begin() -> tuple[_Storage, SavePlan]:
        storage = _Storage(writer, name, state)
        planner.set_up_planner(state, is_coordinator=is_main)
        storage.set_up_storage_writer(is_main)
        return storage, storage.prepare_local_plan(planner.create_local_plan())

    what = f"{writer.folder / name} was not written"
    storage, local = together(world, what, begin)
    known = _plan(local, planner, storage, world, name)
    final = planner.finish_plan(known.final)
    results = together(world, what, lambda: storage.write_data(final, planner).wait())
    everyone = _to_main(results, world)

    def end() -> None:
        if everyone is not None and known.metadata is not None:
            metadata = replace(known.metadata)
            storage.finish(metadata, [*everyone, _listed(aliases, metadata, everyone)])

    together(world, what, end)


def _plan(local: SavePlan, planner: Any, storage: FileSystemWriter, world: World | None, name: str) -> _Known:
    """What this process writes of all; asked for anew only if some process's part is another one than last time."""
    if world is None or world.size == 1:
        plans, metadata = planner.create_global_plan([local])
        return _Known(local.items, storage.prepare_global_plan(plans)[0], metadata)
    plans_of: dict[str, _Known] = world.attached.setdefault("sharded saves", {})
    known = plans_of.get(name)
    if known is not None and all(gather_object([known.local == local.items], world=world)):
        return replace(known, final=replace(known.final, planner_data=local.planner_data))
    if known is None:
        gather_object([False], world=world)
    plans_of[name] = _plan_anew(local, planner, storage, world)
    return plans_of[name]


def _plan_anew(local: SavePlan, planner: Any, storage: FileSystemWriter, world: World) -> _Known:
    locals_ = _to_main(local, world)
    outcomes: list[Any] | None = None
    metadata = None
    if locals_ is not None:
        try:
            plans, metadata = planner.create_global_plan(locals_)
            outcomes = list(storage.prepare_global_plan(plans))
        except Exception as error:
            outcomes = [f"the plan of the save failed with {type(error).__name__}: {error}"] * world.size
    own: list[Any] = [None]
    dist.scatter_object_list(own, outcomes, group_src=0, group=world.group)
    if isinstance(own[0], str):
        raise RuntimeError(own[0])
    return _Known(local.items, own[0], metadata)


def _to_main(item: Any, world: World | None) -> list[Any] | None:
    """What each process has, on the main process; None on the others."""
    if world is None or world.size == 1:
        return [item]
    items: list[Any] | None = [None] * world.size if world.is_main else None
    dist.gather_object(item, items, group_dst=0, group=world.group)
    return items


def _listed(aliases: Mapping[Place, Place], metadata: Metadata, results: list[list[Any]]) -> list[Any]:
    """Let metadata list tensors at further places, and say where they are: where the tensors are that they are the same as."""
    others: dict[str, list[str]] = {}
    for other, first in aliases.items():
        others.setdefault(_key(first), []).append(_key(other))
    more = {other: metadata.state_dict_metadata[first] for first, each in others.items() for other in each}
    metadata.state_dict_metadata = {**metadata.state_dict_metadata, **more}
    metadata.planner_data = {**metadata.planner_data, **{_key(other): other for other in aliases}}
    return [
        replace(result, index=replace(result.index, fqn=other))
        for each in results
        for result in each
        for other in others.get(result.index.fqn, ())
    ]


def _key(place: Place) -> str:
    return ".".join(map(str, place))


class _Storage(FileSystemWriter):
    """A writer whose files go through a `FolderWriter`."""

    def __init__(self, writer: FolderWriter, name: str, state: Any) -> None:
        super().__init__(writer.folder / name, sync_files=False)
        self.fs = _Files(writer, name, [local for _, value in leaves(state) if (local := _local(value)) is not None])

    def write_data(self, plan: SavePlan, planner: Any) -> Future[Any]:
        """Write this process's shards."""
        with without_zip_checksums():
            return super().write_data(plan, planner)

    def storage_meta(self) -> Any:
        """Nothing: the folder does not stay where it is written."""
        return None


class _Files(FileSystem):
    def __init__(self, writer: FolderWriter, name: str, holding: list[torch.Tensor]) -> None:
        self._writer = writer
        self._name = name
        self._holding = holding

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """A file; shards are written through the writer, which checksums and syncs them."""
        if mode == "wb" and str(path).endswith(_SHARD):
            with self._writer.stream(f"{self._name}/{Path(path).name}", self._holding) as stream:
                yield _Sink(stream)
        else:
            with super().create_stream(path, mode) as stream:
                yield stream


class _Sink(io.RawIOBase):
    """What torch asks of a file that it writes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._size = 0

    def write(self, data: Any) -> int:
        count = int(self._stream.write(data))
        self._size += count
        return count

    def tell(self) -> int:
        return self._size

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        """Leave that to the writer."""


def _local(value: Any) -> torch.Tensor | None:
    if isinstance(value, DTensor):
        value = value.to_local()
    return value.detach() if isinstance(value, torch.Tensor) else None


def leaves(state: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """The values of a nested state that are no dictionaries and lists, with their places."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, (*place, key))
    elif isinstance(state, list):
        for index, value in enumerate(state):
            yield from leaves(value, (*place, index))
    else:
        yield place, state

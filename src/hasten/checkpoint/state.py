"""The state of a run in a folder: the file names and formats of the reference, and the positions of the data loaders."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hasten.checkpoint import positions, random_states, reading, sidecar, store, taking
from hasten.checkpoint.background import Saving
from hasten.checkpoint.contents import (
    CUSTOM_NAME,
    EXCHANGE_NAME,
    OPTIMIZER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    Contents,
    concerns,
    is_state_file,
    numbered,
)
from hasten.checkpoint.picture import Picture
from hasten.checkpoint.roles import Transaction
from hasten.checkpoint.shares import MainShare, MemberShare
from hasten.weights.layout import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from hasten.weights.names import without_shared
from hasten.weights.torch_file import read_torch
from hasten.weights.write import FolderWriter
from hasten.world import process
from hasten.world.process import World

if TYPE_CHECKING:
    from hasten.checkpoint.sharded import Form


def save(
    folder: str | os.PathLike[str],
    contents: Contents,
    world: World,
    *,
    model_state: Callable[[Any], Mapping[str, Any]] = torch.nn.Module.state_dict,
    form: Form | None = None,
    hooks: Iterable[Callable[..., Any]] = (),
    safe_serialization: bool = True,
    save_on_each_node: bool = False,
    label: str | None = None,
    check: Callable[[Path], object] = lambda folder: None,
    after_commit: Callable[[Path], object] = lambda folder: None,
    blocking: bool = True,
) -> Any:
    """Write a checkpoint as one transaction; a crash at any moment leaves the old content of the folder or the new one.

    Call it on every process, or on the main process alone: then the random states and loader positions of the others are not in it.
    Where models are divided, every process must call it.

    Args:
        folder: where; it is made. Files in it that belong to no earlier checkpoint stay.
        contents: what.
        world: the processes.
        model_state: gives a whole model's tensors by name; called for each model on every process.
        form: how divided models and their optimizers are written.
        hooks: called as `hook(models, weights, folder)` on every process before the models are written. They may write into the
            folder that they are given, which is not yet the final one, and may empty `weights`.
        safe_serialization: write models as safetensors; False uses `torch.save`.
        save_on_each_node: where machines have disks of their own, write models, optimizers, ... on each of them.
        label, check: see `store.transaction`.
        after_commit: called with the folder, when it is complete, by the process that put it in place.
        blocking: False copies everything into the memory of the host and writes it in the background.

    Returns:
        The folder (a `RemoteFolder` behind a URL); in the background the save that is under way.

    Raises:
        OSError: this process could not write.
        RuntimeError: another process could not, or did not come in time.
    """
    with ExitStack() as stack:
        writing = stack.enter_context(
            store.transaction(
                folder,
                world,
                label=label,
                is_stale=is_state_file,
                check=check,
                topology=taking.topology_of_save(contents, form),
            )
        )
        writing.before_commit.append(positions.drop_repeated)
        writing.after_commit.append(after_commit)
        shared = writing.is_main or (writing.leads and save_on_each_node)
        if form is None:
            picture = taking.take_whole(writing, contents, world, shared, model_state, hooks)
            if isinstance(writing.share, MemberShare):
                picture = taking.lent(writing.share, picture, safe_serialization, copy=not blocking)
        else:
            picture = taking.take_divided(writing, contents, world, shared, form, hooks)
        if blocking:
            _write(writing, picture, world, form, safe_serialization)
            return writing.place
        picture, form, world = taking.staged(picture, form, world, safe_serialization, f"{writing.place} was not saved")
        opened = stack.pop_all()

    def finish() -> None:
        with opened:
            _write(writing, picture, world, form, safe_serialization)

    return Saving(writing.place, finish)


def load(
    folder: str | os.PathLike[str],
    contents: Contents,
    world: World,
    *,
    hooks: Iterable[Callable[..., Any]] = (),
    map_location: Any = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Restore what `save` or the reference wrote. No process waits for another, unless models are divided: then all must call it.

    Args:
        folder: the checkpoint.
        contents: the objects to restore, in the order in which they were saved.
        world: the processes; their number may differ from that at saving.
        hooks: called as `hook(models, folder)` before the models are read; they may empty `models`.
        map_location: None or "cpu": through host memory; "on_device": straight to this process's device.
        load_kwargs: arguments of `torch.load` for optimizers, schedulers and the scaler, e.g. `{"weights_only": False}`.
        load_model_func_kwargs: arguments for loading models, e.g. `strict=False`.

    Returns:
        {"step": the number of micro-batches}; empty if the checkpoint does not know it.

    Raises:
        ValueError: there is no such folder; or each process has saved its own files, and there are more or fewer now, or another
            mesh.
        FileNotFoundError: there is no file for one of the objects.
        RuntimeError: a file is damaged or does not fit, or the number of custom objects differs.
    """
    path = store.resolve(folder)
    if sidecar.is_save(path):
        from hasten.checkpoint.own_file import topology_of

        sidecar.check_fits(path, world.rank, world.size, topology_of(contents.models))
    verify(path, world)
    _check_custom(path, len(contents.custom))
    models = list(contents.models)
    for hook in hooks:
        hook(models, str(path))
    device = _device(map_location, world)
    if contents.divided:
        reading.read_divided(path, models, contents, world, load_kwargs, **load_model_func_kwargs)
    else:
        reading.read_whole(path, models, contents, device, load_kwargs, load_model_func_kwargs)
    reading.read_shared(path, contents, device, load_kwargs)
    positions.read(path, contents.dataloaders, world.rank)
    for index, item in enumerate(contents.custom):
        load_custom_state(item, os.fspath(path), index)
    # Last, since loading the others may draw random numbers.
    step = random_states.read(path, world.rank, world)
    return {} if step is None else {"step": step}


def verify(folder: str | os.PathLike[str], world: World, checksums: bool = False) -> Path:
    """Check that the files that this rank reads are there, with their sizes, and on demand with their checksums.

    Raises:
        RuntimeError: files are damaged or missing; the message names them.
    """
    path = store.resolve(folder)
    store.verify(path, checksums, concerns=lambda name: concerns(name, world.rank), rank=world.rank)
    return path


def exchange_orders(folder: str | os.PathLike[str]) -> list[list[str] | None]:
    """The orders of exchange that a checkpoint holds; none if they did not matter, or if the reference wrote it."""
    path = store.resolve(folder) / EXCHANGE_NAME
    return read_torch(path, map_location="cpu") if path.exists() else []


def save_accelerator_state(
    output_dir: str | os.PathLike[str],
    model_states: list[Any],
    optimizers: list[Any],
    schedulers: list[Any],
    dataloaders: list[Any],
    process_index: int,
    step: int,
    scaler: Any = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write states into a folder that exists, file by file, without a transaction; see `save` for one.

    The main process writes models, optimizers, schedulers and the scaler (under `save_on_each_node` the first process of each
    machine does), every process its random states and loader positions.
    """
    folder = Path(output_dir)
    world = process.current()
    contents = Contents((), optimizers, schedulers, dataloaders, (), scaler, step)
    with FolderWriter(folder) as writer:
        if process_index == 0 or (save_on_each_node and world.is_local_main):
            _write_shared(writer, taking.take_shared(contents, model_states), safe_serialization)
        random_states.write(writer, process_index, random_states.states(step, world))
        positions.write(writer, positions.states(dataloaders), process_index)
    return folder


def load_accelerator_state(
    input_dir: str | os.PathLike[str],
    models: list[Any],
    optimizers: list[Any],
    schedulers: list[Any],
    dataloaders: list[Any],
    process_index: int,
    scaler: Any = None,
    map_location: Any = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Restore what `save_accelerator_state` wrote; returns {"step": ...} as `load` does. See `load`."""
    folder = Path(input_dir)
    world = process.current()
    contents = Contents((), optimizers, schedulers, dataloaders, (), scaler)
    device = _device(map_location, world)
    reading.read_whole(folder, models, contents, device, load_kwargs, load_model_func_kwargs)
    reading.read_shared(folder, contents, device, load_kwargs)
    positions.read(folder, dataloaders, process_index)
    step = random_states.read(folder, process_index, world)
    return {} if step is None else {"step": step}


def save_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False) -> None:
    """Write `obj.state_dict()` to `custom_checkpoint_{index}.pkl` in a folder, on the main process or each machine's first one."""
    world = process.current()
    if world.is_main or (save_on_each_node and world.is_local_main):
        with FolderWriter(Path(path)) as writer:
            writer.save_torch(CUSTOM_NAME.format(index), obj.state_dict())


def load_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
    """Restore `obj` from `custom_checkpoint_{index}.pkl` in a folder.

    The file may hold any type, and reading it can run code: it must be one that you trust.
    """
    state = read_torch(Path(path) / CUSTOM_NAME.format(index), map_location="cpu", weights_only=False)
    obj.load_state_dict(state)


def _write(writing: Transaction, picture: Picture, world: World, form: Form | None, safe: bool) -> None:
    """Write what this process has to write."""
    if form is not None:
        from hasten.checkpoint import sharded

        sharded.write(writing.writer, picture, form, safe, world)
    written: Collection[str] = ()
    if form is None and isinstance(writing.share, MainShare):
        written = writing.share.write(partial(taking.images, picture, safe))
    _write_shared(writing.writer, picture, safe, written)
    for index, state in enumerate(picture.custom):
        writing.writer.save_torch(CUSTOM_NAME.format(index), state)
    random_states.write(writing.writer, world.rank, picture.random)
    positions.write(writing.writer, picture.positions, world.rank)
    if form is None and isinstance(writing.share, MemberShare):
        writing.share.write()  # last, since it waits for the main process


def _write_shared(writer: FolderWriter, picture: Picture, safe: bool, written: Collection[str] = ()) -> None:
    """What is the same on all processes, but for the models and optimizers whose files are written."""
    for index, state in enumerate(picture.weights):
        if numbered(SAFE_WEIGHTS_NAME if safe else WEIGHTS_NAME, index) in written:
            continue
        if safe:
            writer.save_safetensors(numbered(SAFE_WEIGHTS_NAME, index), without_shared(state)[0])
        else:
            writer.save_torch(numbered(WEIGHTS_NAME, index), state)
    for index, state in enumerate(picture.optimizers):
        if numbered(OPTIMIZER_NAME, index) not in written:
            writer.save_torch(numbered(OPTIMIZER_NAME, index), state)
    for index, state in enumerate(picture.schedulers):
        writer.save_torch(numbered(SCHEDULER_NAME, index), state)
    if picture.scaler is not None:
        writer.save_torch(SCALER_NAME, picture.scaler)
    if picture.exchange_orders:
        writer.save_torch(EXCHANGE_NAME, picture.exchange_orders)


def _check_custom(folder: Path, registered: int) -> None:
    found = sum(re.fullmatch(r"custom_checkpoint_\d+\.pkl", entry.name) is not None for entry in os.scandir(folder))
    if found != registered:
        raise RuntimeError(
            f"Number of custom checkpoints in folder {folder} does not match the number of registered objects:\n"
            f"\tFound checkpoints: {found}\n\tRegistered objects: {registered}\n"
            "Please make sure to only load checkpoints from folders that were created with the same set of registered objects, "
            "or avoid using `custom_checkpoint` in the filename for files in that same directory and load them in manually."
        )


def _device(map_location: Any, world: World) -> Any:
    if map_location in (None, "cpu"):
        return "cpu"
    if map_location == "on_device":
        return world.device
    raise TypeError(
        "Unsupported optimizer map location passed, please choose one of `None`, `'cpu'`, or `'on_device'`; "
        f"it was {map_location!r}."
    )

"""The state of a run in a folder: the file names and formats of the reference, and the positions of the data loaders."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hasten.checkpoint import positions, random_states, sidecar, store
from hasten.checkpoint.background import Saving
from hasten.checkpoint.picture import Picture
from hasten.checkpoint.roles import Transaction
from hasten.checkpoint.shares import MainShare, MemberShare
from hasten.weights.image import Image, safetensors_image, torch_image
from hasten.weights.layout import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from hasten.weights.names import without_shared
from hasten.weights.read import load_model
from hasten.weights.torch_file import read_torch, read_torch_into
from hasten.weights.write import FolderWriter, Serialized
from hasten.world import process
from hasten.world.process import World

if TYPE_CHECKING:
    from hasten.checkpoint.sharded import Form

logger = logging.getLogger(__name__)

OPTIMIZER_NAME = "optimizer.bin"
SCHEDULER_NAME = "scheduler.bin"
SCALER_NAME = "scaler.pt"
CUSTOM_NAME = "custom_checkpoint_{}.pkl"
EXCHANGE_NAME = "exchange_orders.bin"

_OURS = re.compile(
    r"(model|pytorch_model)(_\d+)?\.(safetensors|bin)|(optimizer|scheduler|sampler)(_\d+)?\.bin|scaler\.pt|exchange_orders\.bin|"
    r"dl_state_dict(_\d+)?(_rank\d+)?\.bin|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl|"
    r"pytorch_model_fsdp(_\d+)?(_rank\d+)?\.(bin|safetensors)|optimizer_\d+_rank\d+\.bin"
)


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds. The order within each list is what ties an object to its files.

    Args:
        models: the users' own modules.
        optimizers, schedulers, dataloaders, custom: objects with `state_dict` and `load_state_dict`.
        scaler: the gradient scaler, or None.
        step: the number of micro-batches since the last reset.
        exchange_orders: for each model the names of its gradients in the order of their exchange, or None.
        divided: whether each process holds only a part of the models: then all of them must save and load together.
    """

    models: Sequence[torch.nn.Module] = ()
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Any] = ()
    dataloaders: Sequence[Any] = ()
    custom: Sequence[Any] = ()
    scaler: Any = None
    step: int = 0
    exchange_orders: Sequence[list[str] | None] = ()
    divided: bool = False


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
                folder, world, label=label, is_stale=is_state_file, check=check, topology=_own_topology(contents, form)
            )
        )
        writing.before_commit.append(positions.drop_repeated)
        writing.after_commit.append(after_commit)
        shared = writing.is_main or (writing.leads and save_on_each_node)
        if form is None:
            picture = _picture(writing, contents, world, shared, model_state, hooks)
            if isinstance(writing.share, MemberShare):
                picture = _lent(writing.share, picture, safe_serialization, copy=not blocking)
        else:
            picture = _divided_picture(writing, contents, world, shared, form, hooks)
        if blocking:
            _write(writing, picture, world, form, safe_serialization)
            return writing.place
        picture, form, world = _staged(picture, form, world, safe_serialization, f"{writing.place} was not saved")
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
        _read_divided(path, models, contents, world, load_kwargs, **load_model_func_kwargs)
    else:
        _read_whole(path, models, contents, device, load_kwargs, load_model_func_kwargs)
    _read_shared(path, contents, device, load_kwargs)
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
    store.verify(path, checksums, concerns=lambda name: not _is_of_another_rank(name, world.rank), rank=world.rank)
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
            _write_shared(writer, _shared_picture(contents, model_states), safe_serialization)
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
    _read_whole(folder, models, contents, device, load_kwargs, load_model_func_kwargs)
    _read_shared(folder, contents, device, load_kwargs)
    positions.read(folder, dataloaders, process_index)
    step = random_states.read(folder, process_index, world)
    return {} if step is None else {"step": step}


def save_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False) -> None:
    """Write `obj.state_dict()` to `custom_checkpoint_{index}.pkl` in a folder, on the main process or each machine's first one."""
    world = process.current()
    if world.is_main or (save_on_each_node and world.is_local_main):
        with FolderWriter(Path(path)) as writer:
            writer.save_torch(CUSTOM_NAME.format(index), obj.state_dict())


def _whole_states(contents: Contents, world: World) -> dict[int, Any]:
    """The states of registered objects that are divided as the models are, put together; every process takes part."""
    if not contents.divided:
        return {}
    return {
        index: item.whole_state_dict(world)
        for index, item in enumerate(contents.custom)
        if hasattr(item, "whole_state_dict")
    }


def load_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
    """Restore `obj` from `custom_checkpoint_{index}.pkl` in a folder.

    The file may hold any type, and reading it can run code: it must be one that you trust.
    """
    state = read_torch(Path(path) / CUSTOM_NAME.format(index), map_location="cpu", weights_only=False)
    obj.load_state_dict(state)


def is_state_file(name: str) -> bool:
    """Whether a file of this name belongs to the state of a run."""
    return _OURS.fullmatch(name) is not None


def concerns(name: str, rank: int) -> bool:
    """Whether a process reads a file of a checkpoint."""
    return not _is_of_another_rank(name, rank)


def _is_of_another_rank(name: str, rank: int) -> bool:
    """Whether only another process reads this file: a thousand processes need not check a thousand such files each."""
    match = re.fullmatch(r"random_states_(\d+)\.pkl|.*_rank(\d+)\.bin", name)
    return match is not None and rank != int(match[1] or match[2])


def numbered(name: str, index: int) -> str:
    """The name of the file of object number `index`: "optimizer.bin", "optimizer_1.bin", ..."""
    stem, suffix = os.path.splitext(name)
    return name if index == 0 else f"{stem}_{index}{suffix}"


# -- writing -------------------------------------------------------------------------------------------------------------


def _own_topology(contents: Contents, form: Form | None) -> sidecar.Topology | None:
    """How this process holds parameters, if each one commits its own files."""
    if form is None:
        return None
    from hasten.checkpoint import own_file, sharded

    return own_file.topology_of(contents.models) if form is sharded.Form.RANKS else None


def _shared_picture(contents: Contents, weights: Sequence[Any], divided: bool = False) -> Picture:
    """What is the same on all processes."""
    return Picture(
        weights=list(weights),
        optimizers=[] if divided else [optimizer.state_dict() for optimizer in contents.optimizers],
        schedulers=[scheduler.state_dict() for scheduler in contents.schedulers],
        scaler=None if contents.scaler is None else contents.scaler.state_dict(),
        exchange_orders=list(contents.exchange_orders) if any(contents.exchange_orders) else [],
    )


def _picture(
    writing: Transaction,
    contents: Contents,
    world: World,
    shared: bool,
    model_state: Callable[[Any], Mapping[str, Any]],
    hooks: Iterable[Callable[..., Any]],
) -> Picture:
    """What this process writes, where each holds whole models."""
    models, weights = list(contents.models), [model_state(model) for model in contents.models]
    for hook in hooks:
        hook(models, weights, str(writing.temporary))
    picture = _shared_picture(contents, weights) if shared else Picture()
    if isinstance(writing.share, MemberShare):
        picture.weights, picture.optimizers = list(weights), _known_states(contents.optimizers)
    return _with_own(picture, contents, world, shared)


def _known_states(optimizers: Iterable[Any]) -> list[Any]:
    """The states of optimizers on a process that need not have them: some have the whole of it on the main process only."""
    try:
        return [optimizer.state_dict() for optimizer in optimizers]
    except Exception as error:
        logger.debug("Not shared: %s", error)
        return []


def _lent(share: MemberShare, picture: Picture, safe: bool, copy: bool) -> Picture:
    """Give the large states to this process's share; what is left of its picture."""
    share.take(partial(_images, picture, safe), copy)
    return replace(picture, weights=[], optimizers=[])


def _images(picture: Picture, safe: bool) -> dict[str, Image]:
    """The files of models and optimizers, as `_write_shared` writes them."""
    weights = {
        numbered(SAFE_WEIGHTS_NAME if safe else WEIGHTS_NAME, index): safetensors_image(without_shared(state)[0])
        if safe
        else torch_image(state)
        for index, state in enumerate(picture.weights)
        if not isinstance(state, Serialized)
    }
    states = {numbered(OPTIMIZER_NAME, index): state for index, state in enumerate(picture.optimizers)}
    return weights | {name: torch_image(state) for name, state in states.items() if not isinstance(state, Serialized)}


def _divided_picture(
    writing: Transaction,
    contents: Contents,
    world: World,
    shared: bool,
    form: Form,
    hooks: Iterable[Callable[..., Any]],
) -> Picture:
    """What this process writes, where each holds a part of the models."""
    from hasten.checkpoint import by_name, sharded
    from hasten.collectives.together import together

    models: list[Any] = list(contents.models)
    weights: list[Any] = []

    def prepare() -> None:
        weights.extend(by_name.model_state(model) for model in models)
        for hook in hooks:
            hook(models, weights, str(writing.temporary))

    what = f"{writing.place} was not saved"
    if form is sharded.Form.RANKS:
        prepare()
    else:
        sharded.check_one_folder(writing.temporary, world)
        together(world, what, prepare)
    picture = _shared_picture(contents, [], divided=True) if shared else Picture()
    picture.divided_weights = weights
    picture.buffers = [
        frozenset(by_name.buffers(models[index])) if index < len(models) else frozenset()
        for index in range(len(weights))
    ]
    picture.divided_optimizers = [
        sharded.optimizer_state(optimizer, contents.models, form, world, what) for optimizer in contents.optimizers
    ]
    return _with_own(picture, contents, world, shared)


def _with_own(picture: Picture, contents: Contents, world: World, shared: bool) -> Picture:
    """Add the registered objects, where they are written, and what each process has of its own."""
    wholes = _whole_states(contents, world)
    if shared:
        picture.custom = [wholes.get(index) or item.state_dict() for index, item in enumerate(contents.custom)]
    picture.random = random_states.states(contents.step, world)
    picture.positions = positions.states(contents.dataloaders)
    return picture


def _staged(
    picture: Picture, form: Form | None, world: World, safe: bool, what: str
) -> tuple[Picture, Form | None, World]:
    """A copy that training does not change, and how it is written without meeting what training exchanges meanwhile."""
    if form is not None:
        from hasten.checkpoint import sharded

        if form is sharded.Form.FILES:
            picture = sharded.whole_picture(picture, world, what)
        world = sharded.world_of_background(form, world)
    return picture.copied(safe), form, world


def _write(writing: Transaction, picture: Picture, world: World, form: Form | None, safe: bool) -> None:
    """Write what this process has to write."""
    if form is not None:
        from hasten.checkpoint import sharded

        sharded.write(writing.writer, picture, form, safe, world)
    written: Collection[str] = ()
    if form is None and isinstance(writing.share, MainShare):
        written = writing.share.write(partial(_images, picture, safe))
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


# -- reading -------------------------------------------------------------------------------------------------------------


def _read_shared(folder: Path, contents: Contents, device: Any, load_kwargs: dict[str, Any] | None) -> None:
    """What is the same on all processes, but for models and optimizers."""
    options = {"map_location": device, **(load_kwargs or {})}
    for index, scheduler in enumerate(contents.schedulers):
        path = _existing(folder, numbered(SCHEDULER_NAME, index), scheduler)
        scheduler.load_state_dict(read_torch(path, **options))
    if contents.scaler is not None:
        path = _existing(folder, SCALER_NAME, contents.scaler)
        contents.scaler.load_state_dict(read_torch(path, **options))
    for name, count in ((OPTIMIZER_NAME, len(contents.optimizers)), (SCHEDULER_NAME, len(contents.schedulers))):
        _warn_of_more(folder / numbered(name, count), count)


def _warn_of_more(following: Path, count: int) -> None:
    if count and following.exists():
        logger.warning("%s is not loaded: there are only %d such objects now.", following, count)


def _read_whole(
    folder: Path,
    models: Sequence[torch.nn.Module],
    contents: Contents,
    device: Any,
    load_kwargs: dict[str, Any] | None,
    load_model_kwargs: dict[str, Any],
) -> None:
    """Models and optimizers that this process holds the whole of, also where they were divided when they were saved."""
    options = {"map_location": device, **(load_kwargs or {})}
    for index, model in enumerate(models):
        _read_model(folder, index, model, device, load_model_kwargs)
    for index, optimizer in enumerate(contents.optimizers):
        _read_optimizer(folder, index, optimizer, contents.models or models, options)
    _warn_of_more(folder / numbered(SAFE_WEIGHTS_NAME, len(models)), len(models))


def _read_divided(
    folder: Path,
    models: Sequence[torch.nn.Module],
    contents: Contents,
    world: World,
    load_kwargs: dict[str, Any] | None,
    strict: bool = True,
) -> None:
    from hasten.checkpoint import sharded

    sharded.read_all(folder, models, contents.optimizers, contents.models, world, strict, load_kwargs)


def _read_model(folder: Path, index: int, model: torch.nn.Module, device: Any, options: dict[str, Any]) -> None:
    safe, other = folder / numbered(SAFE_WEIGHTS_NAME, index), folder / numbered(WEIGHTS_NAME, index)
    if safe.exists():
        load_model(model, safe, device=device, **options)
    elif not other.exists() and _was_divided(folder, "model", index):
        from hasten.checkpoint import sharded

        sharded.read_model(folder, index, model, None, **options)
    elif torch.device(device).type != "cpu" or options.get("assign"):
        path = _existing(folder, other.name, model, or_else=safe.name)
        model.load_state_dict(read_torch(path, device), **options)
    else:
        path = _existing(folder, other.name, model, or_else=safe.name)
        model.load_state_dict(read_torch_into(path, model.state_dict()), **options)


def _read_optimizer(folder: Path, index: int, optimizer: Any, models: Sequence[Any], options: dict[str, Any]) -> None:
    path = folder / numbered(OPTIMIZER_NAME, index)
    state = None
    if path.exists() or not _was_divided(folder, "optimizer", index):
        state = _read_state(_existing(folder, path.name, optimizer), optimizer, options)
        groups = state.get("param_groups", ()) if isinstance(state, Mapping) else ()
        if not any(isinstance(name, str) for group in groups for name in group["params"]):
            try:
                optimizer.load_state_dict(state)
            except ValueError as error:
                raise ValueError(
                    f"{path} does not fit optimizer number {index}, a {type(optimizer).__name__}: {error}. Prepare the same "
                    "optimizers over the same parameters, in the same order, as when the checkpoint was saved. Models have been "
                    "loaded already."
                ) from error
            return
    from hasten.checkpoint import sharded  # parameters are known by name

    sharded.read_optimizer(folder, index, optimizer, models, None, options)


def _read_state(path: Path, optimizer: Any, options: dict[str, Any]) -> Any:
    if options["map_location"] not in ("cpu", torch.device("cpu")):
        return read_torch(path, **options)
    options = {name: value for name, value in options.items() if name != "map_location"}
    # Tensors go straight into the memory that the optimizer has for them: of other ones torch's own check complains later.
    return read_torch_into(path, optimizer.state_dict(), **options)


def _was_divided(folder: Path, kind: str, index: int) -> bool:
    from hasten.checkpoint import sources

    return sources.find(folder, kind, index) is not None


def _existing(folder: Path, name: str, item: Any, or_else: str | None = None) -> Path:
    path = folder / name
    if not path.exists():
        names = name if or_else is None else f"{or_else} nor {name}"
        raise FileNotFoundError(
            f"There is no {names} in {folder}, which should hold the state of a {type(item).__name__}. Prepare the same objects in "
            "the same order as when the checkpoint was saved. If each machine has a disk of its own, save with "
            "`ProjectConfiguration(save_on_each_node=True)`."
        )
    return path


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

"""Models whose parameters are divided over processes, and their optimizers, in the files of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hasten.checkpoint import by_name, dcp, own_file, sources
from hasten.checkpoint.dcp import leaves
from hasten.checkpoint.picture import Picture
from hasten.checkpoint.sources import MODEL, OPTIMIZER
from hasten.collectives.objects import gather_object
from hasten.collectives.together import together
from hasten.weights.write import FolderWriter, in_file_order
from hasten.world.process import World


class Form(Enum):
    """How a checkpoint holds divided states."""

    FOLDERS = "a folder of shards that loads on any number of processes (SHARDED_STATE_DICT)"
    FILES = "one file of whole tensors (FULL_STATE_DICT)"
    RANKS = "one file of each process, without any exchange between them (SHARDED_STATE_DICT, sharded_save='per_rank')"

    @property
    def is_silent(self) -> bool:
        """Whether a process hears nothing of what becomes of the others' parts."""
        return self is Form.RANKS


def form_of(state_dict_type: Any, use_dcp: bool = True) -> Form:
    """The form that a `StateDictType`, or its name, asks for.

    Raises:
        ValueError: LOCAL_STATE_DICT, which only FSDP version 1 has; or `use_dcp=False` with FULL_STATE_DICT.
    """
    name = str(getattr(state_dict_type, "name", state_dict_type)).upper()
    if name == "SHARDED_STATE_DICT":
        return Form.FOLDERS if use_dcp else Form.RANKS
    if name == "FULL_STATE_DICT":
        return Form.FILES
    raise ValueError(f"{state_dict_type} is not a form of checkpoints here; use SHARDED_STATE_DICT or FULL_STATE_DICT.")


# -- writing -------------------------------------------------------------------------------------------------------------


def write(writer: FolderWriter, picture: Picture, form: Form, safe: bool, world: World) -> None:
    """Write the divided states of a picture; every process calls it, unless they have been made whole.

    Args:
        writer: of the checkpoint's folder.
        picture: what this process has of them.
        form: see `Form`.
        safe: write whole weights as safetensors.
        world: the processes.
    """
    if picture.whole and not world.is_main:
        return
    joint = None if picture.whole else world
    for index, weights in enumerate(picture.divided_weights):
        write_model(writer, index, weights, form, safe, joint, picture.buffers[index])
    for index, state in enumerate(picture.divided_optimizers):
        write_optimizer(writer, index, state, form, joint)


def whole_picture(picture: Picture, world: World, what: str) -> Picture:
    """A picture whose divided states are whole on the main process, and empty on the others; every process calls it."""

    def gathered(state: dict[str, Any]) -> dict[str, Any]:
        unique, others = by_name.apart(dict(leaves(state)))
        order = sorted(unique, key=str)
        whole: dict[Any, Any] = {}

        def keep(coming: Iterator[Any]) -> None:
            whole.update(zip(order, coming, strict=True))

        gather_for(what, (unique[place] for place in order), keep, world.is_main, world)
        return (
            _with(state, {**whole, **{other: whole[first] for other, first in others.items()}}) if world.is_main else {}
        )

    return replace(
        picture,
        divided_weights=[gathered(dict(weights)) for weights in picture.divided_weights],
        divided_optimizers=[gathered(state) for state in picture.divided_optimizers],
        whole=True,
    )


def world_of_background(form: Form, world: World) -> World:
    """The same processes, who may exchange something while training exchanges its own; every process calls it."""
    if form is not Form.FOLDERS or world.size == 1:
        return world
    twin: World | None = world.attached.get("background")
    if twin is None:
        twin = world.attached["background"] = world.twin()
    return twin


def check_one_folder(folder: Path, world: World | None) -> None:
    """Check that all processes write into the same folder; every one of them calls this.

    Raises:
        RuntimeError: some see another disk.
    """
    names = gather_object([folder.name], world=world) if world is not None and world.size > 1 else [folder.name]
    if len(set(names)) > 1:
        raise RuntimeError(
            f"The shards of a model must go into one folder that all processes see, but {folder.parent} is another disk on some "
            "machines. Choose a shared folder, or FULL_STATE_DICT: then the main process alone writes."
        )


def write_model(
    writer: FolderWriter,
    index: int,
    weights: Mapping[str, Any],
    form: Form,
    safe: bool,
    world: World | None,
    buffers: frozenset[str] = frozenset(),
) -> None:
    """Write a model's state; every process calls it.

    Args:
        writer: of the checkpoint's folder.
        index: the model's number.
        weights: its state by name; one tensor under several names is written once.
        form: see `Form`.
        safe: write whole tensors as safetensors.
        world: the processes; None for this one alone.
        buffers: names that processes may hold different values of: those of the main process count.
    """
    state, others = by_name.apart(weights)
    if form is Form.RANKS:
        rank = 0 if world is None else world.rank
        writer.save_torch(sources.rank_name(MODEL, index, rank), own_file.pack(dict(weights)))
    elif form is Form.FOLDERS:
        own = state if world is None or world.is_main else {name: state[name] for name in state if name not in buffers}
        aliases: dict[Any, Any] = {(MODEL, other): (MODEL, first) for other, first in others.items()}
        dcp.write(writer, sources.folder_name(MODEL, index), {MODEL: _divided(own, world)}, aliases, world)
    else:
        number = f"_{index}" if index else ""
        name = f"pytorch_model_fsdp{number}.{'safetensors' if safe else 'bin'}"
        write_whole(writer, name, state, safe, world, {} if safe else others)


def optimizer_state(
    optimizer: Any, models: Sequence[torch.nn.Module], form: Form, world: World | None, what: str
) -> dict[str, Any]:
    """An optimizer's state and groups by the names of the parameters in the models; every process calls it.

    Args:
        optimizer: the optimizer.
        models: the models with its parameters.
        form: with one file of each process nobody waits for the others.
        world: the processes; None for this one alone.
        what: the beginning of the error's text, if another process fails.

    Raises:
        NotImplementedError: see `by_name.optimizer_state`.
    """
    if form is Form.RANKS:
        return by_name.optimizer_state(optimizer, models, divide=False)
    return together(world, what, lambda: by_name.optimizer_state(optimizer, models))


def write_optimizer(writer: FolderWriter, index: int, state: dict[str, Any], form: Form, world: World | None) -> None:
    """Write an optimizer's state by names; every process calls it.

    Args:
        writer, index, form, world: as in `write_model`.
        state: what `optimizer_state` gives.
    """
    if form is Form.RANKS:
        rank = 0 if world is None else world.rank
        writer.save_torch(sources.rank_name(OPTIMIZER, index, rank), own_file.pack(state))
    elif form is Form.FOLDERS:
        dcp.write(writer, sources.folder_name(OPTIMIZER, index), {OPTIMIZER: _divided(state, world)}, {}, world)
    else:
        write_whole(writer, f"optimizer_{index}.bin" if index else "optimizer.bin", state, False, world)


def _divided(state: dict[str, Any], world: World | None) -> dict[str, Any]:
    """What this process may have to write. Numbers and groups are the same everywhere: the main process's are enough."""
    if world is None or world.is_main:
        return state
    kept: dict[str, Any] = {}
    for place, value in leaves(state):
        if isinstance(value, DTensor) or (isinstance(value, torch.Tensor) and value.numel() > 1):
            part = kept
            for key in place[:-1]:
                part = part.setdefault(key, {})
            part[place[-1]] = value
    return kept


def write_whole(
    writer: FolderWriter,
    name: str,
    state: dict[str, Any],
    safe: bool,
    world: World | None,
    others: Mapping[str, str] | None = None,
) -> None:
    """Write whole tensors into one file, on the main process; every process calls it, to send its shards.

    As safetensors, one tensor at a time is whole; a file of `torch.save` needs all of them in the main process's memory.
    `others` are further names for tensors of the state.
    """
    if safe:
        forms = {key: torch.empty(value.shape, dtype=value.dtype, device="meta") for key, value in state.items()}
        order = [(key,) for key in in_file_order(forms)]
    else:
        # Optimizers may come by their entries in another order on each process.
        order = sorted((place for place, _ in leaves(state)), key=str)
    values = dict(leaves(state))

    def use(coming: Iterator[Any]) -> None:
        if safe:
            writer.save_safetensors(name, forms, read=lambda key: next(coming))
            return
        whole = _with(state, dict(zip(order, coming, strict=True)))
        writer.save_torch(name, {**whole, **{other: whole[first] for other, first in (others or {}).items()}})

    what = f"{writer.folder / name} was not written"
    gather_for(what, (values[place] for place in order), use, world is None or world.is_main, world)


def gather_for(
    what: str, values: Iterable[Any], use: Callable[[Iterator[Any]], None], keeps: bool, world: World | None
) -> None:
    """Make divided values whole, one after the other, for those processes that use them; every process calls it.

    Args:
        what: the beginning of the error's text, if a process fails.
        values: the same on every process, in the same order; what is no DTensor passes as it is.
        use: called on the processes that keep them, with whole values on the CPU, each of which it should let go.
        keeps: whether this process uses them.
        world: the processes; None for this one alone.
    """
    coming = (_whole(value, keeps) for value in values)

    def gather() -> None:
        try:
            if keeps:
                use(coming)
        finally:
            for _ in coming:  # whatever happens here, the others wait for this process to take part
                pass

    together(world, what, gather)


def _whole(value: Any, keep: bool) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.cpu() if keep and isinstance(value, torch.Tensor) else value if keep else None


def _with(state: Any, values: Mapping[Any, Any], place: tuple[Any, ...] = ()) -> Any:
    if isinstance(state, dict):
        return {key: _with(value, values, (*place, key)) for key, value in state.items()}
    if isinstance(state, list):
        return [_with(value, values, (*place, index)) for index, value in enumerate(state)]
    return values[place]


# -- reading -------------------------------------------------------------------------------------------------------------


def read_model(
    folder: Path,
    index: int,
    model: torch.nn.Module,
    world: World | None,
    strict: bool = True,
    load_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Read a model's state, in whatever form a checkpoint holds it; every process of the world calls it.

    Raises:
        FileNotFoundError: it holds none.
        RuntimeError: shapes differ, or names do under `strict`.
    """
    (found,) = sources.look(folder, [(MODEL, index)], world)
    return _read(found, world, load_kwargs, lambda source: by_name.load_model(model, source, strict))


def read_optimizer(
    folder: Path,
    index: int,
    optimizer: Any,
    models: Sequence[torch.nn.Module],
    world: World | None,
    load_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Read an optimizer's state and groups, as `read_model` does a model's."""
    (found,) = sources.look(folder, [(OPTIMIZER, index)], world)
    _read(found, world, load_kwargs, lambda source: by_name.load_optimizer(optimizer, models, source))


def read_all(
    folder: Path,
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[Any],
    all_models: Sequence[torch.nn.Module],
    world: World | None,
    strict: bool = True,
    load_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Read the states of models and optimizers as `read_model` and `read_optimizer` do, with fewer exchanges.

    `all_models` have the parameters of the optimizers.
    """
    wanted = [(MODEL, index) for index in range(len(models))] + [(OPTIMIZER, index) for index in range(len(optimizers))]
    found = sources.look(folder, wanted, world)
    for model, place in zip(models, found, strict=False):
        _read(place, world, None, lambda source, model=model: by_name.load_model(model, source, strict))  # type: ignore[misc]
    for optimizer, place in zip(optimizers, found[len(models) :], strict=True):
        _read(
            place,
            world,
            load_kwargs,
            lambda source, optimizer=optimizer: by_name.load_optimizer(optimizer, all_models, source),  # type: ignore[misc]
        )


def _read(
    found: sources.Found, world: World | None, load_kwargs: Mapping[str, Any] | None, action: Callable[[Any], Any]
) -> Any:
    options = _options(load_kwargs)
    if found.how == "own":
        return action(found.open(world, options))
    what = f"{found.path} was not loaded"
    if found.how == "file":
        # What is compared is the same everywhere, so a source that sends tensors is not left by one process alone.
        source = found.open(world, options)
        return together(world, what, lambda: action(source))
    return together(world, what, lambda: action(found.open(world, options)))


def _options(load_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (load_kwargs or {}).items() if name != "map_location"}

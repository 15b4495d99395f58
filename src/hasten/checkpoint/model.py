"""A model's weights in a folder, for other programs to load: one file, or shards and their index."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hasten.checkpoint import commit
from hasten.checkpoint.leftovers import open_temporary
from hasten.checkpoint.manifest import MANIFEST, Manifest
from hasten.weights.layout import SAFE_WEIGHTS, WEIGHTS, Layout, plan_layout
from hasten.weights.names import clean_state_dict_for_safetensors, warn_of_ties
from hasten.weights.write import FolderWriter, in_file_order
from hasten.world import process
from hasten.world.process import World

logger = logging.getLogger(__name__)


def save_model(
    model: torch.nn.Module | Mapping[str, torch.Tensor],
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    *,
    save_on_each_node: bool = False,
    world: World | None = None,
) -> None:
    """Write a model's weights, on the main process only. No process waits for another.

    `model.safetensors`, or `model-00001-of-0000N.safetensors` with `model.safetensors.index.json`; without `safe_serialization`
    `pytorch_model.bin` and so on. Shards and index of an earlier save of the same kind that are no longer needed are removed; other
    files stay. A crash leaves the old weights or the new ones.

    Args:
        model: the user's own module, or its state dictionary.
        save_directory: where; it is made.
        max_shard_size: bytes, or a text such as "5GB", that a file holds at most; a larger tensor has a file of its own.
        safe_serialization: use the safetensors format. Of tied names one is written, with a warning.
        save_on_each_node: write on the first process of each machine.
        world: the processes; the default world by default.

    Raises:
        RuntimeError: some parameters are on the meta device, so they have no values.
        ValueError: the size is not one.
        OSError: the files can't be written.
    """
    world = process.current() if world is None else world
    if os.path.isfile(save_directory):
        # The reference reports this and goes on, and programs rely on it.
        logger.error("Provided path (%s) should be a directory, not a file", save_directory)
        return
    state = model.state_dict() if isinstance(model, torch.nn.Module) else model
    if any(tensor.is_meta for tensor in state.values()):
        raise RuntimeError(
            "You can't save the model since some parameters are on the meta device. Load or initialise their values first."
        )
    family = SAFE_WEIGHTS if safe_serialization else WEIGHTS
    if not (world.is_main or (save_on_each_node and world.is_local_main)):
        return
    if safe_serialization:
        state = clean_state_dict_for_safetensors(state)
    layout = plan_layout(state, family, max_shard_size)

    def put(writer: FolderWriter, name: str, names: Sequence[str]) -> None:
        part = {key: state[key] for key in names}
        if safe_serialization:
            writer.save_safetensors(name, part)
        else:
            writer.save_torch(name, part)

    _write(layout, _target(save_directory), put)


def save_divided(
    state: Mapping[str, Any],
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str,
    safe_serialization: bool,
    *,
    save_on_each_node: bool = False,
    world: World,
) -> None:
    """Write the weights of a model that is divided over processes, as `save_model` does; every process calls it.

    Tensors are made whole one after the other, or with `safe_serialization=False` those of one file.

    Args:
        state: DTensors and tensors by name; names of the same object are tied.
        save_directory, max_shard_size, safe_serialization, save_on_each_node, world: see `save_model`.

    Raises:
        OSError: the files can't be written. Other processes raise RuntimeError.
    """
    from hasten.checkpoint import by_name, sharded

    if os.path.isfile(save_directory):
        logger.error("Provided path (%s) should be a directory, not a file", save_directory)
        return
    held, others = by_name.apart(state)
    forms = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in held.items()}
    layout = plan_layout(forms, SAFE_WEIGHTS if safe_serialization else WEIGHTS, max_shard_size)
    if others and not safe_serialization:
        layout = _with_ties(layout, others)
    elif others and world.is_main:
        warn_of_ties(others)
    own = {name: [key for key in names if key in held] for name, names in layout.files.items()}
    order = [key for names in own.values() for key in (in_file_order({each: forms[each] for each in names}))]

    def use(coming: Iterator[Any]) -> None:
        def put(writer: FolderWriter, name: str, names: Sequence[str]) -> None:
            part = {key: forms[key] for key in own[name]}
            if safe_serialization:
                writer.save_safetensors(name, part, read=lambda key: next(coming))
                return
            whole = {key: next(coming) for key in in_file_order(part)}
            writer.save_torch(name, {key: whole[others.get(key, key)] for key in names})

        _write(layout, _target(save_directory), put)

    keeps = world.is_main or (save_on_each_node and world.is_local_main)
    what = f"{save_directory} was not written"
    sharded.gather_for(what, (held[key] for key in order), use, keeps, world)


def family_of(safe_serialization: bool) -> Any:
    """The names of the files in one of the two formats."""
    return SAFE_WEIGHTS if safe_serialization else WEIGHTS


def _with_ties(layout: Layout, others: Mapping[str, str]) -> Layout:
    """Further names of tensors come into the file where the tensor is."""
    files = {
        name: [*names, *(other for other, first in others.items() if first in names)]
        for name, names in layout.files.items()
    }
    return replace(layout, files=files)


def _target(save_directory: str | os.PathLike[str]) -> Path:
    return Path(save_directory).expanduser().absolute()


def _write(layout: Layout, target: Path, put: Callable[[FolderWriter, str, Sequence[str]], None]) -> None:
    temporary = open_temporary(target)
    try:
        with FolderWriter(temporary) as writer:
            for name, names in layout.files.items():
                put(writer, name, names)
            if layout.is_sharded:
                writer.save_text(layout.family.index, layout.index())
        files = [*layout.files, *([layout.family.index] if layout.is_sharded else [])]
        stale = [name for name in _names_in(target) if layout.family.has(name) and name not in files]
        files = [*_amended_manifest(temporary, target, {*files, *stale}), *files]
        commit.sync_folder(temporary)
        commit.put_in_place(temporary, target, files, stale)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if layout.is_sharded:
        logger.info("The weights are in %d files, listed in %s.", len(layout.files), target / layout.family.index)
    else:
        logger.info("Model weights saved in %s", target / layout.family.single)


def _names_in(target: Path) -> list[str]:
    return [entry.name for entry in os.scandir(target)] if target.is_dir() else []


def _amended_manifest(temporary: Path, target: Path, changed: set[str]) -> list[str]:
    """Where the folder is a checkpoint too, let its manifest no longer speak of the files that change."""
    manifest = Manifest.read(target)
    if manifest is None or changed.isdisjoint(manifest.files):
        return []
    files = {name: file for name, file in manifest.files.items() if name not in changed}
    commit.write_durably(temporary / MANIFEST, Manifest(files, manifest.world_size, manifest.ranks).text())
    return [MANIFEST]

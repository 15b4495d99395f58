"""Single files: an object or a state dictionary, written by one process and never half."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.checkpoint import commit, leftovers
from hasten.weights.names import without_shared
from hasten.weights.torch_file import read_torch
from hasten.weights.write import FolderWriter
from hasten.world import process
from hasten.world.process import World


def save(
    obj: Any,
    f: Any,
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
    *,
    world: World | None = None,
) -> None:
    """Write an object to a file, on the main process only. A crash leaves the old file or the new one.

    Args:
        obj: any object; a dictionary of tensors under `safe_serialization`.
        f: a path whose folder exists, or without `safe_serialization` a file-like object.
        save_on_each_node: write on the first process of each machine.
        safe_serialization: use the safetensors format. Of names that share memory one is written.
        world: the processes; the default world by default.

    Raises:
        TypeError: the object can't be written as safetensors.
        FileNotFoundError: the folder does not exist.
        OSError: the file can't be written.
    """
    world = process.current() if world is None else world
    if not (world.is_main or (save_on_each_node and world.is_local_main)):
        return
    if not isinstance(f, (str, os.PathLike)):
        _save_to_object(obj, f, safe_serialization)
        return
    path = Path(f)
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"Parent directory {path.parent} does not exist: make it before {path.name} is saved there."
        )
    temporary = leftovers.temporary_name(path)
    try:
        with FolderWriter(path.parent) as writer:
            if safe_serialization:
                writer.save_safetensors(temporary, without_shared(_tensors(obj))[0])
            else:
                writer.save_torch(temporary, obj)
        os.replace(path.parent / temporary, path)
    finally:
        (path.parent / temporary).unlink(missing_ok=True)
    commit.sync_folder(path.parent)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """What `torch.load` reads from a file; by default plain data, tensors and numpy arrays only. See `read_torch`."""
    return read_torch(f, map_location, **kwargs)


def _save_to_object(obj: Any, file: Any, safe_serialization: bool) -> None:
    if safe_serialization:
        raise TypeError(f"safe_serialization=True needs a path, not a {type(file).__name__}.")
    import torch

    torch.save(obj, file)


def _tensors(obj: Any) -> Mapping[str, Any]:
    if not isinstance(obj, Mapping):
        raise TypeError(
            f"safe_serialization=True writes a dictionary of tensors by name, not a {type(obj).__name__}. Use "
            "`safe_serialization=False` for other objects."
        )
    return obj

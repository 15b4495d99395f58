"""Making plain weights out of a folder of shards, without a model, processes or memory for all of them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hasten.checkpoint import commit
from hasten.checkpoint.dcp_folder import METADATA, Folder, is_folder
from hasten.checkpoint.leftovers import temporary_name
from hasten.collectives.together import together
from hasten.weights.layout import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from hasten.weights.write import FolderWriter
from hasten.world import process


def merge_fsdp_weights(
    checkpoint_dir: str, output_path: str, safe_serialization: bool = True, remove_checkpoint_dir: bool = False
) -> None:
    """Write the weights in a folder of shards as one file, on the main process only; the others wait for it.

    One tensor at a time is in memory.

    Args:
        checkpoint_dir: the folder of shards, such as `checkpoint/pytorch_model_fsdp_0`.
        output_path: the folder for `model.safetensors`, or `pytorch_model.bin`; it is made.
        safe_serialization: write safetensors, with one name of tensors that are stored once under several.
        remove_checkpoint_dir: remove the folder of shards afterwards.

    Raises:
        FileNotFoundError: it is no such folder; the message says which one near it is.
        ValueError: it holds something else than tensors by name.
    """
    world = process.current()
    shards, output = Path(checkpoint_dir).expanduser(), Path(output_path).expanduser()

    def merge() -> None:
        if world.is_main:
            _check(shards)
            _merge(Folder(shards), output, safe_serialization)
            if remove_checkpoint_dir:
                shutil.rmtree(shards)

    together(world, f"{shards} was not merged", merge)


def _check(shards: Path) -> None:
    if is_folder(shards):
        return
    if not shards.is_dir():
        raise FileNotFoundError(f"There is no folder {shards}.")
    near = sorted(path.parent for path in shards.glob(f"*/{METADATA}"))
    weights = [path for path in near if "optimizer" not in path.name]
    if weights:
        raise FileNotFoundError(
            f"{shards} is no folder of shards itself, but holds {', '.join(str(path) for path in weights)}: give that."
        )
    files = sorted(path.name for path in shards.glob("pytorch_model_fsdp*"))
    hint = f" It has {', '.join(files)}." if files else ""
    raise FileNotFoundError(
        f"{shards} is no folder of shards: it has no {METADATA}.{hint} Give the folder pytorch_model_fsdp_0, or of "
        "another number, inside a checkpoint that was saved with SHARDED_STATE_DICT."
    )


def _merge(folder: Folder, output: Path, safe: bool) -> None:
    forms = _forms(folder)
    commit.make_folder(output)
    name = SAFE_WEIGHTS_NAME if safe else WEIGHTS_NAME
    temporary = temporary_name(output / name)
    try:
        with (
            tempfile.TemporaryDirectory(dir=output, prefix=".merging-", ignore_cleanup_errors=True) as place,
            FolderWriter(output) as writer,
        ):
            first = _first_names(folder, forms)
            if safe:
                meta = {key: forms[key][1] for key in forms if first[key] == key}
                writer.save_safetensors(temporary, meta, read=lambda key: _read(folder, *forms[key]))
            else:
                writer.save_torch(temporary, _on_disk(folder, forms, first, Path(place)))
        (output / temporary).replace(output / name)
        commit.sync_folder(output)
    finally:
        (output / temporary).unlink(missing_ok=True)


def _forms(folder: Folder) -> dict[str, tuple[str, torch.Tensor]]:
    """For each name its key in the folder, and a tensor of its form without values."""
    skeleton = folder.skeleton()
    top = next(iter(skeleton), None)
    under = len(skeleton) == 1 and isinstance(skeleton[top], dict)
    named: dict[Any, Any] = skeleton[top] if under else skeleton
    keys = folder.keys()
    others = [str(name) for name, value in named.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ValueError(
            f"{folder.path} holds more than tensors by name ({', '.join(others[:5])}), such as the state of an optimizer: give the "
            "folder of a model."
        )
    return {name: (keys[(top, name) if under else (name,)], value) for name, value in named.items()}


def _first_names(folder: Folder, forms: Mapping[str, tuple[str, torch.Tensor]]) -> dict[str, str]:
    """For each name the first one whose tensor lies at the same place in the files: mostly itself."""
    places: dict[str, list[Any]] = {}
    for index, info in folder.metadata.storage_data.items():
        places.setdefault(index.fqn, []).append((info.relative_path, info.offset))
    first: dict[Any, str] = {}
    return {
        name: first.setdefault(tuple(sorted(places.get(key, [(key, 0)]))), name) for name, (key, _) in forms.items()
    }


def _read(folder: Folder, key: str, form: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty(form.shape, dtype=form.dtype)
    folder.fill({key: tensor})
    return tensor


def _on_disk(
    folder: Folder, forms: Mapping[str, tuple[str, torch.Tensor]], first: Mapping[str, str], place: Path
) -> dict[str, torch.Tensor]:
    """Tensors whose memory is files, so that the operating system needs to keep only what is being written."""
    held: dict[str, torch.Tensor] = {}
    for number, (name, (key, form)) in enumerate(forms.items()):
        if first[name] == name:
            file = str(place / str(number))
            tensor = torch.from_file(file, shared=True, size=max(1, form.numel()), dtype=form.dtype)
            held[name] = tensor[: form.numel()].view(form.shape)
            folder.fill({key: held[name]})
        else:
            held[name] = held[first[name]]
    return held

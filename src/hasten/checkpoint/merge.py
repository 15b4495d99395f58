"""Making plain weights out of the shards of a checkpoint, without a model, processes or memory for all of them."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from hasten.checkpoint import commit, sidecar, store
from hasten.checkpoint.dcp_folder import METADATA, Folder, is_folder
from hasten.checkpoint.leftovers import temporary_name
from hasten.checkpoint.own_file import OwnFile
from hasten.checkpoint.sources import FOLDERS, MODEL, rank_name
from hasten.collectives.together import together
from hasten.weights.layout import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from hasten.weights.write import FolderWriter
from hasten.world import process


def merge_fsdp_weights(
    checkpoint_dir: str, output_path: str, safe_serialization: bool = True, remove_checkpoint_dir: bool = False
) -> None:
    """Write the weights of a sharded model as one file, on the main process only; the others wait for it.

    One tensor at a time is in memory.

    Args:
        checkpoint_dir: the folder of shards, such as `checkpoint/pytorch_model_fsdp_0`. If each process has saved its own file,
            the checkpoint's folder; where it holds several models, with the same name behind it.
        output_path: the folder for `model.safetensors`, or `pytorch_model.bin`; it is made.
        safe_serialization: write safetensors, with one name of tensors that are stored once under several.
        remove_checkpoint_dir: remove the shards afterwards.

    Raises:
        FileNotFoundError: it is no such folder; the message says which one near it is.
        RuntimeError: a file is damaged or missing; the message names it.
        ValueError: it holds something else than tensors by name, or several models.
    """
    world = process.current()
    shards, output = Path(checkpoint_dir).expanduser(), Path(output_path).expanduser()

    def merge() -> None:
        if world.is_main:
            opened = RankShards.find(shards) or FolderShards(_checked(shards))
            _merge(opened, output, safe_serialization)
            if remove_checkpoint_dir:
                opened.remove()

    together(world, f"{shards} was not merged", merge)


def _checked(shards: Path) -> Path:
    if is_folder(shards):
        return shards
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


class Shards(Protocol):
    """The weights of a model in some form of shards.

    `forms` has a tensor without values for each name, `first` for each name the first one of the same tensor: mostly itself.
    """

    forms: dict[str, torch.Tensor]
    first: dict[str, str]

    def read(self, name: str, whole: torch.Tensor) -> None:
        """Read a tensor into memory."""
        ...

    def remove(self) -> None:
        """Remove the shards."""
        ...


class FolderShards:
    """A folder of torch's distributed checkpoint."""

    def __init__(self, path: Path) -> None:
        self._folder = Folder(path)
        forms = _forms(self._folder)
        self.forms = {name: form for name, (_, form) in forms.items()}
        self.first = _first_names(self._folder, forms)
        self._keys = {name: key for name, (key, _) in forms.items()}

    def read(self, name: str, whole: torch.Tensor) -> None:
        """Read a tensor into memory."""
        self._folder.fill({self._keys[name]: whole})

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder.path)


class RankShards:
    """The files of single processes, whose tensors are read when they are wanted.

    Args:
        folder: where they are.
        index: the number of the model.
        ranks: how many there are.
    """

    def __init__(self, folder: Path, index: int, ranks: int) -> None:
        self._files = [OwnFile(folder / rank_name(MODEL, index, rank)) for rank in range(ranks)]
        # A file is as good as another for what all have whole. Of several with the same block one is read.
        self._blocks: dict[str, dict[Any, int]] = {}
        self.forms: dict[str, torch.Tensor] = {}
        self.first: dict[str, str] = {}
        for rank, file in enumerate(self._files):
            self._look(rank, file)

    def _look(self, rank: int, file: OwnFile) -> None:
        skeleton = file.skeleton()
        others = [str(name) for name, value in skeleton.items() if not isinstance(value, torch.Tensor)]
        if others:
            raise ValueError(f"{file.path} holds more than tensors by name ({', '.join(others[:5])}).")
        if rank == 0:
            self.forms = skeleton
            self.first = _same_memory(file)
        for name in self.forms:
            shard, held = file.shards.get((name,)), file.at((name,))
            block = (shard.start, tuple(held.shape)) if shard is not None else None
            if held.numel() or block is None:
                self._blocks.setdefault(name, {}).setdefault(block, rank)

    @classmethod
    def find(cls, given: Path) -> RankShards | None:
        """The files that a user means by a folder; None if it holds none.

        Raises:
            RuntimeError: a save is not complete, or a file is damaged or missing.
            ValueError: there are several models.
        """
        match = re.fullmatch(FOLDERS[MODEL].format(r"(\d+)"), given.name)
        folder = given.parent if match and not given.exists() else given
        if not folder.is_dir():
            return None
        folder = store.resolve(folder)
        if sidecar.is_save(folder):
            store.verify(folder)
        counts = {index: count for index in range(len(list(folder.iterdir()))) if (count := _count(folder, index))}
        if folder != given and match and int(match[1]) not in counts and counts:
            raise FileNotFoundError(f"{folder} has no model number {match[1]}, but {', '.join(map(str, counts))}.")
        if not match and len(counts) > 1:
            names = ", ".join(str(given / FOLDERS[MODEL].format(index)) for index in counts)
            raise ValueError(f"{given} holds {len(counts)} models: give one of {names}.")
        index = int(match[1]) if match and not given.exists() else next(iter(counts), None)
        return None if index is None or index not in counts else cls(folder, index, counts[index])

    def read(self, name: str, whole: torch.Tensor) -> None:
        """Read a tensor into memory, block by block."""
        count = 0
        for rank in self._blocks[name].values():
            count += self._files[rank].read_into_whole((name,), whole)
        if count != whole.numel():
            raise RuntimeError(
                f"{self._files[0].path.parent}: the files of {len(self._files)} processes hold {count} of {whole.numel()} elements "
                f"of {name}: some are of another save. Give a folder that one save has written."
            )

    def remove(self) -> None:
        """Remove the files of the model."""
        paths = [file.path for file in self._files]
        self._files.clear()  # a file that is mapped can not be removed everywhere
        for path in paths:
            path.unlink()


def _count(folder: Path, index: int) -> int:
    """How many processes have saved model number `index`; their ranks must be the first ones."""
    pattern = re.compile(re.escape(FOLDERS[MODEL].format(index)) + r"_rank(\d+)\.bin")
    ranks = sorted(int(match[1]) for entry in folder.iterdir() if (match := pattern.fullmatch(entry.name)))
    if ranks != list(range(len(ranks))):
        lacking = min(set(range(ranks[-1] + 1)) - set(ranks))
        raise RuntimeError(f"{folder / rank_name(MODEL, index, lacking)} is missing.")
    return len(ranks)


def _same_memory(file: OwnFile) -> dict[str, str]:
    """For each name the first one whose part is the same memory of the same shape."""
    first: dict[Any, str] = {}
    same = {}
    for name, held in file.state.items():
        storage = held.untyped_storage()
        key = (storage.data_ptr(), held.storage_offset(), tuple(held.shape)) if held.numel() else name
        same[name] = first.setdefault(key, name)
    return same


def _merge(shards: Shards, output: Path, safe: bool) -> None:
    commit.make_folder(output)
    name = SAFE_WEIGHTS_NAME if safe else WEIGHTS_NAME
    temporary = temporary_name(output / name)
    try:
        with (
            tempfile.TemporaryDirectory(dir=output, prefix=".merging-", ignore_cleanup_errors=True) as place,
            FolderWriter(output, lean=True) as writer,
        ):
            if safe:
                meta = {name: form for name, form in shards.forms.items() if shards.first[name] == name}
                writer.save_safetensors(temporary, meta, read=lambda name: _read(shards, name))
            else:
                writer.save_torch(temporary, _on_disk(shards, Path(place)))
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


def _read(shards: Shards, name: str) -> torch.Tensor:
    form = shards.forms[name]
    tensor = torch.empty(form.shape, dtype=form.dtype)
    shards.read(name, tensor)
    return tensor


def _on_disk(shards: Shards, place: Path) -> dict[str, torch.Tensor]:
    """Tensors whose memory is files, so that the operating system needs to keep only what is being written."""
    held: dict[str, torch.Tensor] = {}
    for number, (name, form) in enumerate(shards.forms.items()):
        first = shards.first[name]
        if first == name:
            file = str(place / str(number))
            tensor = torch.from_file(file, shared=True, size=max(1, form.numel()), dtype=form.dtype)
            held[name] = tensor[: form.numel()].view(form.shape)
            shards.read(name, held[name])
        else:
            held[name] = held[first]
    return held

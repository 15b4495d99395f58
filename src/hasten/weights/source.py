"""A model's weights where they lie in files: each tensor by its name, whole or in part, whichever file holds it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from hasten.weights.layout import SAFE_WEIGHTS, WEIGHTS
from hasten.weights.memory import is_plain
from hasten.weights.safe_file import SafeFile
from hasten.weights.torch_file import read_torch

_SAFE = ".safetensors"
_INDEX = ".index.json"
_TORCH = (".bin", ".pt", ".pth")


class _File(Protocol):
    """What a source asks of a file."""

    @property
    def entries(self) -> Mapping[str, Any]:
        """By name what has a `shape` and a `dtype`."""
        ...

    def read_part(
        self, name: str, starts: Sequence[int], sizes: Sequence[int], into: torch.Tensor | None = None
    ) -> torch.Tensor: ...


class _TorchFile:
    """A file of `torch.save` that holds tensors by name; it is mapped, so that only what is asked for is read."""

    def __init__(self, path: Path) -> None:
        held = read_torch(path, map_location="cpu", mmap=True)
        if not isinstance(held, Mapping) or not all(isinstance(value, torch.Tensor) for value in held.values()):
            raise RuntimeError(f"{path} does not hold tensors by name, so it is not a file of weights.")
        self.entries: Mapping[str, torch.Tensor] = held

    def read_part(
        self, name: str, starts: Sequence[int], sizes: Sequence[int], into: torch.Tensor | None = None
    ) -> torch.Tensor:
        part = self.entries[name]
        for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            part = part.narrow(axis, start, size)
        return part.clone(memory_format=torch.contiguous_format) if into is None else into.copy_(part)


class Source:
    """The weights in one file or several. Files are opened when something is read from them; use it as a context.

    Args:
        path: a safetensors file or one of `torch.save`; an index of several (`*.index.json`); a folder that holds one of these; a
            folder of the Hugging Face cache (`models--owner--name`); or the name of a model in that cache (`owner/name`), which
            needs the package huggingface_hub. Nothing is downloaded.

    Raises:
        FileNotFoundError: there are no weights at the path; the message says what is there.
        RuntimeError: an index or a file is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = find_weights(path)
        self._open: dict[Path, _File] = {}
        self.files = _by_name(self.path) if self.path.name.endswith(_INDEX) else None

    def __enter__(self) -> Source:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for file in self._open.values():
            if isinstance(file, SafeFile):
                file.__exit__(None, None, None)
        self._open.clear()

    def __iter__(self) -> Iterator[str]:
        return iter(self._file(self.path).entries if self.files is None else self.files)

    def __contains__(self, name: object) -> bool:
        return name in (self._file(self.path).entries if self.files is None else self.files)

    def shape(self, name: str) -> torch.Size:
        """The shape of a tensor."""
        return torch.Size(self._entry(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """The type in which a tensor is stored."""
        return self._entry(name).dtype

    def read_into(self, name: str, target: torch.Tensor, starts: Sequence[int]) -> None:
        """Read the part of a tensor that begins at `starts` and has the size of `target` into it, converting its type."""
        file = self._holder(name)
        if is_plain(target) and target.dtype == self.dtype(name):
            file.read_part(name, starts, target.shape, target)
        else:
            target.copy_(file.read_part(name, starts, target.shape))

    def _holder(self, name: str) -> _File:
        return self._file(self.path if self.files is None else self.files[name])

    def _entry(self, name: str) -> Any:
        file = self._holder(name)
        if name not in file.entries:
            raise RuntimeError(
                f"{self.path} says that {self.files and self.files[name]} holds {name!r}, but it does not."
            )
        return file.entries[name]

    def _file(self, path: Path) -> _File:
        if path not in self._open:
            if not path.exists():
                raise FileNotFoundError(f"{path} does not exist, but {self.path} names it.")
            self._open[path] = _TorchFile(path) if path.suffix in _TORCH else SafeFile(path)
        return self._open[path]


def _by_name(index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return {name: index.parent / file for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RuntimeError(f"{index} is not an index of weights: it has no `weight_map` ({error!r}).") from error


def find_weights(path: str | os.PathLike[str]) -> Path:
    """The file, or the index of files, that a path means; see `Source`.

    Raises:
        FileNotFoundError: there is none.
    """
    given = Path(path).expanduser()
    if given.is_dir():
        return _in_folder(_snapshot(given))
    if given.is_file():
        return given
    if re.fullmatch(r"[\w.-]+/[\w.-]+", os.fspath(path)):
        return _in_folder(_cached(os.fspath(path)))
    raise FileNotFoundError(f"{given} does not exist; give a folder, a file or an index of weights.")


def _snapshot(folder: Path) -> Path:
    """The folder with the files of a model of the Hugging Face cache; another folder is returned as it is."""
    snapshots = folder / "snapshots"
    if not snapshots.is_dir():
        return folder
    main = folder / "refs" / "main"
    if main.is_file() and (snapshots / main.read_text().strip()).is_dir():
        return snapshots / main.read_text().strip()
    revisions = sorted(each for each in snapshots.iterdir() if each.is_dir())
    if len(revisions) != 1:
        raise FileNotFoundError(
            f"{folder} holds {len(revisions)} revisions and does not say which is the main one; give the folder of one: "
            f"{', '.join(each.name for each in revisions) or 'there is none'}."
        )
    return revisions[0]


def _cached(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise FileNotFoundError(
            f"{name} is no path here. If it is the name of a model in the Hugging Face cache, install huggingface_hub."
        ) from error
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"{name} is no path here, and no model of that name is in the Hugging Face cache. Download it first: "
            f"`hf download {name}`."
        ) from error


def _in_folder(folder: Path) -> Path:
    names = sorted(each.name for each in folder.iterdir())
    usual = (SAFE_WEIGHTS.single, SAFE_WEIGHTS.index, WEIGHTS.single, WEIGHTS.index)
    found = [name for name in usual if name in names][:1]
    for ending in (f"{_SAFE}{_INDEX}", _SAFE, f".bin{_INDEX}", ".bin"):
        found = found or [name for name in names if name.endswith(ending)]
    if len(found) == 1:
        return folder / found[0]
    if found:
        raise FileNotFoundError(
            f"{folder} has several files of weights and no index of them; give one: {', '.join(found)}."
        )
    there = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    raise FileNotFoundError(
        f"{folder} has no weights: no *.safetensors, no *.bin and no index of such files. It has: {there or 'nothing'}."
    )

"""Files of `torch.save`: reading them without running code that is in them, and into memory that exists already."""

from __future__ import annotations

import errno
import os
import pickle
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from hasten.weights.memory import bytes_of, fits, is_plain
from hasten.weights.reads import Reads


def read_torch(path: Any, map_location: Any = None, **options: Any) -> Any:
    """What `torch.load` reads from a path or file, by default without running code that is in it.

    Beside what torch allows itself, numpy arrays, scalars and types may be in the file.

    Args:
        path: a path or a file-like object.
        map_location: as in `torch.load`.
        options: other arguments of `torch.load`; `weights_only=False` reads any type, for files that you trust.

    Raises:
        FileNotFoundError: there is no such file.
        pickle.UnpicklingError: the file holds a type that only `weights_only=False` reads; the message names it.
        RuntimeError: the file is damaged.
    """
    options.setdefault("weights_only", True)
    try:
        with _numpy_is_safe():
            return torch.load(path, map_location=map_location, **options)
    except pickle.UnpicklingError as error:
        if not options["weights_only"]:
            raise RuntimeError(f"{_name(path)} is not a file of torch.save, or damaged: {error}") from error
        raise pickle.UnpicklingError(_refusal(path, error)) from error
    except EOFError as error:
        raise RuntimeError(f"{_name(path)} ends too early: it is damaged.") from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # a seek to where nothing is
            raise
        raise RuntimeError(f"{_name(path)} ends too early: it is damaged.") from error
    except RuntimeError as error:
        if "PytorchStreamReader" not in str(error):
            raise
        raise RuntimeError(f"{_name(path)} is damaged: {error}") from error


def read_torch_into(path: Path, target: Any, **options: Any) -> Any:
    """Like `read_torch` to the CPU, but tensors go into the memory of the same tensors in `target`, as far as these fit.

    The result holds those tensors of `target`. That costs no more than reading the bytes; new memory would cost as much again.

    Args:
        path: the file.
        target: an object of the structure that the file holds, or anything else where there is none.
        options: as in `read_torch`.
    """
    if options.get("mmap") is not None or not options.get("weights_only", True) or not _can_be_mapped(path):
        return read_torch(path, "cpu", **options)
    # Mapping the file gives tensors whose values have not been read yet.
    mapped = read_torch(path, "cpu", mmap=True, **options)
    move = _Move(path, _start_of_mapping(path, mapped))
    moved = move.move(mapped, target)
    move.reads.run()
    return moved


class LazyTorch:
    """A file of `torch.save`, whose tensors are read when they are wanted.

    Args:
        path: the file.
        options: as in `read_torch`.
    """

    def __init__(self, path: Path, **options: Any) -> None:
        self._path = path
        # Mapping the file gives tensors whose values have not been read yet.
        self.content = read_torch(path, "cpu", mmap=_can_be_mapped(path), **options)
        self._start = _start_of_mapping(path, self.content) if _can_be_mapped(path) else None

    def read(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy the values of tensors of `content`, each into memory of its shape; straight from the file where that is possible."""
        straight = _Move(self._path, self._start)
        for tensor, target in pairs:
            if fits(target, tensor):
                straight.move(tensor, target)
                continue
            single = _Move(self._path, self._start)
            found = single.move(tensor, None)
            single.reads.run()
            target.copy_(found)
        straight.reads.run()


class _Move:
    """Moves the tensors of a mapped file into memory, by reading from the file where their place in it is known."""

    def __init__(self, path: Path, start: int | None) -> None:
        self._path = path
        self._start = start
        self.reads = Reads()

    def move(self, source: Any, target: Any) -> Any:
        if isinstance(source, torch.Tensor):
            return self._tensor(source, target)
        if type(source) in (dict, OrderedDict):
            by_key = target if isinstance(target, dict) else {}
            return type(source)((key, self.move(value, by_key.get(key))) for key, value in source.items())
        if type(source) in (list, tuple):
            same_length = isinstance(target, (list, tuple)) and len(target) == len(source)
            by_place = target if same_length else [None] * len(source)
            return type(source)(self.move(value, other) for value, other in zip(source, by_place, strict=True))
        return source

    def _tensor(self, source: torch.Tensor, target: Any) -> torch.Tensor:
        if not is_plain(source) or type(source) is not torch.Tensor:
            return source.clone()
        place = target if fits(target, source) and type(target) is torch.Tensor else torch.empty_like(source)
        if not source.numel():
            return place
        if self._start is None:
            bytes_of(place)[:] = bytes_of(source)
            return place
        self.reads.add(self._path, source.data_ptr() - self._start, place)
        return place


def _can_be_mapped(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _start_of_mapping(path: Path, mapped: Any) -> int | None:
    """The address at which a file is mapped, found from its tensors; None if these do not tell it for sure."""
    found = {
        tensor.untyped_storage().data_ptr()
        for tensor in _tensors(mapped)
        if tensor.device.type == "cpu" and tensor.numel()
    }
    offsets = _record_offsets(path)
    if not found or not offsets:
        return None
    start = min(found) - min(offsets)
    return start if {address - start for address in found} == offsets else None


def _record_offsets(path: Path) -> set[int]:
    """Where the storages of a file begin."""
    import zipfile

    offsets = set()
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for record in archive.infolist():
            if record.file_size and "/data/" in record.filename:
                offsets.add(start_of(file, record))
    return offsets


def start_of(file: Any, record: Any) -> int:
    """Where the content of a record (a `zipfile.ZipInfo`) that is stored as it is begins in its file."""
    file.seek(record.header_offset + 26)
    name, extra = struct.unpack("<HH", file.read(4))
    return int(record.header_offset + 30 + name + extra)


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, (dict, list, tuple)):
        for value in item.values() if isinstance(item, dict) else item:
            yield from _tensors(value)


def _numpy_is_safe() -> AbstractContextManager[Any]:
    import numpy as np

    # The functions by which numpy pickles arrays and scalars have other names in numpy 1 and 2; either may be in the file.
    array, scalar = np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0]
    names: list[Any] = [
        (function, f"{module}.multiarray.{name}")
        for function, name in ((array, "_reconstruct"), (scalar, "scalar"))
        for module in ("numpy.core", "numpy._core")
    ]
    kinds = {type(np.dtype(code)) for code in np.typecodes["All"]}
    return torch.serialization.safe_globals([*names, np.ndarray, np.dtype, *kinds])


def _refusal(path: Any, error: Exception) -> str:
    """What a file holds that is not on the list, and the ways out."""
    kinds: list[str] = []
    if isinstance(path, (str, os.PathLike)):
        try:
            with _numpy_is_safe():
                kinds = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        except (ValueError, RuntimeError):
            pass
    what = f"objects of {', '.join(sorted(kinds))}" if kinds else f"something that is not plain data ({error})"
    return (
        f"{_name(path)} holds {what}. Only tensors, numbers, text, numpy arrays and their containers are read from a file by "
        "default, since other types could run code. If you trust the file, allow the types with "
        "`torch.serialization.add_safe_globals([...])`, or read it with `weights_only=False` (in `load_state`: "
        "`load_kwargs={'weights_only': False}`). Better still, save plain data: `value.name` in place of an enum."
    )


def _name(path: Any) -> str:
    return str(path) if isinstance(path, (str, os.PathLike)) else f"the {type(path).__name__}"

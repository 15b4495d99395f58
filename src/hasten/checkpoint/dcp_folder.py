"""Reading folders of torch's distributed checkpoints: each process reads what it needs, waits for nobody, and runs no code."""

from __future__ import annotations

import io
import math
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.futures import Future

from hasten.checkpoint.dcp import Place
from hasten.weights.memory import is_plain
from hasten.weights.reads import Reads
from hasten.weights.torch_file import read_torch, start_of

METADATA = ".metadata"


def is_folder(folder: Path) -> bool:
    """Whether a folder is a complete distributed checkpoint."""
    return (folder / METADATA).is_file()


@dataclass
class Folder:
    """A distributed checkpoint that is open for reading. No process waits for another.

    Args:
        path: the folder.

    Raises:
        FileNotFoundError: it has no metadata.
        RuntimeError: the metadata is damaged.
    """

    path: Path
    reader: Any = field(init=False)
    metadata: Metadata = field(init=False)
    places: dict[str, Place] = field(init=False)

    def __post_init__(self) -> None:
        self.reader = _Reader(self.path)
        self.metadata = self.reader.read_metadata()
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        known = self.metadata.planner_data if isinstance(self.metadata.planner_data, dict) else {}
        self.places = {key: tuple(known.get(key, (key,))) for key in self.metadata.state_dict_metadata}

    def skeleton(self) -> Any:
        """The state as it was saved, with tensors on the meta device in the place of those in the files."""
        values: dict[str, Any] = {}
        for key, held in self.metadata.state_dict_metadata.items():
            if isinstance(held, TensorStorageMetadata):
                values[key] = torch.empty(held.size, dtype=held.properties.dtype, device="meta")
            else:
                values[key] = io.BytesIO()
        self.fill({key: value for key, value in values.items() if isinstance(value, io.BytesIO)}, values)
        nested: dict[Any, Any] = {}
        for key, place in self.places.items():
            _put(nested, place, values[key])
        return _with_lists(nested)

    def fill(self, targets: dict[str, Any], values: dict[str, Any] | None = None) -> None:
        """Read tensors, by key, into memory: DTensors get their shards, others everything.

        Args:
            targets: tensors of the saved shapes; anything else stands for a value that is no tensor.
            values: where such values are put.
        """
        planner = _LoadPlanner({} if values is None else values)
        planner.set_up_planner(dict(targets), self.metadata)
        plan: LoadPlan = planner.finish_plan(self.reader.prepare_local_plan(planner.create_local_plan()))
        try:
            self.reader.read_data(plan, planner).wait()
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{error.filename} is missing: the distributed checkpoint {self.path} is incomplete. Copy the whole folder; all "
                "processes must see it."
            ) from error

    def keys(self) -> dict[Place, str]:
        """The key of each place."""
        return {place: key for key, place in self.places.items()}


def _put(nested: dict[Any, Any], place: Place, value: Any) -> None:
    for key in place[:-1]:
        nested = nested.setdefault(key, {})
    nested[place[-1]] = value


def _with_lists(nested: Any) -> Any:
    """Dictionaries whose keys are 0, 1, 2, ... were lists; an optimizer's state by number of parameter means the same as one."""
    if not isinstance(nested, dict):
        return nested
    parts = {key: _with_lists(value) for key, value in nested.items()}
    if parts and all(isinstance(key, int) for key in parts) and sorted(parts) == list(range(len(parts))):
        return [parts[index] for index in range(len(parts))]
    return parts


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._values = values

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take a value that is no tensor, without running code that is in it."""
        self._values[read_item.dest_index.fqn] = read_torch(value, map_location="cpu")


class _Reader(FileSystemReader):
    """A reader that runs no code from the files, and reads tensors straight into their memory where that can be."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of the folder."""
        path = Path(self.path) / METADATA
        try:
            with open(path, "rb") as file:
                metadata = _Unpickler(file).load()
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{path} is missing: {self.path} is no complete distributed checkpoint.") from error
        except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise RuntimeError(f"{path} is damaged, or no metadata of a distributed checkpoint: {error}") from error
        if not isinstance(metadata, Metadata):
            raise RuntimeError(f"{path} holds no metadata of a distributed checkpoint.")
        self._forms = metadata.state_dict_metadata
        return metadata

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Read whole rows of saved tensors into the memory where they go; torch reads the rest, with a copy."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        rest: list[ReadItem] = []
        reads = Reads()
        for name, items in by_file.items():
            with open(Path(self.path) / name, "rb", buffering=0) as file:
                rest += [item for item in items if not self._read_rows(file, item, planner, reads)]
        reads.run()
        return super().read_data(replace(plan, items=rest), planner)

    def _read_rows(self, file: Any, item: ReadItem, planner: Any, reads: Reads) -> bool:
        """Let a part of a saved tensor be read, if it is one piece of the file and of memory; whether it is."""
        form, info = self._forms[item.storage_index.fqn], self.storage_data[item.storage_index]
        if (
            item.type is not LoadItemType.TENSOR
            or not isinstance(form, TensorStorageMetadata)
            or info.transform_descriptors
        ):
            return False
        target = planner.resolve_tensor(item).detach()
        dtype = form.properties.dtype
        if not is_plain(target) or target.dtype != dtype or not target.numel():
            return False
        found = _contiguous(_Part(file, info.offset, info.length), dtype.itemsize)
        if found is None:
            return False
        start, shape = found
        if any(list(sizes[1:]) != list(shape[1:]) for sizes in (item.lengths, target.shape)) or any(
            item.storage_offsets[1:]
        ):
            return False
        first = item.storage_offsets[0] if len(shape) else 0
        reads.add(file.name, info.offset + start + first * math.prod(shape[1:]) * dtype.itemsize, target)
        planner.commit_tensor(item, target)
        return True


class _Part(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        data: bytes = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data


def _contiguous(part: _Part, itemsize: int) -> tuple[int, tuple[int, ...]] | None:
    """Where in a file of `torch.save` the values of its one tensor begin, and its shape; None if it holds anything else."""
    try:
        with zipfile.ZipFile(part) as archive:
            records = {record.filename.partition("/")[2]: record for record in archive.infolist()}
        part.seek(start_of(part, records["data.pkl"]))  # not by zipfile: the checksum there may be left out
        shape, stride = _Shape(io.BytesIO(part.read(records["data.pkl"].file_size))).load()
        data = records["data/0"]
        start = start_of(part, data)
    except (zipfile.BadZipFile, pickle.UnpicklingError, KeyError, TypeError, ValueError, struct.error, EOFError):
        return None
    size = 1
    for length, step in zip(reversed(shape), reversed(stride), strict=True):
        if length != 1 and step != size:
            return None
        size *= length
    if data.file_size != size * itemsize or data.compress_type != zipfile.ZIP_STORED:
        return None
    return start, tuple(shape)


class _Shape(pickle.Unpickler):
    """Reads shape and strides of a tensor that `torch.save` has written and that begins where its storage does."""

    def find_class(self, module: str, name: str) -> Any:
        """What takes the place of the classes in the file."""
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _shape
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a plain tensor")

    def persistent_load(self, name: Any) -> Any:
        """A storage."""
        return name


def _shape(storage: Any, offset: int, size: Any, stride: Any, *more: Any) -> tuple[Any, Any]:
    if offset or storage[2] != "0":
        raise pickle.UnpicklingError("the tensor is a part of another one")
    return size, stride


_ALLOWED = re.compile(
    r"torch\.distributed\.checkpoint\.(metadata|filesystem|planner)\.[\w.]+|torch\.distributed\._shard\.metadata\.\w+|"
    r"torch\.(Size|strided|serialization\._get_layout|[a-z]+\d*(_\w+)?)|collections\.OrderedDict|pathlib\.\w+|"
    r"pathlib\._local\.\w+|builtins\.(set|frozenset|complex)"
)


class _Unpickler(pickle.Unpickler):
    """Reads metadata; what else a pickle could name is refused."""

    def find_class(self, module: str, name: str) -> Any:
        """A class that metadata is made of."""
        full = f"{module}.{name}"
        found = super().find_class(module, name) if _ALLOWED.fullmatch(full) else None
        if isinstance(found, (type, torch.dtype)) or full == "torch.serialization._get_layout":
            return found
        raise pickle.UnpicklingError(f"it names {full}, which metadata has no use for")

"""How a model's tensors are laid out in files: their names, their shards, and the index of the shards."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hasten.weights.names import id_tensor_storage

SAFE_WEIGHTS_NAME = "model.safetensors"
WEIGHTS_NAME = "pytorch_model.bin"

# Upper or lower case does not matter, but a lower-case b at the end means bits, as in the reference.
_UNITS = {
    "TiB": 2**40,
    "GiB": 2**30,
    "MiB": 2**20,
    "KiB": 2**10,
    "TB": 10**12,
    "GB": 10**9,
    "MB": 10**6,
    "KB": 10**3,
    "B": 1,
}
_FACTORS = {unit.upper(): factor for unit, factor in _UNITS.items()}


def convert_file_size_to_int(size: int | str) -> int:
    """Bytes of a size such as 5, "5B", "1.5GB" (decimal), "1.5GiB" (binary) or "8Gb" (bits).

    Raises:
        ValueError: the text is not a size.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]+)\s*", size) if isinstance(size, str) else None
    factor = _FACTORS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(
            f"`size` {size} is not in a valid format. Use an integer for bytes, or a string with an unit (like '5.0GB'); the units "
            f"are {', '.join(_UNITS)}."
        )
    bits = match[2].endswith("b") and not match[2].upper().endswith("IB")
    return int(float(match[1]) * factor) // (8 if bits else 1)


@dataclass(frozen=True)
class Family:
    """The names that one model's files can have: `{stem}{suffix}`, or shards `{stem}-00001-of-00002{suffix}` and an index."""

    stem: str
    suffix: str

    @property
    def single(self) -> str:
        """Name of the file that holds everything."""
        return f"{self.stem}{self.suffix}"

    @property
    def index(self) -> str:
        """Name of the index of the shards."""
        return f"{self.stem}{self.suffix}.index.json"

    def shard(self, number: int, count: int) -> str:
        """Name of shard `number` (from 1) of `count`."""
        return f"{self.stem}-{number:05d}-of-{count:05d}{self.suffix}"

    def has(self, name: str) -> bool:
        """Whether a file of this name belongs to the model."""
        shard = re.fullmatch(rf"{re.escape(self.stem)}-\d{{5}}-of-\d{{5}}{re.escape(self.suffix)}", name)
        return shard is not None or name in (self.single, self.index)


SAFE_WEIGHTS = Family("model", ".safetensors")
WEIGHTS = Family("pytorch_model", ".bin")


@dataclass(frozen=True)
class Layout:
    """Which tensor is in which file."""

    family: Family
    files: dict[str, list[str]]
    total_size: int

    @property
    def is_sharded(self) -> bool:
        """Whether there are several files, and so an index."""
        return len(self.files) > 1

    def index(self) -> str:
        """The text of the index file."""
        weight_map = {name: file for file, names in self.files.items() for name in names}
        content = {"metadata": {"total_size": self.total_size}, "weight_map": weight_map}
        return json.dumps(content, indent=2, sort_keys=True) + "\n"


def plan_layout(state_dict: Mapping[str, torch.Tensor], family: Family, max_shard_size: int | str) -> Layout:
    """Divide tensors over files of at most `max_shard_size` each, in their order.

    Tensors that share memory come into the same file and count once; one that is larger than the limit gets a file of its
    own. The division is the same as that of huggingface_hub, so that the files of both have the same content.

    Raises:
        ValueError: the size is not one, or not positive.
    """
    limit = convert_file_size_to_int(max_shard_size)
    if limit <= 0:
        raise ValueError(f"max_shard_size={max_shard_size!r} must be positive; the default is '10GB'.")
    shards: list[list[str]] = []
    current: list[str] = []
    filled = total = 0
    for names, size in _storages(state_dict):
        total += size
        if size > limit:
            shards.append(names)
            continue
        if filled + size > limit:
            shards.append(current)
            current, filled = [], 0
        current = current + names
        filled += size
    if current or not shards:
        shards.append(current)
    if len(shards) == 1:
        return Layout(family, {family.single: shards[0]}, total)
    return Layout(family, {family.shard(n, len(shards)): names for n, names in enumerate(shards, 1)}, total)


def _storages(state_dict: Mapping[str, torch.Tensor]) -> list[tuple[list[str], int]]:
    """The names in each storage, and the bytes that they need."""
    names: dict[object, list[str]] = {}
    for name, tensor in state_dict.items():
        storage = id_tensor_storage(tensor)
        names.setdefault(storage if storage[1] and tensor.numel() else name, []).append(name)
    return [(group, _needed_bytes([state_dict[name] for name in group])) for group in names.values()]


def _needed_bytes(tensors: list[torch.Tensor]) -> int:
    return min(tensors[0].untyped_storage().nbytes(), sum(tensor.nbytes for tensor in tensors))

"""How large a model is, from the headers of its files or from its modules on the meta device; no values are read."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

LIBRARIES = ("timm", "transformers")
_FLOAT32 = 4  # bytes
_TORCH = (".bin", ".pt", ".pth")


@dataclass(frozen=True)
class Sizes:
    """The size of a model.

    Attributes:
        total: bytes, if its numbers were float32.
        largest: the same of its largest layer.
        layer: the name of that layer.
        parameters: how many numbers it has; of files, those that are not integers.
        stored: bytes by type, as the files hold them; empty if it was built from its configuration.
    """

    total: int
    largest: int
    layer: str
    parameters: int
    stored: Mapping[str, int] = field(default_factory=dict)


def sizes_of_path(path: str) -> Sizes:
    """The size of the weights in a file, an index of files or a folder.

    Raises:
        FileNotFoundError: there are no weights; the message says what is there.
        RuntimeError: a file is damaged.
    """
    from hasten.weights.source import Source

    with Source(path) as source:
        files = [source.path] if source.files is None else sorted(set(source.files.values()))
    tensors: dict[str, tuple[str, int, int]] = {}
    for file in files:
        tensors |= _in_torch_file(file) if file.suffix in _TORCH else _in_safe_file(file)
    return _from_headers(tensors)


def sizes_on_hub(name: str, token: str | None = None) -> Sizes:
    """The size of the safetensors files of a repository; only their headers are fetched.

    Raises:
        ImportError: huggingface_hub is not installed.
        OSError: there is no such repository, or no connection.
        ValueError: it has no safetensors files.
    """
    hub = import_hub(name)
    try:
        found = hub.get_safetensors_metadata(name, token=token)
    except hub.errors.NotASafetensorsRepoError as error:
        raise ValueError(
            f"{name} has no safetensors files, whose headers would say how large it is. Install the library that it is for "
            f"({' or '.join(LIBRARIES)}), or download it and give the folder."
        ) from error
    tensors = {}
    for file in found.files_metadata.values():
        for tensor, info in file.tensors.items():
            tensors[tensor] = _described(info.dtype, math.prod(info.shape))
    return _from_headers(tensors)


def sizes_of_model(model: torch.nn.Module) -> Sizes:
    """The size of a model with or without values. Tensors that several modules share count once.

    A layer is a module of a class that the model says must not be divided (`_no_split_modules`), or one without children, or a
    tensor that stands between modules.
    """
    first: dict[int, str] = {}
    tensors: dict[str, int] = {}
    for name, tensor in _all_tensors(model):
        if first.setdefault(id(tensor), name) == name:
            tensors[name] = _bytes_of(tensor)
    kept = set(getattr(model, "_no_split_modules", None) or ())
    layers = {
        layer: sum(tensors.get(f"{layer}.{name}" if name else layer, 0) for name in names)
        for layer, names in _layers(model, kept)
    }
    layer = max(layers, key=lambda name: layers[name], default="")
    parameters = sum(each.numel() for each in model.parameters())
    return Sizes(sum(tensors.values()), layers.get(layer, 0), layer, parameters)


def library_in(config: Mapping[str, Any]) -> str | None:
    """The library that a `config.json` is for, or None."""
    if "architecture" in config:
        return "timm"
    return "transformers" if {"model_type", "architectures", "auto_map"} & set(config) else None


def read_config(path: Path) -> dict[str, Any]:
    """A model's `config.json`; empty if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    return content if isinstance(content, dict) else {}


def import_hub(name: str) -> Any:
    """The package huggingface_hub.

    Raises:
        ImportError: it is not installed; the message says how it is.
    """
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as error:
        raise ImportError(
            f"{name} is no path here. To look for a model of this name on the Hugging Face Hub or in its cache, install "
            "huggingface_hub: pip install 'hasten[hub]'."
        ) from error
    return huggingface_hub


# -- files -----------------------------------------------------------------------------------------------------------


def _described(code: str, count: int) -> tuple[str, int, int]:
    """Type, bytes in float32 and bytes as stored, of a tensor by the name that safetensors has for its type."""
    from hasten.weights.dtypes import DTYPES

    dtype = DTYPES.get(code)
    if dtype is None:  # newer than this torch; the digits of the names are bits
        bits = int("".join(digit for digit in code[:3] if digit.isdigit()) or 8)
        return code, count * _FLOAT32, count * bits // 8
    is_float = dtype.is_floating_point or dtype.is_complex
    return str(dtype).removeprefix("torch."), count * (_FLOAT32 if is_float else dtype.itemsize), count * dtype.itemsize


def _in_safe_file(path: Path) -> dict[str, tuple[str, int, int]]:
    from hasten.weights.dtypes import CODES
    from hasten.weights.safe_file import SafeFile

    with SafeFile(path) as file:
        return {name: _described(CODES[entry.dtype], entry.shape.numel()) for name, entry in file.entries.items()}


def _in_torch_file(path: Path) -> dict[str, tuple[str, int, int]]:
    """Tensors that are in a file under several names count under the first."""
    from hasten.weights.dtypes import CODES
    from hasten.weights.torch_file import read_torch

    try:
        held = read_torch(path, "cpu", mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        held = read_torch(path, "cpu")  # of a format before torch 1.6
    found: dict[tuple[Any, ...], str] = {}
    for name, tensor in _tensors_by_name(path, held):
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.dtype)
        found.setdefault(place if tensor.numel() else (name,), name)
    return {name: _described(CODES[held[name].dtype], held[name].numel()) for name in found.values()}


def _tensors_by_name(path: Path, held: Any) -> Iterable[tuple[str, torch.Tensor]]:
    import torch

    if not isinstance(held, dict) or not all(isinstance(value, torch.Tensor) for value in held.values()):
        raise RuntimeError(f"{path} does not hold tensors by name, so it is not a file of weights.")
    return held.items()


def _from_headers(tensors: Mapping[str, tuple[str, int, int]]) -> Sizes:
    layers: dict[str, int] = {}
    stored: dict[str, int] = {}
    total = parameters = 0
    for name, (dtype, size, size_stored) in tensors.items():
        total += size
        parameters += size // _FLOAT32 if "int" not in dtype and dtype != "bool" else 0
        layers[layer_of(name)] = layers.get(layer_of(name), 0) + size
        stored[dtype] = stored.get(dtype, 0) + size_stored
    layer = max(layers, key=lambda each: layers[each], default="")
    return Sizes(total, layers.get(layer, 0), layer, parameters, stored)


def layer_of(name: str) -> str:
    """The layer of a tensor by its name: the outermost numbered module around it, such as `encoder.layer.3`, else its module."""
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ".".join(parts[:-1]) or name


# -- modules ---------------------------------------------------------------------------------------------------------


def _all_tensors(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _layers(module: torch.nn.Module, kept: set[str], prefix: str = "") -> Iterable[tuple[str, list[str]]]:
    """The layers of a model and the names of the tensors in each; a tensor that stands between modules has the name ""."""
    for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        yield f"{prefix}{name}", [""]
    for name, child in module.named_children():
        if type(child).__name__ in kept or not any(True for _ in child.children()):
            yield f"{prefix}{name}", [tensor for tensor, _ in _all_tensors(child)]
        else:
            yield from _layers(child, kept, f"{prefix}{name}.")


def _bytes_of(tensor: torch.Tensor) -> int:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return tensor.numel() * (_FLOAT32 if is_number else tensor.element_size())

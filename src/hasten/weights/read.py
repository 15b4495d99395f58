"""Reading tensors and other objects from files."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from hasten.weights.names import shared_names


def read_safetensors(path: str | os.PathLike[str], device: Any = "cpu") -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file. On the CPU they are views of the file: copy what shall outlive it.

    Raises:
        FileNotFoundError: there is no such file.
        RuntimeError: the file is damaged.
    """
    import safetensors
    from safetensors.torch import load_file

    try:
        return load_file(path, device=str(device))
    except safetensors.SafetensorError as error:
        raise RuntimeError(
            f"{path} is not a readable safetensors file: {error}. It is damaged, or of another format."
        ) from error


def load_model(
    model: torch.nn.Module, path: str | os.PathLike[str], strict: bool = True, device: Any = "cpu"
) -> tuple[list[str], list[str]]:
    """Load a safetensors file into a model; a name that is missing is found through one that it is tied to.

    Args:
        model: where the tensors go.
        path: a file of the model's tensors.
        strict: raise if names are missing or unexpected.
        device: where the tensors are read to before they are copied into the model.

    Returns:
        The missing and the unexpected names.

    Raises:
        RuntimeError: the file is damaged, shapes differ, or names do under `strict`.
    """
    tensors = read_safetensors(path, device)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if missing:
        held = {
            name for group in shared_names(model.state_dict()) if not tensors.keys().isdisjoint(group) for name in group
        }
        missing = [name for name in missing if name not in held]
    if strict and (missing or unexpected):
        lines = [f"{path} does not fit into {type(model).__name__}:"]
        lines += [f"\t- not in the file: {', '.join(missing)}"] if missing else []
        lines += [f"\t- not in the model: {', '.join(unexpected)}"] if unexpected else []
        raise RuntimeError(
            "\n".join([*lines, "Build the model as it was saved, or pass `strict=False` to load what fits."])
        )
    return missing, unexpected


def read_torch(path: Any, map_location: Any = None, **options: Any) -> Any:
    """What `torch.load` reads from a path or file, by default without running code that is in it.

    Beside torch's own list, numpy arrays, scalars and types may be in the file.

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
            raise RuntimeError(
                f"{_name(path)} is not a readable file of torch.save: {error}. It is damaged."
            ) from error
        raise pickle.UnpicklingError(_refusal(path, error)) from error
    except EOFError as error:
        raise RuntimeError(f"{_name(path)} ends too early: it is damaged.") from error
    except RuntimeError as error:
        if "PytorchStreamReader" not in str(error):
            raise
        raise RuntimeError(f"{_name(path)} is damaged: {error}") from error


def read_torch_mapped(path: Path, map_location: Any = None, **options: Any) -> Any:
    """Like `read_torch`, but tensors on the CPU may be views of the file: copy what shall outlive it."""
    if "mmap" not in options and zip_is_readable(path):
        options["mmap"] = True
    return read_torch(path, map_location, **options)


def zip_is_readable(path: Path) -> bool:
    """Whether the file has the container format of current `torch.save`, which can be mapped into memory."""
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def copy_into(source: Any, target: Any) -> Any:
    """A nested object with every tensor in memory of its own: in that of the same tensor in `target`, where it fits, or new memory.

    Args:
        source: tensors in mappings, lists and tuples; other values are kept as they are.
        target: an object of the same structure, or anything else where there is none.
    """
    if isinstance(source, torch.Tensor):
        return _copied(source, target)
    if isinstance(source, Mapping):
        known = target if isinstance(target, Mapping) else {}
        items = {key: copy_into(value, known.get(key)) for key, value in source.items()}
        return items if type(source) is dict else type(source)(items)  # type: ignore[call-arg]
    if type(source) in (list, tuple):
        others = (
            list(target) if isinstance(target, (list, tuple)) and len(target) == len(source) else [None] * len(source)
        )
        return type(source)(copy_into(value, other) for value, other in zip(source, others, strict=True))
    return source


def _copied(source: torch.Tensor, target: Any) -> torch.Tensor:
    fits = (
        type(target) is torch.Tensor
        and type(source) is torch.Tensor
        and target.shape == source.shape
        and target.dtype == source.dtype
        and target.device == source.device
        and not target.requires_grad
    )
    if not fits:
        return source.clone()
    if source.device.type == "cpu" and source.is_contiguous() and target.is_contiguous() and source.numel():
        # numpy copies large blocks in about 0.6 times torch's time.
        target.view(-1).view(torch.uint8).numpy()[:] = source.view(-1).view(torch.uint8).numpy()
        return target
    return target.copy_(source)


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

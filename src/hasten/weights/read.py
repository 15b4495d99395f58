"""Reading a model's weights."""

from __future__ import annotations

import os
from typing import Any

import torch

from hasten.weights.memory import is_plain
from hasten.weights.names import shared_names
from hasten.weights.reads import Reads
from hasten.weights.safe_file import SafeFile


def read_safetensors(path: str | os.PathLike[str], device: Any = "cpu") -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file by name, in new memory.

    Raises:
        FileNotFoundError: there is no such file.
        RuntimeError: the file is damaged, or of another format.
    """
    with SafeFile(path) as file:
        return {name: file.read(name).to(device) for name in file.entries}


def load_model(
    model: torch.nn.Module, path: str | os.PathLike[str], strict: bool = True, device: Any = "cpu"
) -> tuple[list[str], list[str]]:
    """Load a safetensors file into a model; a name that is missing is found through one that it is tied to.

    Args:
        model: where the tensors go. What is in host memory is read in place.
        path: a file of the model's tensors.
        strict: raise if names are missing or unexpected.
        device: where other tensors are read to before they are copied into the model.

    Returns:
        The missing and the unexpected names.

    Raises:
        RuntimeError: the file is damaged, shapes differ, or names do under `strict`.
    """
    live, reads = model.state_dict(), Reads()
    with SafeFile(path) as file:
        tensors = {name: _read(file, name, live.get(name), device, reads) for name in file.entries}
        reads.run()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if missing:
        held = {name for group in shared_names(live) if not tensors.keys().isdisjoint(group) for name in group}
        missing = [name for name in missing if name not in held]
    if strict and (missing or unexpected):
        lines = [f"{path} does not fit into {type(model).__name__}:"]
        lines += [f"\t- not in the file: {', '.join(missing)}"] if missing else []
        lines += [f"\t- not in the model: {', '.join(unexpected)}"] if unexpected else []
        raise RuntimeError(
            "\n".join([*lines, "Build the model as it was saved, or pass `strict=False` to load what fits."])
        )
    return missing, unexpected


def _read(file: SafeFile, name: str, live: Any, device: Any, reads: Reads) -> torch.Tensor:
    entry = file.entries[name]
    if is_plain(live) and live.dtype == entry.dtype and live.shape == entry.shape:
        file.read_into(name, live, reads)
        # What torch copies from and what it copies to is then the same memory: it does nothing.
        return live
    return file.read(name).to(device)

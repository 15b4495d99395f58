"""The random states of each rank in the files of a checkpoint.

`random_states_{rank}.pkl` is a dictionary with the reference's keys, but made of numbers, text, tuples and tensors only: both
libraries read it, and reading it runs no code. It also holds the number of micro-batches, as the reference has it there.
"""

from __future__ import annotations

import hashlib
import logging
import random
from pathlib import Path
from typing import Any

import torch

from hasten.weights.torch_file import read_torch
from hasten.weights.write import FolderWriter
from hasten.world import rng
from hasten.world.process import World

logger = logging.getLogger(__name__)

_PYTHON, _NUMPY, _TORCH = "random_state", "numpy_random_seed", "torch_manual_seed"


def file_name(rank: int) -> str:
    """Name of a rank's file."""
    return f"random_states_{rank}.pkl"


def states(step: int, world: World) -> dict[str, Any]:
    """What the file of this process holds: its random states as they are now, and the number of micro-batches."""
    return {"step": step, **_to_file(rng.snapshot(world=world), world)}


def write(writer: FolderWriter, rank: int, states: dict[str, Any]) -> None:
    """Write a process's random states."""
    writer.save_torch(file_name(rank), states)


def read(folder: Path, rank: int, world: World) -> int | None:
    """Restore this process's random states and return the number of micro-batches, None if the checkpoint does not know it.

    A rank that the checkpoint has no states of (it was saved by fewer ranks) takes over what was equal on the saved ranks,
    and seeds what differed from the saved states and its own number. If only the main process has saved states, there is
    nothing to compare, and the rank goes on with what it has. Either way a warning is logged.

    Raises:
        RuntimeError: the states can not be restored.
    """
    own = _load(folder, rank)
    if own is None:
        return _improvise(folder, rank, world)
    try:
        rng.restore(_from_file(own, world), world=world)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise RuntimeError(
            f"Rank {rank}: the random states in {folder / file_name(rank)} can not be restored: {error!r}. Without them the run "
            "would go on with other random numbers; delete the file if you accept that."
        ) from error
    return own.get("step")


def _improvise(folder: Path, rank: int, world: World) -> int | None:
    first, second = _load(folder, 0), _load(folder, 1)
    if first is None or second is None:
        logger.warning(
            "Rank %d: %s holds no random states of this rank, and not those of two others to derive them from: random numbers "
            "go on as they are.",
            rank,
            folder,
        )
        return None if first is None else first.get("step")
    one, other = _from_file(first, world), _from_file(second, world)
    same = {kind: state for kind, state in one.items() if _plain(state) == _plain(other[kind])}
    for kind in one.keys() - same.keys():
        _seed(kind, _derive(one[kind], rank), world)
    rng.restore({**rng.snapshot(world=world), **same}, world=world)
    new = sorted(one.keys() - same.keys())
    taken = f" It takes over those of {', '.join(sorted(same))}, which were equal on the saved ranks." if same else ""
    seeded = f" It has new seeds for {', '.join(new)}, the same ones in every run from this checkpoint." if new else ""
    text = "Rank %d: %s was saved by fewer ranks and holds no random states of this one.%s%s"
    logger.warning(text, rank, folder, taken, seeded)
    return first.get("step")


def _load(folder: Path, rank: int) -> dict[str, Any] | None:
    try:
        states: dict[str, Any] = read_torch(folder / file_name(rank), map_location="cpu")
    except FileNotFoundError:
        return None
    return states


def _to_file(picture: dict[str, Any], world: World) -> dict[str, Any]:
    python, numpy = picture["python"], picture["numpy"]
    states = {
        _PYTHON: (python["version"], tuple(python["words"].tolist()), python["gauss"]),
        _NUMPY: ("MT19937", numpy["words"], numpy["position"], numpy["has_gauss"], numpy["gauss"]),
        _TORCH: picture["torch"],
    }
    kind = world.row.type
    if kind in picture:
        # The reference restores a list over all devices, so this process's state must be where its own device is.
        devices = picture[kind]
        states[_device_key(kind)] = devices * world.row.count if len(devices) == 1 else devices
    return states


def _from_file(states: dict[str, Any], world: World) -> dict[str, Any]:
    version, words, gauss = states[_PYTHON]
    _, numpy_words, position, has_gauss, numpy_gauss = states[_NUMPY]
    picture: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": {
            "words": _integers(numpy_words),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(numpy_gauss),
        },
        "torch": states[_TORCH],
    }
    kind = world.row.type
    if not world.row.is_cpu:
        picture[kind] = _device_states(states.get(_device_key(kind)), world)
    return picture


def _device_states(saved: Any, world: World) -> Any:
    kind = world.row.type
    if saved is None:
        logger.warning(
            "The checkpoint holds no random state of a %s device: its random numbers go on as they are.", kind
        )
        return rng.snapshot(world=world)[kind]
    states = list(saved) if isinstance(saved, (list, tuple)) else [saved]
    if world.size == 1 and len(states) == world.row.count:
        return states
    return [states[min(world.device.index or 0, len(states) - 1)]]


def _device_key(kind: str) -> str:
    return f"torch_{kind}_manual_seed"


def _seed(kind: str, seed: int, world: World) -> None:
    if kind == "python":
        random.seed(seed)
    elif kind == "numpy":
        import numpy as np

        np.random.seed(seed % 2**32)
    elif kind == "torch":
        torch.default_generator.manual_seed(seed)
    else:
        world.row.seed(seed)


def _derive(state: Any, rank: int) -> int:
    digest = hashlib.blake2b(f"{rank} {_plain(state)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**63


def _integers(words: Any) -> torch.Tensor:
    return words if isinstance(words, torch.Tensor) else torch.tensor([int(word) for word in words])


def _plain(value: Any) -> Any:
    """Nested lists and dictionaries of numbers and text, comparable and printable in full."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value

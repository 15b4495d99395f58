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
from hasten.world.devices import Device

logger = logging.getLogger(__name__)

_PYTHON, _NUMPY, _TORCH = "random_state", "numpy_random_seed", "torch_manual_seed"


def file_name(rank: int) -> str:
    """Name of a rank's file."""
    return f"random_states_{rank}.pkl"


def write(writer: FolderWriter, rank: int, step: int, device: Device) -> None:
    """Write this process's random states."""
    writer.save_torch(file_name(rank), {"step": step, **_capture(device)})


def read(folder: Path, device: Device, rank: int) -> int | None:
    """Restore this process's random states and return the number of micro-batches, None if the checkpoint does not know it.

    A rank that the checkpoint has no states of (it was saved by fewer ranks) takes over what was equal on the saved ranks,
    and seeds what differed from the saved states and its own number. If only the main process has saved states, there is
    nothing to compare, and the rank goes on with what it has. Either way a warning is logged.

    Raises:
        RuntimeError: the states can not be restored.
    """
    own = _load(folder, rank)
    if own is None:
        return _improvise(folder, device, rank)
    step = own.pop("step", None)
    for kind, value in own.items():
        try:
            _restore(kind, value, device)
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise RuntimeError(
                f"Rank {rank}: the random state {kind!r} in {folder / file_name(rank)} can not be restored: {error}. Without it "
                "the run would go on with other random numbers; delete the file if you accept that."
            ) from error
    return step


def _improvise(folder: Path, device: Device, rank: int) -> int | None:
    first, second = _load(folder, 0), _load(folder, 1)
    if first is None:
        logger.warning("Rank %d: %s holds no random states, so random numbers go on as they are.", rank, folder)
        return None
    step = first.pop("step", None)
    if second is None:
        logger.warning(
            "Rank %d: %s holds random states of the main process only, so random numbers go on as they are on this rank.",
            rank,
            folder,
        )
        return step
    shared = [kind for kind in first if kind in second and _same(first[kind], second[kind])]
    for kind, value in first.items():
        if kind in shared:
            _restore(kind, value, device)
        else:
            _seed(kind, _derive(value, rank), device)
    logger.warning(
        "Rank %d: %s was saved by fewer ranks and holds no random states of this one. It takes %s over, and has new seeds for %s, "
        "the same ones in every run from this checkpoint.",
        rank,
        folder,
        ", ".join(shared) or "nothing",
        ", ".join(kind for kind in first if kind not in shared) or "nothing",
    )
    return step


def _load(folder: Path, rank: int) -> dict[str, Any] | None:
    try:
        states: dict[str, Any] = read_torch(folder / file_name(rank), map_location="cpu")
    except FileNotFoundError:
        return None
    return states


# -- the generators ------------------------------------------------------------------------------------------------------


def _capture(device: Device) -> dict[str, Any]:
    import numpy as np

    name, words, *rest = np.random.get_state(legacy=True)
    states = {
        _PYTHON: random.getstate(),
        _NUMPY: (name, torch.tensor(np.asarray(words).tolist()), *rest),
        _TORCH: torch.get_rng_state(),
    }
    if not device.is_cpu:
        states[_device_key(device)] = _of_all_devices(device)
    return states


def _device_key(device: Device) -> str:
    return f"torch_{device.type}_manual_seed"


def _of_all_devices(device: Device) -> list[torch.Tensor]:
    module = device.module
    if hasattr(module, "get_rng_state_all"):
        return list(module.get_rng_state_all())
    return [device.get_rng_state()]


def _restore(kind: str, value: Any, device: Device) -> None:
    if kind == _PYTHON:
        version, words, gauss = value
        random.setstate((version, tuple(words), gauss))
    elif kind == _NUMPY:
        import numpy as np

        name, words, *rest = value
        np.random.set_state((name, np.asarray(words).astype("uint32"), *rest))
    elif kind == _TORCH:
        torch.set_rng_state(value)
    elif kind == _device_key(device):
        _restore_devices(value, device)
    # The state of a device that this run does not use has nothing to be restored to.


def _restore_devices(value: Any, device: Device) -> None:
    if isinstance(value, torch.Tensor):
        device.set_rng_state(value)
    elif hasattr(device.module, "set_rng_state_all"):
        device.module.set_rng_state_all(value[: device.count])
    else:
        device.set_rng_state(value[0])


def _seed(kind: str, seed: int, device: Device) -> None:
    if kind == _PYTHON:
        random.seed(seed)
    elif kind == _NUMPY:
        import numpy as np

        np.random.seed(seed % 2**32)
    elif kind == _TORCH:
        torch.default_generator.manual_seed(seed)
    elif kind == _device_key(device):
        device.seed(seed)


def _derive(value: Any, rank: int) -> int:
    digest = hashlib.blake2b(repr(_plain(value)).encode() + rank.to_bytes(8, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little") % 2**63


def _same(one: Any, other: Any) -> bool:
    return bool(_plain(one) == _plain(other))


def _plain(value: Any) -> Any:
    """Nested lists of numbers and text, comparable and printable in full."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value

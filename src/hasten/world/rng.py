"""Random numbers: seeding, equal generators on all processes, and taking a picture of all generators and back."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch

from hasten.settings.enums import RNGType
from hasten.world import process
from hasten.world.devices import DEVICES, Device
from hasten.world.frames import frames_of
from hasten.world.process import World

_LARGEST_SEED = 2**32 - 1  # numpy's
_STATE_BYTES = (
    8192  # more than any generator's state has: what is sent has one size, whatever generator a process holds
)


def set_seed(
    seed: int, device_specific: bool = False, deterministic: bool = False, *, world: World | None = None
) -> None:
    """Seed Python's, numpy's and torch's generators, those of every device included.

    Args:
        seed: from 0 to 2**32 - 1.
        device_specific: add the process's rank, so that each process draws other numbers.
        deterministic: also let torch use deterministic algorithms only (`torch.use_deterministic_algorithms`); an
            operation that has none then raises.
        world: whose rank is added; by default all processes.

    Raises:
        ValueError: the seed is out of range.
        TypeError: the seed is not a whole number.
    """
    seed = operator.index(seed)
    if device_specific:
        seed += (world or process.current()).rank
    if not 0 <= seed <= _LARGEST_SEED:
        raise ValueError(f"The seed is {seed}, but must be between 0 and 2**32 - 1, the range that numpy can take.")
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)  # and those of all devices that torch itself knows
    if hasattr(torch, "hpu"):
        DEVICES["hpu"].seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_states(
    rng_types: Iterable[str | RNGType], generator: torch.Generator | None = None, *, world: World | None = None
) -> None:
    """Give some generators of every process the state that they have on the first one.

    Args:
        rng_types: "torch" for the CPU's, a device type such as "cuda" for the device's, "generator" for `generator`.
        generator: a generator of the user.
        world: the processes to synchronize; by default all.

    Raises:
        AssertionError: "generator" without a `generator`.
        ValueError: an unknown name, or a device that this machine does not have.
    """
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator, world=world)


def synchronize_rng_state(
    rng_type: str | RNGType | None = None, generator: torch.Generator | None = None, *, world: World | None = None
) -> None:
    """Give one generator of every process the state that it has on the first one; see `synchronize_rng_states`."""
    kind = RNGType(rng_type)
    if kind is RNGType.GENERATOR and generator is None:
        raise AssertionError("Need a generator to synchronize its seed. Pass `generator=`, a torch.Generator.")
    world = world or process.current()
    row = None if kind is RNGType.GENERATOR else _row(kind)
    if world.size == 1:
        return
    if row is None:
        assert generator is not None
        generator.set_state(_of_first(generator.get_state(), world))
    else:
        row.set_rng_state(_of_first(row.get_rng_state(), world))


def _row(kind: RNGType) -> Device:
    name = "cpu" if kind is RNGType.TORCH else kind.value
    row = DEVICES.get(name)
    if row is None or not row.is_available:
        raise ValueError(
            f"rng_type {kind.value!r}: this process has no such device. Available: "
            f"{['torch', 'generator', *(each.type for each in DEVICES.values() if not each.is_cpu and each.is_available)]}."
        )
    return row


def _of_first(state: torch.Tensor, world: World) -> torch.Tensor:
    """The state that the first process holds, in one broadcast whose size no process can get wrong."""
    own = state.numpy(force=True).tobytes()
    assert len(own) <= _STATE_BYTES
    # Bytes, since this is done at the start of each epoch, and small operations on tensors take as long as the exchange. The
    # state comes first, because `set_state` looks for it at the start of its memory.
    frame = bytearray(own.ljust(_STATE_BYTES, b"\0") + len(own).to_bytes(8, "little"))
    sent = here = torch.frombuffer(frame, dtype=torch.uint8)
    if world.backend != "gloo":
        sent = here.to(world.device)
    world.check_alive()
    frames_of(world).broadcast(sent, 0, name="synchronize_rng_states")
    if sent is not here:
        here.copy_(sent)
    length = int.from_bytes(frame[_STATE_BYTES:], "little")
    if length != len(own):
        raise ValueError(
            f"Rank {world.rank}: the generator's state has {len(own)} bytes here but {length} on rank 0, so it is another "
            "kind of generator. Use generators of one device type on all processes."
        )
    return here[:length]


def snapshot(*, world: World | None = None) -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, and of those of the process's device type.

    A process alone takes those of all its devices; one of several takes that of its own device only, so that the picture
    fits a machine with another number of devices. The result holds tensors, numbers and None only, so that
    `torch.load(..., weights_only=True)` reads it back.
    """
    version, words, gauss = random.getstate()
    numbers = numpy.random.get_state(legacy=False)
    picture: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": {
            "words": torch.from_numpy(numbers["state"]["key"].astype(numpy.int64)),
            "position": int(numbers["state"]["pos"]),
            "has_gauss": int(numbers["has_gauss"]),
            "gauss": float(numbers["gauss"]),
        },
        "torch": torch.get_rng_state(),
    }
    world = world or process.current()
    if not world.row.is_cpu:
        picture[world.row.type] = _device_states(world)
    return picture


def restore(picture: dict[str, Any], *, world: World | None = None) -> None:
    """Bring all generators back to the states of a `snapshot`.

    Raises:
        ValueError: a state is missing, is of another kind, or belongs to a number of devices that this process does not see.
    """
    row = (world or process.current()).row
    steps: dict[str, Callable[[Any], None]] = {
        "python": _restore_python,
        "numpy": _restore_numpy,
        "torch": torch.set_rng_state,
    }
    if not row.is_cpu:
        steps[row.type] = lambda states: _set_device_states(row, states)
    for name, step in steps.items():
        if name not in picture:
            raise ValueError(
                f"The saved random states hold {sorted(picture)}, but none for {name!r}, which this process uses."
            )
        try:
            step(picture[name])
        except Exception as error:
            raise ValueError(f"The saved random state of {name!r} cannot be restored: {error}") from error


def _restore_python(state: dict[str, Any]) -> None:
    random.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))


def _restore_numpy(state: dict[str, Any]) -> None:
    keys = state["words"].numpy().astype(numpy.uint32)
    numpy.random.set_state(("MT19937", keys, state["position"], state["has_gauss"], state["gauss"]))


def _device_states(world: World) -> list[torch.Tensor]:
    module = world.row.module
    if world.size == 1 and hasattr(module, "get_rng_state_all"):
        return [state.cpu() for state in module.get_rng_state_all()]
    return [world.row.get_rng_state().cpu()]


def _set_device_states(row: Device, states: list[torch.Tensor]) -> None:
    if len(states) == 1:
        row.set_rng_state(states[0])
    elif len(states) == row.count:
        row.module.set_rng_state_all(states)
    else:
        raise ValueError(f"it holds the states of {len(states)} devices, but this process sees {row.count}")

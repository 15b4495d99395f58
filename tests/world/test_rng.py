import random
from typing import Any

import numpy
import pytest
import torch

from hasten.settings.enums import RNGType
from hasten.world import process, rng
from hasten.world.process import World
from tests.ranks import run_ranks


def draws() -> list[Any]:
    return [random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn(), torch.rand(1).item()]


# ---- seeds ----


def test_a_seed_gives_the_same_draws():
    rng.set_seed(5)
    assert torch.initial_seed() == 5
    found = draws()
    # What Python, numpy and torch draw after `seed(5)` each.
    assert found[0] == 0.6229016948897019
    assert found[2] == 0.22199317108973948
    assert found[4] == 0.8302518725395203
    rng.set_seed(numpy.int64(5))  # type: ignore[arg-type]
    assert draws() == found
    rng.set_seed(6)
    assert all(one != other for one, other in zip(draws(), found, strict=True))


def test_each_process_can_have_its_own():
    rng.set_seed(5, device_specific=True, world=World(rank=2, size=3))
    assert torch.initial_seed() == 7
    rng.set_seed(5, device_specific=True)
    assert torch.initial_seed() == 5


def test_seeding_alone_joins_no_job():
    rng.set_seed(5)
    assert process.CONTEXT.world is None


def test_deterministic_algorithms():
    rng.set_seed(5)
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        rng.set_seed(5, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_bad_seeds_change_nothing():
    rng.set_seed(5)
    expected = draws()
    rng.set_seed(5)
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=r"must be between 0 and 2\*\*32 - 1"):
            rng.set_seed(seed)
    for other in (3.0, None, "3"):
        with pytest.raises(TypeError):
            rng.set_seed(other)  # type: ignore[arg-type]
    assert draws() == expected


# ---- synchronizing ----


def synchronized() -> list[Any]:
    world = process.start(cpu=True)
    torch.manual_seed(world.rank)
    generator = torch.Generator().manual_seed(10 + world.rank)
    apart = torch.Generator().manual_seed(10 + world.rank)
    rng.synchronize_rng_states(["torch", RNGType.GENERATOR], generator)
    part = world.part([0, 2] if world.rank != 1 else [1])
    rng.synchronize_rng_state("generator", apart, world=part)
    found = [torch.rand(1).item(), torch.rand(1, generator=generator).item(), torch.rand(1, generator=apart).item()]
    rng.synchronize_rng_states([])
    return found


def test_generators_get_the_state_of_the_first_process():
    firsts = [torch.rand(1, generator=torch.Generator().manual_seed(seed)).item() for seed in (0, 10, 11)]
    found = run_ranks(synchronized, 3)
    assert found[0] == found[2] == firsts[:2] + firsts[1:2]
    assert found[1] == firsts[:2] + firsts[2:]


def test_alone_there_is_nothing_to_synchronize_but_names_are_checked():
    state = torch.get_rng_state()
    rng.synchronize_rng_states(["torch"])
    rng.synchronize_rng_state("generator", torch.Generator())
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(AssertionError, match="Need a generator to synchronize its seed"):
        rng.synchronize_rng_state(RNGType.GENERATOR)
    for name in ("nonsense", None):
        with pytest.raises(ValueError, match="is not a valid RNGType"):
            rng.synchronize_rng_state(name)
    with pytest.raises(
        ValueError, match=r"rng_type 'xla': this process has no such device. Available: \['torch', 'generator'"
    ):
        rng.synchronize_rng_states(["xla"])


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without accelerator")
def test_devices_that_do_not_exist():
    for name in ("cuda", "npu", "xpu"):
        with pytest.raises(ValueError, match="has no such device"):
            rng.synchronize_rng_state(name)


class ShortState(torch.Generator):
    """As a generator of another kind: its state has another length."""

    def get_state(self) -> torch.Tensor:
        return super().get_state()[:16]


def other_kinds() -> str:
    world = process.start(cpu=True)
    generator = ShortState() if world.rank else torch.Generator()
    try:
        rng.synchronize_rng_state("generator", generator)
    except ValueError as error:
        return str(error)
    return ""


def test_generators_of_other_kinds_are_named():
    first, second = run_ranks(other_kinds, 2)
    assert first == ""
    assert second.startswith("Rank 1: the generator's state has 16 bytes here but 5056 on rank 0")


# ---- a picture and back ----


def test_all_generators_come_back():
    rng.set_seed(3)
    random.gauss(0, 1)  # leaves a second number behind
    numpy.random.randn()
    picture = rng.snapshot()
    expected = draws()
    draws()
    rng.restore(picture)
    assert draws() == expected


def test_a_picture_loads_as_weights_only(tmp_path: Any):
    rng.set_seed(3)
    random.gauss(0, 1)
    picture = rng.snapshot()
    torch.save(picture, tmp_path / "rng.pt")
    expected = draws()
    rng.restore(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert draws() == expected


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
def test_a_state_that_does_not_fit_is_named(name: str):
    picture = rng.snapshot()
    with pytest.raises(ValueError, match=f"state of '{name}' cannot be restored"):
        rng.restore({**picture, name: {"words": torch.zeros(3)}})
    del picture[name]
    with pytest.raises(ValueError, match=f"none for '{name}', which this process uses"):
        rng.restore(picture)


class FakeDevices:
    """The random part of a device module with two devices."""

    def __init__(self, *states: int) -> None:
        self.states = [torch.tensor([state]) for state in states]

    def get_rng_state(self) -> torch.Tensor:
        return self.states[0]

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.states[0] = state

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return list(self.states)

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        self.states = states


def with_devices(monkeypatch: pytest.MonkeyPatch, devices: FakeDevices) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda kind: devices)
    monkeypatch.setattr("hasten.world.devices.Device.count", len(devices.states))


def test_device_states(monkeypatch: pytest.MonkeyPatch):
    devices = FakeDevices(1, 2)
    with_devices(monkeypatch, devices)
    alone = World(device=torch.device("cuda", 0))
    one_of_two = World(device=torch.device("cuda", 0), size=2)
    both, own = rng.snapshot(world=alone), rng.snapshot(world=one_of_two)
    assert (len(both["cuda"]), len(own["cuda"])) == (2, 1)
    devices.states = [torch.tensor([8]), torch.tensor([9])]
    rng.restore(own, world=one_of_two)
    assert [int(state) for state in devices.states] == [1, 9]
    rng.restore(both, world=alone)
    assert [int(state) for state in devices.states] == [1, 2]
    with_devices(monkeypatch, FakeDevices(1, 2, 3))
    with pytest.raises(
        ValueError, match="'cuda' cannot be restored: it holds the states of 2 devices, but this process sees 3"
    ):
        rng.restore(both, world=alone)
    with pytest.raises(ValueError, match="none for 'cuda', which this process uses"):
        rng.restore(rng.snapshot(), world=alone)

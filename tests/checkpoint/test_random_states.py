import logging
import random
from pathlib import Path

import numpy
import pytest
import torch

from hasten.checkpoint import random_states
from hasten.weights.write import FolderWriter
from hasten.world import process, rng
from hasten.world.process import World
from tests.ranks import run_ranks
from tests.world.test_rng import draws

ALONE = World()


def write(folder: Path, rank: int = 0, step: int = 0, world: World = ALONE) -> None:
    with FolderWriter(folder) as writer:
        random_states.write(writer, rank, random_states.states(step, world))


def test_all_generators_come_back(tmp_path):
    rng.set_seed(3)
    random.gauss(0, 1)
    numpy.random.randn()  # both hold a second number now
    write(tmp_path, step=9)
    expected = draws()
    rng.set_seed(4)
    assert random_states.read(tmp_path, 0, ALONE) == 9
    assert draws() == expected


def test_reading_needs_no_trust_and_the_keys_are_those_of_the_reference(tmp_path):
    write(tmp_path)
    states = torch.load(tmp_path / "random_states_0.pkl", weights_only=True)
    assert states.keys() == {"step", "random_state", "numpy_random_seed", "torch_manual_seed"}
    # What the reference does with them.
    random.setstate(states["random_state"])
    numpy.random.set_state(states["numpy_random_seed"])
    torch.set_rng_state(states["torch_manual_seed"])


def test_what_the_reference_wrote_is_read(tmp_path):
    rng.set_seed(5)
    states = {
        "step": 2,
        "random_state": random.getstate(),
        "numpy_random_seed": numpy.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    torch.save(states, tmp_path / "random_states_0.pkl")
    expected = draws()
    assert random_states.read(tmp_path, 0, ALONE) == 2
    assert draws() == expected


@pytest.mark.parametrize(
    "change",
    [
        {"random_state": (3, (1, 2), None)},
        {"numpy_random_seed": ("MT19937", torch.zeros(3), 0, 0, 0.0)},
        {"torch_manual_seed": torch.zeros(3, dtype=torch.uint8)},
        {"random_state": None},
    ],
)
def test_states_that_can_not_be_restored_raise(tmp_path, change):
    write(tmp_path)
    path = tmp_path / "random_states_0.pkl"
    torch.save({**torch.load(path), **change}, path)
    with pytest.raises(RuntimeError, match=r"Rank 0: the random states in .*random_states_0\.pkl can not be restored"):
        random_states.read(tmp_path, 0, ALONE)


def test_no_states_at_all(tmp_path, caplog):
    rng.set_seed(1)
    expected = draws()
    rng.set_seed(1)
    with caplog.at_level(logging.WARNING):
        assert random_states.read(tmp_path, 0, ALONE) is None
    assert "random numbers go on as they are" in caplog.text
    assert draws() == expected


def test_a_rank_more_than_one(tmp_path, caplog):
    write(tmp_path, step=3)
    rng.set_seed(1)
    expected = draws()
    rng.set_seed(1)
    assert random_states.read(tmp_path, 1, ALONE) == 3
    assert draws() == expected
    assert "Rank 1:" in caplog.text


def test_a_rank_more_than_several_takes_over_what_was_equal(tmp_path, caplog):
    rng.set_seed(1)
    write(tmp_path, 0, step=3)
    torch.manual_seed(77)
    write(tmp_path, 1, step=3)
    rng.set_seed(1)
    common = [random.random(), numpy.random.rand()]
    found = []
    for rank in (2, 2, 3):
        rng.set_seed(50)
        assert random_states.read(tmp_path, rank, ALONE) == 3
        assert [random.random(), numpy.random.rand()] == common
        found.append(torch.rand(3).tolist())
    assert found[0] == found[1] != found[2]
    assert (
        "It takes over those of numpy, python, which were equal on the saved ranks. It has new seeds for torch, the same"
        in caplog.text
    )


class FakeRow:
    """A device type with four devices, whose generators hold a number."""

    type, is_cpu, count = "fake", False, 4


def test_devices_are_listed_as_the_reference_does(monkeypatch):
    part = World(rank=1, size=2, device=torch.device("meta", 1))
    monkeypatch.setattr(World, "row", FakeRow())
    own = torch.tensor([7])
    cpu = {"python": {"version": 3, "words": torch.zeros(2), "gauss": None}, "torch": torch.zeros(1)}
    picture = {**cpu, "numpy": {"words": torch.zeros(2), "position": 1, "has_gauss": 0, "gauss": 0.0}, "fake": [own]}
    saved = random_states._to_file(picture, part)
    assert saved["torch_fake_manual_seed"] == [own] * 4
    assert random_states._from_file(saved, part)["fake"] == [own]
    saved["torch_fake_manual_seed"] = [torch.tensor([n]) for n in range(4)]  # all devices, seen by one process
    assert random_states._from_file(saved, part)["fake"] == [torch.tensor([1])]
    alone = World(device=torch.device("meta", 0))
    assert len(random_states._from_file(saved, alone)["fake"]) == 4
    saved["torch_fake_manual_seed"] = [own] * 8  # a machine with more devices
    assert random_states._from_file(saved, alone)["fake"] == [own]


def test_a_checkpoint_of_the_cpu_on_a_device(monkeypatch, caplog, tmp_path):
    write(tmp_path)
    saved = torch.load(tmp_path / "random_states_0.pkl")
    monkeypatch.setattr(World, "row", FakeRow())
    monkeypatch.setattr(rng, "snapshot", lambda world: {"fake": ["now"]})
    assert random_states._from_file(saved, ALONE)["fake"] == ["now"]
    assert "holds no random state of a fake device" in caplog.text


def on_ranks(folder: str) -> bool:
    world = process.start(cpu=True)
    rng.set_seed(3, device_specific=True)
    write(Path(folder), world.rank, world.rank, world)
    expected = draws()
    return random_states.read(Path(folder), world.rank, world) == world.rank and draws() == expected


def test_each_rank_has_its_own(tmp_path):
    assert run_ranks(on_ranks, 2, str(tmp_path)) == [True, True]

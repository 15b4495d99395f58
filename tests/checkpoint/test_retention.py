import logging
from pathlib import Path

import pytest

from hasten.checkpoint import retention, state
from hasten.checkpoint.manifest import MANIFEST
from hasten.world import process
from hasten.world.process import World
from tests.checkpoint.objects import make, same, values
from tests.ranks import run_ranks

ALONE = World()


def save(project: Path, number: int, limit: int | None = None) -> Path:
    return retention.save_numbered(project, number, limit, make(number), ALONE)


def numbers(project: Path) -> list[int]:
    return list(retention.numbered(retention.folder_of_all(project)))


def test_names_and_numeric_order(tmp_path):
    assert numbers(tmp_path) == []
    for number in (10, 9, 2):
        assert save(tmp_path, number) == tmp_path / "checkpoints" / f"checkpoint_{number}"
    for other in ("checkpoint_x", "checkpoint_", "my_checkpoint_3", ".checkpoint_4"):
        (tmp_path / "checkpoints" / other).mkdir()
    (tmp_path / "checkpoints" / "checkpoint_7").write_text("a file")
    assert numbers(tmp_path) == [2, 9, 10]
    assert retention.newest(tmp_path / "checkpoints").name == "checkpoint_10"
    assert retention.next_iteration(tmp_path / "checkpoints") == 11
    assert retention.number_of(Path("checkpoint_12")) == 12


def test_incomplete_ones_are_not_offered(tmp_path, caplog):
    for number in (1, 2, 3):
        save(tmp_path, number)
    folder = tmp_path / "checkpoints"
    (folder / "checkpoint_3" / "scaler.pt").unlink()
    (folder / "checkpoint_4").mkdir()
    with caplog.at_level(logging.WARNING):
        assert retention.newest(folder).name == "checkpoint_2"
    assert "checkpoint_3 is not complete; looking for an older one" in caplog.text
    assert retention.next_iteration(folder) == 5


def test_there_is_none(tmp_path):
    for folder in (tmp_path, tmp_path / "nope"):
        with pytest.raises(ValueError, match="There is no complete checkpoint in"):
            retention.newest(folder)


def test_a_taken_number(tmp_path):
    save(tmp_path, 0)
    save(tmp_path, 4)
    with pytest.raises(ValueError, match=r"Checkpoint directory .*checkpoint_0 already exists.*iteration=5"):
        save(tmp_path, 0)


def test_the_oldest_go(tmp_path):
    for number in (8, 9, 10, 11):
        save(tmp_path, number, limit=2)
    assert numbers(tmp_path) == [10, 11]
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_the_one_just_saved_stays_even_if_its_number_is_lower(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 11)
    save(tmp_path, 3, limit=1)
    assert numbers(tmp_path) == [3]


def test_incomplete_ones_do_not_count(tmp_path):
    for number in (1, 2):
        save(tmp_path, number)
    (tmp_path / "checkpoints" / "checkpoint_2" / "scaler.pt").unlink()
    save(tmp_path, 3, limit=2)
    assert numbers(tmp_path) == [1, 2, 3]


def test_those_of_the_reference_count(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "checkpoints" / "checkpoint_1" / MANIFEST).unlink()
    assert retention.newest(tmp_path / "checkpoints").name == "checkpoint_1"
    save(tmp_path, 2, limit=1)
    assert numbers(tmp_path) == [2]


def test_nothing_is_removed_if_the_save_fails(tmp_path):
    save(tmp_path, 1)

    def hook(*arguments):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        retention.save_numbered(tmp_path, 2, 1, make(2), ALONE, hooks=[hook])
    assert numbers(tmp_path) == [1]


def on_ranks(project: str, counters: list[int]) -> tuple[str, list[int], bool]:
    world = process.start(cpu=True)
    saved = retention.save_numbered(project, counters[world.rank], 1, make(1), world)
    contents = make(2)
    state.load(saved, contents, world)
    world.barrier()
    return saved.name, numbers(Path(project)), same(values(contents), values(make(1)))


def test_the_number_of_the_main_process_counts(tmp_path):
    save(tmp_path, 1)
    assert run_ranks(on_ranks, 2, str(tmp_path), [5, 2]) == [("checkpoint_5", [5], True)] * 2


def taken(project: str) -> str:
    world = process.start(cpu=True)
    with pytest.raises((ValueError, RuntimeError)) as found:
        retention.save_numbered(project, 1, 1, make(1), world)
    return str(found.value)


def test_a_taken_number_is_an_error_on_every_rank(tmp_path):
    save(tmp_path, 1)
    for text in run_ranks(taken, 2, str(tmp_path)):
        assert "checkpoint_1 already exists" in text

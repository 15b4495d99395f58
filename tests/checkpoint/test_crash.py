"""The process is killed at every change that a save makes to the disk: the old checkpoint or the new one must load."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hasten.checkpoint import model as model_files
from hasten.checkpoint import retention, state, store
from hasten.checkpoint.manifest import MANIFEST
from hasten.world.process import World
from tests.checkpoint import crash
from tests.checkpoint.objects import make, same, values
from tests.ranks import RankError, run_ranks

ALONE = World()
OLD, NEW = 1, 2


def save_state(folder: str) -> None:
    state.save(folder, make(NEW), ALONE)


def save_model(folder: str) -> None:
    model_files.save_model(make(NEW).models[0], folder, max_shard_size=60, world=ALONE)


def save_numbered(folder: str) -> None:
    retention.save_numbered(folder, 3, 2, make(NEW), ALONE)


def killed(save: Callable[[str], None], folder: str, limit: int | None) -> int:
    """Save in a process that is killed at change number `limit`; without one, count the changes."""
    counter = crash.watch(limit)
    save(folder)
    return counter.count


def points(save: Callable[[str], None], before: Path, where: str, full: bool) -> list[int]:
    """Which changes to be killed at: all, or a sample with the first and the last one."""
    copy = before.with_name("count")
    if before.exists():
        shutil.copytree(before, copy)
    [count] = run_ranks(killed, 1, save, str(copy / where), None, initialise=False, fresh=True)
    shutil.rmtree(copy)
    return list(range(1, count + 1)) if full else sorted({1 + round(i * (count - 1) / 6) for i in range(7)})


def crash_at_each(
    save: Callable[[str], None], before: Path, where: str, full: bool, check: Callable[[Path], None]
) -> None:
    for point in points(save, before, where, full):
        work = before.with_name(f"work-{point}")
        if before.exists():
            shutil.copytree(before, work)
        with pytest.raises(RankError, match="the process died: signal 9"):
            run_ranks(killed, 1, save, str(work / where), point, initialise=False, fresh=True)
        check(work / where)
        shutil.rmtree(work, ignore_errors=True)


def loaded(folder: Path) -> int:
    """Which of the two checkpoints a folder holds."""
    store.verify(folder, checksums=True)
    contents = make(5)
    step = state.load(folder, contents, ALONE)["step"]
    assert same(values(contents), values(make(step)))
    return step


def nothing_is_left(folder: Path) -> bool:
    return not [path for place in (folder, folder.parent) for path in place.iterdir() if path.name.startswith(".")]


SIZES = [pytest.param(False, id="sample"), pytest.param(True, id="all", marks=pytest.mark.full)]


@pytest.mark.parametrize("full", SIZES)
def test_a_new_folder_is_whole_or_not_there(tmp_path, full):
    def check(folder: Path) -> None:
        if folder.exists():
            assert loaded(folder) == NEW
        state.save(folder, make(NEW), ALONE)
        assert loaded(folder) == NEW
        assert nothing_is_left(folder)

    crash_at_each(save_state, tmp_path / "none", "ck", full, check)


@pytest.mark.parametrize("full", SIZES)
@pytest.mark.parametrize("manifest", [True, False])
def test_a_replaced_folder_is_the_old_one_or_the_new_one(tmp_path, full, manifest):
    before = tmp_path / "before"
    state.save(before / "ck", make(OLD), ALONE, safe_serialization=False)
    (before / "ck" / "mine").write_text("x")
    if not manifest:
        (before / "ck" / MANIFEST).unlink()
    found = []

    def check(folder: Path) -> None:
        assert store.is_complete(folder)
        found.append(loaded(folder))
        assert (folder / "mine").read_text() == "x"
        state.save(folder, make(NEW), ALONE)
        assert loaded(folder) == NEW
        assert nothing_is_left(folder)
        assert not (folder / "pytorch_model.bin").exists()

    crash_at_each(save_state, before, "ck", full, check)
    assert found == sorted(found), "once the new one counts, it stays"
    assert {OLD, NEW} == set(found)


@pytest.mark.parametrize("full", SIZES)
def test_a_saved_model_is_the_old_one_or_the_new_one(tmp_path, full):
    before = tmp_path / "before"
    state.save(before / "ck", make(OLD), ALONE)

    def check(folder: Path) -> None:
        store.resolve(folder)
        store.verify(folder, checksums=True)
        shards = list(folder.glob("model-0*"))
        assert (folder / "model.safetensors").exists() == (not shards)
        if shards:
            assert (folder / "model.safetensors.index.json").exists()
            assert len(shards) == int(shards[0].name[-17:-12])
        save_model(str(folder))
        assert nothing_is_left(folder)

    crash_at_each(save_model, before, "ck", full, check)


@pytest.mark.parametrize("full", SIZES)
def test_old_checkpoints_go_only_when_the_new_one_is_there(tmp_path, full):
    before = tmp_path / "before"
    for number in (1, 2):
        retention.save_numbered(before, number, None, make(number), ALONE)

    def check(project: Path) -> None:
        folder = retention.folder_of_all(project)
        newest = retention.newest(folder)
        assert loaded(newest) == {2: 2, 3: NEW}[retention.number_of(newest)]
        assert sum(map(store.is_complete, retention.numbered(folder).values())) >= 2
        retention.save_numbered(project, retention.next_iteration(folder), 2, make(NEW), ALONE)
        assert len(retention.numbered(folder)) == 2
        assert {path.name for path in folder.iterdir()} == {path.name for path in retention.numbered(folder).values()}

    crash_at_each(save_numbered, before, "", full, check)


def killed_rank(folder: str, victim: int, limit: int) -> None:
    from hasten.world import process

    world = process.start(cpu=True)
    if world.rank == victim:
        crash.watch(limit)
    state.save(folder, make(NEW), world)


@pytest.mark.parametrize(("victim", "limit"), [(1, 2), (0, 6), (0, 25), (0, 38)])
def test_one_of_two_ranks_is_killed(tmp_path, victim, limit):
    folder = tmp_path / "ck"
    state.save(folder, make(OLD), ALONE)
    with pytest.raises(RankError, match="the process died: signal 9"):
        run_ranks(killed_rank, 2, str(folder), victim, limit, fresh=True)
    assert loaded(folder) in (OLD, NEW)
    state.save(folder, make(NEW), ALONE)
    assert loaded(folder) == NEW
    assert nothing_is_left(folder)


def test_the_crash_test_would_notice(tmp_path):
    """Without the transaction, files of both checkpoints are mixed or cut off."""

    def check(folder: Path) -> None:
        try:
            states.append(loaded(folder))
        except (RuntimeError, AssertionError, OSError):
            states.append(None)

    states: list[int | None] = []
    before = tmp_path / "before"
    state.save(before / "ck", make(OLD), ALONE)
    (before / "ck" / MANIFEST).unlink()
    crash_at_each(save_plainly, before, "ck", False, check)
    assert None in states


def save_plainly(folder: str) -> None:
    contents = make(NEW)
    weights = [model.state_dict() for model in contents.models]
    arguments = (contents.optimizers, contents.schedulers, contents.dataloaders, 0, contents.step, contents.scaler)
    state.save_accelerator_state(folder, weights, *arguments)
    for index, item in enumerate(contents.custom):
        torch.save(item.state_dict(), Path(folder) / f"custom_checkpoint_{index}.pkl")

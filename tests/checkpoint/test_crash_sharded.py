"""One rank is killed while a sharded model is saved: the checkpoint before stays, and half of one is never offered."""

import shutil

import pytest
import torch
from torch import Tensor

from hasten.checkpoint import retention, store
from tests.checkpoint import crash
from tests.checkpoint.test_sharded import Run, on
from tests.ranks import RankError, run_ranks

KINDS = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]


def go_on(
    old: str, folder: str, victim: int = -1, limit: int | None = None, **settings: str
) -> tuple[int, dict[str, Tensor]]:
    """Load, make a step and save; how often this rank changed the disk meanwhile, and the state."""
    run = Run(**settings)
    run.accelerator.load_state(old)
    run.step()
    counter = crash.watch(limit if run.accelerator.process_index == victim else None)
    run.accelerator.save_state(folder)
    return counter.count, run.state()


def loaded(folder: str, kind: str = KINDS[0]) -> tuple[int, dict[str, Tensor]]:
    """The step and the state that a checkpoint holds."""
    run = Run(kind=kind)
    run.accelerator.load_state(folder)
    return run.counter.value, run.state()


@pytest.mark.parametrize(("kind", "victim"), [(KINDS[0], 0), (KINDS[0], 1), (KINDS[1], 0)])
@pytest.mark.parametrize(
    "full", [pytest.param(False, id="sample"), pytest.param(True, id="all", marks=pytest.mark.full)]
)
def test_one_of_two_ranks_is_killed(tmp_path, kind, victim, full):
    folder = retention.folder_of_all(tmp_path)
    first, second = folder / "checkpoint_0", folder / "checkpoint_1"
    states = {1: on(2, str(first), 1, kind=kind)[1]}
    saved = run_ranks(go_on, 2, str(first), str(tmp_path / "whole"), kind=kind, fresh=True, timeout=60)
    count, states[2] = saved[victim]
    points = range(1, count + 1) if full else sorted({1 + count // 3, 1 + 2 * count // 3, count - victim})
    for point in points:
        with pytest.raises(RankError, match="the process died: signal 9"):
            run_ranks(go_on, 2, str(first), str(second), victim, point, kind=kind, fresh=True, timeout=60)
        newest = retention.newest(folder)
        assert newest == second or not store.is_complete(second)
        for path in {first, newest}:
            store.verify(path, checksums=True)
            step = retention.number_of(path) + 1
            for reached, state in run_ranks(loaded, 2, str(path), kind):
                assert reached == step
                torch.testing.assert_close(state, states[step], rtol=0, atol=0)
        shutil.rmtree(second, ignore_errors=True)


def over_the_old_one(folder: str, victim: int, limit: int) -> None:
    go_on(folder, folder, victim, limit)


@pytest.mark.parametrize(("victim", "limit"), [(0, 12), (0, 40), (1, 2)])
def test_a_replaced_folder_is_the_old_one_or_the_new_one(tmp_path, victim, limit):
    folder = tmp_path / "ck"
    states = {1: on(2, str(folder), 1)[1], 2: on(2, None, 2)[1]}
    with pytest.raises(RankError, match="the process died: signal 9"):
        run_ranks(over_the_old_one, 2, str(folder), victim, limit, fresh=True, timeout=60)
    for reached, state in run_ranks(loaded, 2, str(folder)):
        torch.testing.assert_close(state, states[reached], rtol=0, atol=0)
    store.verify(folder, checksums=True)
    on(2, str(folder), 1)
    assert not [path for place in (folder, tmp_path) for path in place.iterdir() if path.name.startswith(".")]

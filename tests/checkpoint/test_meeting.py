from datetime import timedelta

import pytest

from hasten.checkpoint import meeting
from hasten.checkpoint.meeting import Meeting
from hasten.world import process, torch_private
from tests.ranks import run_ranks


def one_save(joins: bool) -> tuple[object, ...]:
    world = process.start(cpu=True)
    found: tuple[object, ...] = ()
    if world.is_main:
        save = Meeting(world)
        save.open({"label": "x", "where": 1})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(meeting, "PATIENCE", 0.2)
            joined = save.assemble()
        reports = save.reports(joined)
        save.go([1])
        save.close(None)
        found = (joined, reports)
    elif joins:
        save = Meeting(world)
        record, in_time = save.join("x")
        save.report({"n": 3})
        found = (record["where"], in_time, save.may_go(), save.result())
    world.barrier()
    return found


def test_the_main_process_waits_for_those_that_join():
    assert run_ranks(one_save, 2, True) == [([1], {1: {"n": 3}}), (1, True, [1], None)]


def test_the_main_process_goes_on_alone():
    assert run_ranks(one_save, 2, False) == [([], {}), ()]


def waits_in_vain() -> str:
    world = process.start(cpu=True)
    if world.is_main:
        world.barrier()
        return ""
    assert world.group is not None
    limit = torch_private.group_timeouts(world.group)["cpu"]
    torch_private.set_group_timeout(world.group, timedelta(seconds=0.3))
    with pytest.raises(RuntimeError) as found:
        Meeting(world).join("x")
    torch_private.set_group_timeout(world.group, limit)
    world.barrier()
    return str(found.value)


def test_waiting_has_a_limit():
    _, text = run_ranks(waits_in_vain, 2)
    assert "Rank 1 waited 0.3 s for rank 0 to begin a save, in vain." in text
    assert "call `save_state` on every process with the same folder, or on the main process alone" in text


def many_saves() -> tuple[int, int]:
    world = process.start(cpu=True)
    counts = []
    for number in range(8):
        save = Meeting(world)
        if world.is_main:
            save.open({"label": str(number)})
            save.assemble()
            save.reports([1])
            save.go([1])
            save.close(None)
        else:
            save.join(str(number))
            save.report({})
            save.result()
        world.barrier()
        counts.append(save._store.num_keys())
        world.barrier()
    return counts[-2], counts[-1]


def test_keys_of_old_saves_are_removed():
    before, after = run_ranks(many_saves, 2)[0]
    assert before == after

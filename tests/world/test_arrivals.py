import json
import logging
import os
import pickle
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hasten import Accelerator, FullyShardedDataParallelPlugin, PartialState
from hasten.collectives.broadcast import broadcast
from hasten.collectives.gather import gather
from hasten.collectives.objects import gather_object
from hasten.collectives.pad import pad_across_processes
from hasten.collectives.reduce import reduce
from hasten.world import arrivals, process, torch_private
from hasten.world.agreement import DistributedOperationException
from hasten.world.arrivals import Arrivals, MissingProcessError, Note, call_site
from hasten.world.process import World
from tests.ranks import RankError, run_ranks

HERE = os.path.abspath(__file__)
OPERATIONS: dict[str, Callable[[], Any]] = {
    "gather": lambda: gather(torch.zeros(2)),
    "reduce": lambda: reduce(torch.zeros(2)),
    "broadcast": lambda: broadcast(torch.zeros(2)),
    "pad_across_processes": lambda: pad_across_processes(torch.zeros(2)),
    "gather_object": lambda: gather_object([1]),
    "wait_for_everyone": lambda: PartialState(cpu=True).wait_for_everyone(),
    "main_process_first": lambda: process.current().first(False).__enter__(),
}
NAMES = [name for name in OPERATIONS if name != "main_process_first"]  # that one needs another process that goes first


def start(seconds: float = 2.0) -> World:
    return process.start(cpu=True, timeout=timedelta(seconds=seconds))


def missed(call: Callable[[], Any]) -> tuple[str, tuple[int, ...] | None]:
    """The text of the error that `call` must end in, and which ranks it misses."""
    try:
        call()
    except MissingProcessError as error:
        return str(error), error.missing
    raise AssertionError("nobody was missed")


def store() -> Any:
    return torch_private.default_store()


def stay_until(key: str, count: int) -> None:
    """Keep this process alive, as its end would be noticed, until `count` others are done."""
    deadline = time.monotonic() + 20
    while store().add(key, 0) < count and time.monotonic() < deadline:
        time.sleep(0.02)


# ---- where a call stands ----


def test_call_site_is_the_callers_line():
    line = sys._getframe().f_lineno + 1
    assert (call_site(), call_site(whole=True)) == (f"test_arrivals.py:{line}", f"{HERE}:{line}")


def test_the_error_travels():
    error = pickle.loads(pickle.dumps(MissingProcessError("text", (1, 2))))
    assert (str(error), error.missing) == ("text", (1, 2))


# ---- a rank that does not come ----


def stays_away(operation: str) -> Any:
    world = start(2.0 if operation == "gather" else 1.0)
    assert gather_object([world.rank]) == list(range(world.size))
    if world.rank == 1:
        stay_until("over", world.size - 1)
        return None
    text, missing = missed(OPERATIONS[operation])
    store().add("over", 1)
    stay_until("over", world.size - 1)
    return text, missing


@pytest.mark.parametrize(
    ("operation", "size"), [*((name, 2) for name in OPERATIONS), ("gather", 3), ("wait_for_everyone", 3)]
)
def test_the_error_names_who_did_not_come_and_where_the_others_wait(operation: str, size: int):
    results = run_ranks(stays_away, size, operation)
    for rank in {0, size - 1} - {1}:
        text, missing = results[rank]
        assert missing == (1,)
        lines = text.splitlines()
        assert lines[0].startswith(f"Rank {rank} of {size}: `{operation}` at {HERE}:")
        assert "(call 2 of this process) was given up after " in lines[0]
        others = "rank 0" if size == 2 else "ranks 0, 2"
        assert lines[1].startswith(f"  {others}: here, in `{operation}` at {HERE}:")
        assert lines[2] == "  rank 1: not here"
        assert "look for a call inside `if is_main_process`" in lines[3]
        assert "InitProcessGroupKwargs(timeout=timedelta(...))" in lines[3]
        assert "Timed out waiting" in lines[4]


def saves_alone(folder: str) -> Any:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    process.start(timeout=timedelta(seconds=1))
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    result = None
    if accelerator.is_main_process:
        result = missed(lambda: accelerator.save_model(model, folder))
        store().add("over", 1)
    stay_until("over", 1)
    return result


def test_what_the_user_has_called_is_named_before_its_exchange(tmp_path):
    assert (
        str(Note(3, "gather", "train.py:5", "gather"))
        == str(Note(3, "gather", "train.py:5"))
        == "`gather` at train.py:5"
    )
    text, missing = run_ranks(saves_alone, 2, str(tmp_path))[0]
    assert missing == (1,)
    assert text.startswith(f"Rank 0 of 2: `save_model` (its `gather_object`) at {HERE}:")


def only_the_main_process() -> Any:
    accelerator = Accelerator(cpu=True)
    process.start(timeout=timedelta(seconds=1))
    if accelerator.is_main_process:
        result = missed(lambda: accelerator.gather(torch.tensor([1.0])))
        store().add("over", 1)
        return result
    stay_until("over", 1)
    return None


def test_a_call_inside_if_is_main_process():
    (text, missing), nothing = run_ranks(only_the_main_process, 2)
    assert nothing is None
    assert missing == (1,)
    assert f"`gather` at {HERE}:" in text


def dies(when: str) -> Any:
    world = start(20.0)
    gather(torch.zeros(1))
    if world.rank == 1 and when == "before":
        os._exit(3)
    if world.rank == 1:  # all ranks agree, and then this one ends
        world.attached["frames"].fill_rows = lambda *_: os._exit(3)
    return gather(torch.zeros(2**20))


@pytest.mark.parametrize(("size", "when"), [(2, "before"), (3, "before"), (2, "between the check and the tensors")])
def test_a_rank_that_has_died_is_named_at_once(size: int, when: str):
    with pytest.raises(RankError) as caught:
        run_ranks(dies, size, when)
    assert caught.value.tracebacks[1] == "the process died: exit code 3"
    for rank in {0, size - 1} - {1}:
        text = caught.value.tracebacks[rank]
        assert f"MissingProcessError: Rank {rank} of {size}: `gather` at {HERE}:" in text
        assert ") was broken off after 0." in text
        assert "\n  rank 1: not here\n" in text
        assert (
            "A process has ended, or has given up an earlier wait: look at the first error in its own output." in text
        )


def comes_late() -> str:
    world = start(1.0)
    gather_object([1])
    if world.rank == 1:
        time.sleep(1.3)
    text, missing = missed(lambda: gather(torch.zeros(2)))
    assert missing in ((), (1,))
    return text


def test_a_rank_that_comes_too_late_learns_it_too():
    first, second = run_ranks(comes_late, 2)
    assert "was given up after 1." in first
    assert "was broken off after 0." in second
    assert "ranks 0-1: here, in `gather`" in second
    assert "All processes have come, but some so late that others had given up" in second


# ---- waits that end well ----


def slow_rank(polls: bool) -> Any:
    world = start(8.0)
    frames = process_frames(world)
    frames.arrivals = world.attached["arrivals"] = Arrivals(world, polls)
    if world.rank == 1:
        deadline = time.monotonic() + 7
        while not store().check([f"hasten/arrivals/{group_name(world)}/0"]) and time.monotonic() < deadline:
            time.sleep(0.02)
        note = Note(**json.loads(store().get(f"hasten/arrivals/{group_name(world)}/0")))
    else:
        note = None
    values = [gather(torch.tensor([world.rank])).tolist() for _ in range(3)]
    world.barrier()
    left = [store().check([f"hasten/arrivals/{group_name(world)}/{rank}"]) for rank in range(2)]
    return values, left, note


def long_wait() -> list[str]:
    world = start(4.0)
    process_frames(world)
    lines: list[str] = []
    logger, handler = logging.getLogger("hasten.world.arrivals"), Listing(lines)
    logger.addHandler(handler)
    kept, arrivals._TOLD_S = arrivals._TOLD_S, 1.5  # all have left their notes after 1 s
    if world.rank == 1:
        deadline = time.monotonic() + 3
        while not store().check([f"hasten/arrivals/{group_name(world)}/2"]) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(1.6)
    PartialState(cpu=True).wait_for_everyone()
    arrivals._TOLD_S = kept
    logger.removeHandler(handler)
    return lines


class Listing(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_one_process_tells_of_a_long_wait():
    (text,), late, last = run_ranks(long_wait, 3)
    assert late == []
    assert last == []
    assert f"Rank 0 of 3: `wait_for_everyone` at {HERE}:" in text
    assert "(call 2 of this process) has waited 2 s.\n  ranks 0, 2: here, in `wait_for_everyone`" in text
    assert text.endswith("\n  rank 1: not here")


def process_frames(world: World) -> Any:
    gather_object([1])
    return world.attached["frames"]


def group_name(world: World) -> str:
    assert world.group is not None
    return world.group.group_name


@pytest.mark.parametrize("polls", [False, True])
def test_a_long_wait_is_noted_and_the_note_is_taken_back(polls: bool):
    results = run_ranks(slow_rank, 2, polls)
    for values, left, _ in results:
        assert values == [[0, 1]] * 3
        assert left == [False, False]
    note = results[1][2]
    assert note.operation == "gather"
    assert note.site.startswith(HERE)


def polled_in_vain() -> Any:
    world = start(1.0)
    frames = process_frames(world)
    frames.arrivals = world.attached["arrivals"] = Arrivals(world, polls=True)
    if world.rank == 0:
        result = missed(lambda: gather(torch.zeros(2)))
        store().add("over", 1)
        return result
    stay_until("over", 1)
    return None


def test_where_only_a_stream_waits_the_host_asks():
    (text, missing), _ = run_ranks(polled_in_vain, 2)
    assert missing == (1,)
    assert "was given up after 0.9 s; the timeout of the process group is 1 s" in text


def fast_path() -> list[int]:
    world = start()
    process_frames(world)
    used: list[str] = []
    original = Arrivals._store
    Arrivals._store = lambda self: used.append("store") or original(self)  # type: ignore[method-assign,func-returns-value]
    try:
        for _ in range(5):
            for name in NAMES:
                OPERATIONS[name]()
    finally:
        Arrivals._store = original  # type: ignore[method-assign]
    return [len(used), world.attached["arrivals"].call]


def test_a_wait_that_ends_well_does_not_touch_the_store():
    assert run_ranks(fast_path, 2) == [[0, 1 + 5 * len(NAMES)]] * 2


# ---- ranks that call different things ----


def mismatched() -> list[str]:
    world = start(4.0)
    pairs = [("gather", "reduce"), ("wait_for_everyone", "gather"), ("reduce", "wait_for_everyone")]
    found = []
    for pair in pairs:
        try:
            OPERATIONS[pair[world.rank % 2]]()
        except DistributedOperationException as error:
            found.append(str(error))
    assert gather(torch.tensor([world.rank])).tolist() == list(range(world.size))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_different_calls_are_told_with_their_lines_and_break_nothing(size: int):
    results = run_ranks(mismatched, size)
    assert all(result == results[0] for result in results)
    first = "rank 0" if size == 2 else "ranks 0, 2"
    for text, (one, other) in zip(
        results[0],
        [
            ("gather()", "reduce(reduction='mean')"),
            ("wait_for_everyone()", "gather()"),
            ("reduce(", "wait_for_everyone()"),
        ],
        strict=True,
    ):
        assert text.startswith(f"The {size} processes did not call the same operation:\n  {first}: {one}")
        assert f"\n  rank 1: {other}" in text
        assert text.count(" at test_arrivals.py:") == 2


def from_two_lines() -> list[str]:
    world = start(4.0)
    found = []
    with world.first(world.is_main):
        pass
    for _ in range(2):
        world.barrier()
    try:
        if world.is_main:
            world.barrier()
        else:
            world.barrier()
    except DistributedOperationException as error:
        found.append(str(error))
    return found


def test_debug_mode_compares_the_lines_of_barriers():
    assert run_ranks(from_two_lines, 2) == [[], []]
    results = run_ranks(from_two_lines, 2, env={"ACCELERATE_DEBUG_MODE": "1"})
    assert results[0] == results[1]
    assert "called `wait_for_everyone` from different places" in results[0][0]
    assert results[0][0].count("test_arrivals.py:") == 2


# ---- the store ----


class Silent:
    def __getattr__(self, name: str) -> Any:
        raise dist.DistNetworkError("gone")


def without_a_store() -> Any:
    world = start(1.0)
    gather_object([1])
    if world.rank == 1:
        stay_until("over", 1)
        return None
    original = Arrivals._store
    Arrivals._store = lambda self: Silent()  # type: ignore[method-assign]
    try:
        return missed(lambda: gather(torch.zeros(2)))
    finally:
        Arrivals._store = original  # type: ignore[method-assign]
        store().add("over", 1)


def test_without_the_store_the_error_still_says_where_this_process_waited():
    (text, missing), _ = run_ranks(without_a_store, 2)
    assert missing is None
    assert text.startswith(f"Rank 0 of 2: `gather` at {HERE}:")
    assert (
        "where the other ranks are is unknown: the store of the job, which rank 0 or the launcher serves, is gone"
        in text
    )


def test_a_store_that_does_not_answer_is_not_waited_for():
    assert arrivals._within(0.01, lambda: time.sleep(0.2)) is None
    assert arrivals._within(5, lambda: 3) == 3


@pytest.mark.parametrize("there", [(), (3,), (0, 1, 2, 3, 4), (0, 4), (1, 2, 3)])
def test_notes_are_looked_for_by_halves(there: tuple[int, ...]):
    kept = dist.HashStore()
    for rank in there:
        kept.set(str(rank), "x")
    assert arrivals._noted(kept, list(range(5))) == list(there)
    assert arrivals._noted(kept, []) == []

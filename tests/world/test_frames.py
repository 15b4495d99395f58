import struct
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hasten.collectives.gather import gather
from hasten.collectives.wire import Wire, wire_of
from hasten.world import frames
from hasten.world.frames import HEADER_BYTES, Frames, frame_bytes, frames_of
from tests.collectives.data import Counted, message, start
from tests.ranks import run_ranks


@pytest.mark.parametrize(("size", "frame"), [(2, 16384), (16, 16384), (17, 15408), (64, 4096), (512, 512), (9999, 512)])
def test_frames_are_sized_by_the_number_of_processes_alone(size: int, frame: int):
    assert frame_bytes(size) == frame
    assert frame % 16 == 0
    assert HEADER_BYTES % 16 == 0


# ---- agreement ----


def agree() -> list[Any]:
    world = start()
    here = frames_of(world)
    done: list[str] = []
    with Counted() as counted:
        here.agree("vote", subject="lunch")
        here.meet(frames.Statement("vote", {}), meanwhile=lambda: done.append("meanwhile"))
    text = message(lambda: here.agree("vote", subject=["lunch", "dinner"][world.rank]))
    calls = [len(counted.calls), done]
    return [*calls, text, type(here) is Frames, frames_of(world) is here]


def test_processes_agree_or_all_of_them_raise():
    text = (
        "The 2 processes called `vote` with different arguments:\n"
        "  rank 0: vote(subject='lunch') at test_frames.py:{line}\n  rank 1: vote(subject='dinner') at test_frames.py:{line}\n"
        "Call it with the same arguments everywhere."
    )
    for calls, done, found, plain, same in run_ranks(agree, 2):
        line = found.partition("test_frames.py:")[2].partition("\n")[0]
        assert (calls, done, plain, same) == (2, ["meanwhile"], True, True)
        assert found == text.format(line=line)


def barrier_then_gather() -> list[Any]:
    world = start()
    world.barrier()
    first = frames_of(world)
    values = gather(torch.tensor([world.rank])).tolist()
    world.barrier()
    wire = wire_of(world)
    return [
        values,
        isinstance(wire, Wire),
        wire is frames_of(world),
        first is wire,
        first.arrivals is frames_of(world).arrivals,
    ]


def test_barriers_and_collectives_count_together():
    assert run_ranks(barrier_then_gather, 2) == [[[0, 1], True, True, False, True]] * 2


def talk() -> list[Any]:
    world = start()
    here = frames_of(world)
    found = []
    for nbytes in (0, 5, here.capacity, here.capacity + 1):
        body = struct.pack("<B", world.rank) * (nbytes + world.rank)
        with Counted() as counted:
            bodies = here.talk(frames.Statement("talk", {}), body)
        assert [bytes(each) for each in bodies] == [bytes([rank]) * (nbytes + rank) for rank in range(2)]
        found.append(len(counted.calls))
    return found


def test_bodies_of_any_length():
    assert run_ranks(talk, 2) == [[1, 1, 2, 2]] * 2


def by_name() -> list[Any]:
    world = start()
    here = frames_of(world)
    here.agree("vote")
    seed, count = torch.tensor([world.rank]), torch.tensor([1.0])
    here.broadcast(seed, 1)
    found: list[Any] = [here.arrivals.operation, here.arrivals.call]
    here.broadcast(seed, 1, name="share a seed")
    found += [here.arrivals.operation, here.arrivals.call, int(seed)]
    here.all_reduce(count, dist.ReduceOp.SUM, name="count tokens")
    return [*found, here.arrivals.operation, here.arrivals.call, int(count)]


def test_exchanges_without_an_agreement_have_names_of_their_own():
    assert run_ranks(by_name, 2) == [["vote", 1, "share a seed", 2, 1, "count tokens", 3, 2]] * 2


# ---- large tensors on one machine ----


def fill(size: int) -> list[Any]:
    world = start()
    here = frames_of(world)
    rows = [torch.full((3 * (rank + 1) % 7,), 255, dtype=torch.uint8) for rank in range(size)]
    rows[world.rank].fill_(world.rank)
    with Counted() as counted:
        here.fill_rows(rows, rows[world.rank])
    return [[row.tolist() for row in rows], counted.calls, here.fills_rows]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_are_filled_straight_from_each_process(size: int):
    rows = [[rank] * (3 * (rank + 1) % 7) for rank in range(size)]
    assert run_ranks(fill, size, size) == [[rows, ["all_to_all_single"] * (size - 1), True]] * size


def fills() -> list[bool]:
    world = start()
    here = frames_of(world)
    found = [here.fills_rows]
    for name, value in (("local_size", 1), ("size", 9), ("backend", "nccl")):
        twin = object.__new__(type(world))
        vars(twin).update({**vars(world), "local_size": world.size, name: value})
        here.world, here.size = twin, twin.size
        found.append(here.fills_rows)
    return found


def test_only_few_processes_of_one_machine_fill_rows():
    assert run_ranks(fills, 2) == [[True, False, False, False]] * 2


# ---- other versions, other times ----


def with_old_names() -> list[str]:
    world = start()
    called = []
    original = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

    def old(output: Any, tensor: Any, **options: Any) -> Any:
        called.append("all_gather_into_tensor")
        return original(output, tensor, **options)

    dist.all_gather_into_tensor, frames._SINGLE, kept = old, False, (dist.all_gather_into_tensor, frames._SINGLE)
    try:
        assert gather(torch.tensor([world.rank])).tolist() == [0, 1, 2]
    finally:
        dist.all_gather_into_tensor, frames._SINGLE = kept
    return called


def test_older_torch_is_asked_by_its_own_name():
    assert run_ranks(with_old_names, 3) == [["all_gather_into_tensor"]] * 3


def after_the_end() -> str:
    start()
    gather(torch.zeros(1))
    dist.destroy_process_group()
    try:
        gather(torch.zeros(1))
    except RuntimeError as error:
        return str(error)
    return ""


def test_after_the_end_the_error_says_so():
    for rank, text in enumerate(run_ranks(after_the_end, 2)):
        assert text.startswith(f"Rank {rank} of 2: the process group was ended")

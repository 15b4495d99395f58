import os
import pickle
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hasten.settings.enums import DistributedType
from hasten.world import process, torch_private
from hasten.world.context import CONTEXT
from hasten.world.process import World
from tests.ranks import RankError, run_ranks
from tests.simulated_device import install

META = torch.device("meta")


def seconds(world: World) -> float:
    assert world.timeout is not None
    return world.timeout.total_seconds()


# ---- alone ----


def test_without_a_launcher_a_process_is_alone():
    world = process.start()
    assert (world.rank, world.size, world.local_rank, world.local_size, world.ranks) == (0, 1, 0, 1, (0,))
    assert (world.group, world.backend, world.timeout, world.label) == (None, None, None, DistributedType.NO)
    assert world.is_main
    assert world.is_local_main
    assert world.is_last
    assert world.device == torch.device("cpu")
    assert not dist.is_initialized()
    world.barrier()
    world.check_alive()
    process.shutdown()


def test_there_is_one_default_world():
    world = process.current()
    assert process.start() is process.start(cpu=True) is process.current() is world


def test_the_cpu_can_be_forced(monkeypatch: pytest.MonkeyPatch):
    assert not process.start().forced_cpu
    CONTEXT.reset()
    assert process.start(cpu=True).forced_cpu
    CONTEXT.reset()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert process.start().forced_cpu


def test_the_cpu_must_be_asked_for_first():
    CONTEXT.world = World(device=META)
    with pytest.raises(
        ValueError, match=r"cpu=True was asked for, but this process already uses meta. Ask for the CPU when the first"
    ):
        process.start(cpu=True)
    assert process.start().device == META


def test_a_device_can_be_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    assert process.start().device == META
    CONTEXT.reset()
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "toaster:1")
    with pytest.raises(ValueError, match="ACCELERATE_TORCH_DEVICE='toaster:1' is not a torch device"):
        process.start()
    assert CONTEXT.world is None


def test_the_default_world_pickles_into_the_default_world_of_the_reader():
    data = pickle.dumps(process.start())
    CONTEXT.reset()
    assert pickle.loads(data) is process.current()
    with pytest.raises(TypeError, match=r"a part of the job \(`ranks=`\) cannot be pickled"):
        pickle.dumps(process.current().part([0]))


def test_the_only_process_can_be_a_part():
    part = process.start().part([0])
    assert (part.rank, part.size, part.group, part.ranks) == (0, 1, None, (0,))


def test_a_part_knows_who_is_on_the_same_machine():
    # Machines with 1, 2 and 2 processes; a part of a part counts by the job's ranks.
    whole = World(rank=4, size=5, local_rank=1, local_size=2, ranks=tuple(range(5)), machine=range(3, 5))
    part = whole.part([0, 1, 3, 4])
    assert (part.rank, part.local_rank, part.local_size, part.ranks) == (3, 1, 2, (0, 1, 3, 4))
    again = part.part([0, 3])
    assert (again.rank, again.local_rank, again.local_size, again.ranks) == (1, 0, 1, (0, 4))


@pytest.mark.parametrize("ranks", [[], [1], [-1], [0, 0], [0, 1]])
def test_parts_have_ranks_that_exist(ranks: list[int]):
    with pytest.raises(
        ValueError, match=r"each must be a different number from 0 to 0; this job has 1 process. Start more with"
    ):
        process.start().part(ranks)


def test_going_first_alone_changes_nothing():
    for goes_first in (True, False):
        with process.start().first(goes_first):
            pass
    with pytest.raises(KeyError), process.start().first(True):
        raise KeyError


def test_a_backend_that_is_not_there_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    for backend in ("nccl", "cpu:gloo,cuda:nccl"):
        with pytest.raises(ValueError, match=r"backend 'nccl' is not available here; available: \[.*'gloo'.*\]"):
            process.start(backend=backend)
    assert CONTEXT.world is None
    assert not dist.is_initialized()


def test_a_job_that_cannot_be_joined_says_where_it_looked(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        RuntimeError, match=r"Rank 1 of 2 could not join the job at 127.0.0.1:1 \(torchrun, backend gloo\)"
    ):
        process.start(timeout=timedelta(seconds=1))
    assert CONTEXT.world is None


# ---- together ----


def describe(**arguments: Any) -> tuple[Any, ...]:
    world = process.start(**arguments)
    total = torch.ones(1)
    dist.all_reduce(total, group=world.group)
    return (
        world.rank,
        world.size,
        world.local_rank,
        world.local_size,
        world.label.value,
        world.backend,
        seconds(world),
        total.item(),
    )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_torchrun_without_an_accelerator_is_a_gloo_job(size: int):
    expected = [(rank, size, rank, size, "MULTI_CPU", "gloo", 1800.0, float(size)) for rank in range(size)]
    assert run_ranks(describe, size, initialise=False) == expected


@pytest.mark.parametrize("timeout", [7, 600, 5400])
def test_the_timeout_is_the_one_that_was_asked_for_on_every_group(timeout: int):
    assert run_ranks(start_with, 2, timeout, initialise=False) == [{float(timeout)}] * 2


def start_with(timeout: int) -> set[float]:
    world = process.start(timeout=timedelta(seconds=timeout))
    part = world.part([0, 1])
    part.part([0, 1]).barrier()
    return every_timeout()


def every_timeout() -> set[float]:
    return {
        time.total_seconds()
        for group in torch_private.all_groups()
        for time in torch_private.group_timeouts(group).values()
    }


def reuse() -> list[Any]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=50))
    world = process.start()
    found: list[Any] = [world.group is dist.group.WORLD, seconds(world), seconds(world.part([0, 1]))]
    process.start(timeout=timedelta(seconds=9))
    found += [seconds(world), seconds(world.part([0, 1])), process.current() is world]
    try:
        process.start(backend="nccl")
    except ValueError as error:
        found.append(str(error))
    return found


def test_a_group_that_exists_is_used_and_later_wishes_are_obeyed_or_refused():
    for found in run_ranks(reuse, 2, initialise=False):
        assert found[:6] == [True, 50.0, 50.0, 9.0, 9.0, True]
        assert "backend='nccl' was asked for, but this process already communicates through 'gloo'" in found[6]


def reuse_with(**arguments: Any) -> float:
    dist.init_process_group("gloo", timeout=timedelta(seconds=50))
    return seconds(process.start(**arguments))


def test_a_wish_at_the_first_start_holds_for_a_group_that_exists():
    assert run_ranks(reuse_seven, 2, initialise=False) == [7.0, 7.0]
    with pytest.raises(
        RankError, match="ValueError: backend='mpi' was asked for, but this process already communicates"
    ):
        run_ranks(reuse_with, 1, backend="mpi", initialise=False)


def reuse_seven() -> float:
    return reuse_with(timeout=timedelta(seconds=7))


def made_without_the_environment() -> tuple[Any, ...]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    install("npu", devices=2)
    dist.init_process_group(
        "cpu:gloo,npu:gloo", store=dist.FileStore(os.environ["STORE"], size), rank=rank, world_size=size
    )
    world = process.start()
    return world.rank, world.size, world.local_rank, world.local_size, str(world.device), world.label.value


def test_a_group_that_the_environment_does_not_know_of_gives_each_rank_a_device(tmp_path: Path):
    found = run_ranks(
        made_without_the_environment, 2, fresh=True, initialise=False, env={"STORE": str(tmp_path / "store")}
    )
    assert found == [(rank, 2, rank, 2, f"npu:{rank}", "MULTI_NPU") for rank in range(2)]


def on_a_simulated_device() -> list[Any]:
    install("npu", devices=2)
    try:
        process.start()
    except ValueError as error:
        found: list[Any] = [str(error)]
    world = process.start(backend="cpu:gloo,npu:gloo", timeout=timedelta(seconds=7))
    total = torch.ones(1, device=world.device)
    part = world.part([0, 1])
    dist.all_reduce(total, group=part.group)
    process.start(backend="cpu:gloo,npu:gloo")
    return [*found, str(world.device), world.label.value, total.item(), seconds(part), part.device == world.device]


def test_each_rank_takes_its_accelerator():
    for rank, found in enumerate(run_ranks(on_a_simulated_device, 2, fresh=True, initialise=False)):
        assert "The communication backend 'hccl' is not available here" in found[0]
        assert found[1:] == [f"npu:{rank}", "MULTI_NPU", 2.0, 7.0, True]


# ---- parts ----


def halves() -> list[Any]:
    world = process.start()
    part = world.part([2, 3] if world.rank > 1 else [1, 0])
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total, group=part.group)
    part.barrier()
    last = part.part([1]) if part.rank == 1 else None
    return [
        part.rank,
        part.size,
        part.ranks,
        part.local_rank,
        part.local_size,
        part.is_main,
        part.is_last,
        total.item(),
        last and last.ranks,
    ]


def test_two_halves_work_at_once():
    assert run_ranks(halves, 4) == [
        [0, 2, (0, 1), 0, 2, True, False, 1.0, None],
        [1, 2, (0, 1), 1, 2, False, True, 1.0, (1,)],
        [0, 2, (2, 3), 0, 2, True, False, 5.0, None],
        [1, 2, (2, 3), 1, 2, False, True, 5.0, (3,)],
    ]


def two_machines() -> list[tuple[int, int]]:
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    world = process.start()
    found = [(world.local_rank, world.local_size)]
    for ranks in ([0, 2, 3], [1, 3]):
        if rank in ranks:
            part = world.part(ranks)
            found.append((part.local_rank, part.local_size))
    return found


def test_members_count_their_neighbours_on_the_same_machine():
    assert run_ranks(two_machines, 4) == [
        [(0, 2), (0, 1)],
        [(1, 2), (0, 1)],
        [(0, 2), (0, 2)],
        [(1, 2), (1, 2), (0, 1)],
    ]


def outside() -> str:
    try:
        process.start().part([1])
    except ValueError as error:
        return str(error)
    return "made"


def test_only_members_make_a_part():
    first, second = run_ranks(outside, 2)
    assert first.startswith(
        "ranks=[1] does not contain this process, rank 0 of 2. Build the Accelerator only on its own ranks"
    )
    assert second == "made"


# ---- waiting ----


def write_then_meet(folder: str) -> bool:
    world = process.start()
    if world.is_main:
        Path(folder, "written").touch()
    world.barrier()
    return Path(folder, "written").exists()


def test_a_barrier_waits_for_everyone(tmp_path: Path):
    assert run_ranks(write_then_meet, 2, str(tmp_path)) == [True, True]


def first_writes(folder: str) -> list[bool]:
    world = process.start()
    seen = []
    with world.first(world.is_main):
        seen.append(Path(folder, "first").exists())
        Path(folder, "first").touch()
    world.barrier()
    with world.first(world.is_last):
        seen.append(Path(folder, "last").exists())
        Path(folder, "last").touch()
    return seen


def test_the_others_come_after_the_first(tmp_path: Path):
    assert run_ranks(first_writes, 3, str(tmp_path)) == [[False, True], [True, True], [True, False]]


def first_fails() -> str:
    world = process.start()
    try:
        with world.first(world.is_main):
            if world.is_main:
                raise KeyError("only here")
        outcome = "released"
    except KeyError:
        outcome = "raised"
    world.barrier()  # and everyone is still in step
    return outcome


def test_the_others_are_released_when_the_first_raises():
    assert run_ranks(first_fails, 3) == ["raised", "released", "released"]


def never_comes() -> str:
    world = process.start(timeout=timedelta(seconds=0.3))
    if world.is_main:
        try:
            world.barrier()
        except RuntimeError as error:
            torch_private.default_store().set("over", "1")
            return type(error).__name__
    torch_private.default_store().wait(["over"], timedelta(seconds=20))
    return "absent"


def test_no_wait_is_without_a_limit():
    outcome, absent = run_ranks(never_comes, 2)
    assert outcome != "absent"
    assert absent == "absent"


def use_after_the_end() -> str:
    world = process.start()
    process.shutdown()
    process.shutdown()
    try:
        world.barrier()
    except RuntimeError as error:
        return str(error)
    return "waited"


def test_what_comes_after_the_end_is_told_so():
    found = run_ranks(use_after_the_end, 2)
    for rank, message in enumerate(found):
        assert f"Rank {rank} of 2: the process group was ended (by `end_training()`" in message


# ---- the cores of a machine ----


def threads() -> int:
    os.cpu_count = lambda: 8  # type: ignore[method-assign]
    process.start()
    return torch.get_num_threads()


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [({"OMP_NUM_THREADS": None}, 4), ({"OMP_NUM_THREADS": "1"}, 1), ({"MKL_NUM_THREADS": "1"}, 1)],
)
def test_cpu_processes_share_the_cores_unless_threads_were_chosen(chosen: dict[str, str | None], expected: int):
    env = {"OMP_NUM_THREADS": None, "MKL_NUM_THREADS": None, **chosen}
    assert run_ranks(threads, 2, fresh=True, env=env) == [expected] * 2


def from_thread() -> int:
    found: list[World] = []
    thread = threading.Thread(target=lambda: found.append(process.start()))
    thread.start()
    thread.join()
    return found[0].size if found[0] is process.start() else -1


def test_a_world_joined_in_a_thread_is_that_of_the_process():
    assert run_ranks(from_thread, 2) == [2, 2]

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hasten import (
    Accelerator,
    GradientState,
    InitProcessGroupKwargs,
    PartialState,
)
from hasten.world import torch_private
from hasten.world.context import CONTEXT
from tests.plain import loss_of, parts, sgd
from tests.ranks import RankError, run_ranks
from tests.simulated_device import install

# ---- parts of a job ----


def two_models() -> dict[str, Any]:
    half = 0 if PartialState().process_index < 2 else 1
    accelerator = Accelerator(
        ranks=[[0, 1], [2, 3]][half], mixed_precision=["no", "bf16"][half], gradient_accumulation_steps=1 + half
    )
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    for step in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((2, 4), 1.0 + accelerator.process_index + 10 * half + step)).mean())
            optimizer.step()
            optimizer.zero_grad()
    return {
        "place": (accelerator.process_index, accelerator.num_processes, accelerator.is_main_process),
        "precision": (accelerator.mixed_precision, accelerator.native_amp),
        "weights": accelerator.gather(model.module.weight.detach())[:, 0].tolist(),
        "ranks": accelerator.gather(torch.tensor([PartialState().process_index])).tolist(),
        "default": (PartialState().num_processes, GradientState().num_steps),
    }


def test_two_halves_of_a_job_train_two_models_at_once():
    found = run_ranks(two_models, 4)
    for rank, result in enumerate(found):
        half = rank // 2
        assert result["place"] == (rank % 2, 2, rank % 2 == 0)
        assert result["precision"] == (["no", "bf16"][half], bool(half))
        assert result["ranks"] == [[0, 1], [2, 3]][half]
        assert result["default"] == (4, 1 + half)
    # without accumulation the mean inputs are 1.5, 2.5, 3.5, 4.5; with it (11.5 + 12.5) / 2 and (13.5 + 14.5) / 2
    assert found[0]["weights"] == found[1]["weights"] == pytest.approx([1 - 0.1 * 12.0] * 2)
    assert found[2]["weights"] == found[3]["weights"] == pytest.approx([1 - 0.1 * 26.0] * 2, rel=0.01)


def overlapping() -> list[Any]:
    rank = PartialState().process_index
    found = []
    for ranks in ([0, 1], [1, 2], [0, 1, 2]):
        if rank in ranks:
            found.append(Accelerator(ranks=ranks).reduce(torch.tensor(float(rank))).item())
    return found


def test_a_rank_may_be_in_several_parts():
    assert run_ranks(overlapping, 3) == [[1.0, 3.0], [1.0, 3.0, 3.0], [3.0, 3.0]]


def own_state_of_a_part() -> list[Any]:
    whole = Accelerator(mixed_precision="bf16")
    part = Accelerator(ranks=[0, 1], mixed_precision="no", gradient_accumulation_steps=2)
    return [whole.mixed_precision, part.mixed_precision, whole.gradient_accumulation_steps, part.state is whole.state]


def test_a_part_does_not_disturb_the_whole():
    assert run_ranks(own_state_of_a_part, 2) == [["bf16", "no", 1, False]] * 2


# ---- timeouts ----


def timeouts(seconds: float | None) -> set[float]:
    handlers = [] if seconds is None else [InitProcessGroupKwargs(timeout=timedelta(seconds=seconds))]
    accelerator = Accelerator(kwargs_handlers=handlers)
    Accelerator(ranks=[0, 1]).wait_for_everyone()
    accelerator.wait_for_everyone()
    groups = torch_private.all_groups()
    assert len(groups) == 2
    return {time.total_seconds() for group in groups for time in torch_private.group_timeouts(group).values()}


@pytest.mark.parametrize(("asked", "found"), [(None, 1800.0), (7.0, 7.0), (5400.0, 5400.0)])
def test_every_group_waits_exactly_as_long_as_was_asked_for(asked: float | None, found: float):
    assert run_ranks(timeouts, 2, asked, initialise=False) == [{found}] * 2


def later_wish() -> list[float]:
    found = []
    for seconds in (50, 5):
        accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=seconds))])
        assert accelerator.world.timeout is not None
        found.append(accelerator.world.timeout.total_seconds())
    return found


def test_a_later_wish_holds_too():
    assert run_ranks(later_wish, 2) == [[50.0, 5.0]] * 2


def refused_backend() -> None:
    Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="mpi")])


def test_another_backend_is_refused():
    with pytest.raises(
        RankError, match="ValueError: backend='mpi' was asked for, but this process already communicates through 'gloo'"
    ):
        run_ranks(refused_backend, 2)


# ---- together and in turn ----


def in_turn() -> list[Any]:
    accelerator = Accelerator()
    found: list[Any] = []
    for first in (accelerator.main_process_first, accelerator.local_main_process_first):
        try:
            with first():
                if accelerator.is_main_process:
                    raise KeyError("only the first")
            found.append("released")
        except KeyError:
            found.append("raised")
    accelerator.wait_for_everyone()

    @accelerator.on_main_process
    def only_main() -> str:
        return "main"

    @accelerator.on_last_process
    def only_last() -> str:
        return "last"

    @accelerator.on_process(process_index=1)
    def only_second() -> str:
        return "second"

    @accelerator.on_local_process(local_process_index=0)
    def only_local() -> str:
        return "local"

    return [
        *found,
        only_main(),
        only_last(),
        only_second(),
        only_local(),
        accelerator.on_local_main_process(lambda: "local main")(),
    ]


def test_the_others_are_released_when_the_first_fails_and_decorators_choose():
    assert run_ranks(in_turn, 2) == [
        ["raised", "raised", "main", None, None, "local", "local main"],
        ["released", "released", None, "last", "second", None, None],
    ]


def test_decorators_without_a_function_are_explained():
    with pytest.raises(ValueError, match="`on_main_process` decorates a function"):
        Accelerator().on_main_process()


def flags() -> list[bool]:
    accelerator = Accelerator()
    found = [accelerator.check_trigger()]
    if accelerator.is_last_process:
        accelerator.set_trigger()
    return [*found, accelerator.check_trigger(), accelerator.check_trigger()]


@pytest.mark.parametrize("size", [1, 2])
def test_a_flag_that_one_raises_is_seen_by_all_once(size: int):
    assert run_ranks(flags, size) == [[False, True, False]] * size


def exchange() -> list[Any]:
    accelerator = Accelerator()
    rank = accelerator.process_index
    with accelerator.split_between_processes([1, 2, 3]) as mine:
        split = list(mine)
    padded = accelerator.pad_across_processes(torch.ones(1 + rank))
    return [
        accelerator.gather(torch.tensor([rank])).tolist(),
        accelerator.gather({"a": torch.tensor(rank)})["a"].tolist(),
        accelerator.gather_for_metrics([f"rank {rank}"], use_gather_object=True),
        accelerator.reduce(torch.tensor([1.0 + rank])).item(),
        accelerator.reduce(torch.tensor([1.0 + rank]), reduction="mean").item(),
        padded.tolist(),
        split,
    ]


def test_exchanges():
    same = [[0, 1], [0, 1], ["rank 0", "rank 1"], 3.0, 1.5]
    assert run_ranks(exchange, 2) == [[*same, [1.0, 0.0], [1, 2]], [*same, [1.0, 1.0], [3]]]


def say() -> None:
    Accelerator().print("once", end="!")


def test_printing_once_per_machine():
    assert run_ranks(say, 2).stdout == ["once!", ""]


# ---- the end ----


def end() -> list[Any]:
    accelerator = Accelerator()
    accelerator.end_training()
    accelerator.end_training()
    found: list[Any] = [dist.is_initialized(), accelerator.process_index]
    for use in (
        accelerator.wait_for_everyone,
        lambda: accelerator.gather(torch.ones(1)),
        lambda: accelerator.reduce(torch.ones(1)),
    ):
        try:
            use()
            found.append("worked")
        except RuntimeError as error:
            found.append("the process group was ended (by `end_training()`" in str(error))
    return found


def test_training_ends_once_and_what_comes_after_is_told_so():
    assert run_ranks(end, 2) == [[False, rank, True, True, True] for rank in range(2)]


def test_alone_ending_changes_nothing():
    accelerator = Accelerator()
    accelerator.end_training()
    accelerator.end_training()
    assert accelerator.gather(torch.ones(2)).tolist() == [1.0, 1.0]


# ---- whole jobs ----


def mpi(family: str) -> list[Any]:
    rank, size = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        del os.environ[name]
    names = {
        "MPI": (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        "SLURM": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    }[family]
    os.environ.update(zip(names, (rank, size, rank, size), strict=True))
    accelerator = Accelerator(cpu=True)
    found = [
        accelerator.distributed_type.value,
        accelerator.num_processes,
        accelerator.process_index,
        accelerator.local_process_index,
    ]
    total = accelerator.reduce(torch.tensor(1.0)).item()
    exported = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    CONTEXT.reset()
    return [*found, total, exported if size != "1" else None]


@pytest.mark.parametrize("family", ["MPI", "PMI", "SLURM"])
def test_jobs_that_others_start_are_joined(family: str):
    assert run_ranks(mpi, 2, family, initialise=False) == [
        ["MULTI_CPU", 2, rank, rank, 2.0, [str(rank), "2", str(rank)]] for rank in range(2)
    ]
    assert run_ranks(mpi, 1, family, initialise=False) == [["NO", 1, 0, 0, 1.0, None]]


SCRIPT = """
import torch
from hasten import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(2, 1)
optimizer, loader = torch.optim.SGD(model.parameters(), 0.1), torch.utils.data.DataLoader(torch.ones(8, 2), 2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()
total = accelerator.reduce(torch.tensor(accelerator.process_index + 1)).item()
accelerator.print(accelerator.distributed_type.value, accelerator.num_processes, len(loader), total)
{end}
"""


@pytest.mark.parametrize(
    "end", ["", "accelerator.end_training(); accelerator.end_training()"], ids=["silent", "end_training"]
)
def test_a_script_ends_without_a_word(tmp_path: Path, end: str):
    (tmp_path / "script.py").write_text(SCRIPT.format(end=end))
    command = [sys.executable, "-W", "error", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("NO 1 4 1\n", "", 0)


def test_torchrun_without_an_accelerator_starts_one_job_that_ends_without_a_word(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT.format(end=""))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", "script.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, env=environment)
    assert (done.stdout, done.stderr, done.returncode) == ("MULTI_CPU 2 2 3\n", "", 0)


def on_a_device(device: str) -> list[float]:
    if device != "cpu":
        install(device)
    accelerator = Accelerator(cpu=device == "cpu")
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    losses = []
    for batch in loader:
        assert batch[0].device.type == device
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.free_memory()
    return losses


def test_an_accelerator_computes_what_the_cpu_computes():
    env = {"RANK": None, "WORLD_SIZE": None}
    (cpu,) = run_ranks(on_a_device, 1, "cpu", fresh=True, initialise=False, env=env)
    (npu,) = run_ranks(on_a_device, 1, "npu", fresh=True, initialise=False, env=env)
    assert npu == pytest.approx(cpu, rel=1e-6)

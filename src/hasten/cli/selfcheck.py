"""What `hasten test` runs on every process of a job: small computations whose right answers are known."""

from __future__ import annotations

import json
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from hasten.accelerator import Accelerator

OK, FAILED, SKIPPED, BEGUN = "ok", "failed", "skipped", "begun"
COLLECTIVE_LIMIT = 60  # seconds that a process waits for another one
OTHERS_LIMIT = 15.0  # seconds that a process which failed waits for the others to come to the end of the same check
# How far weights may be from those of a plain loop in float32.
_TOLERANCES = {"no": 1e-5, "bf16": 2e-2, "fp16": 5e-3}


class SkipError(Exception):
    """A check that cannot run here; the text says why."""


class Job:
    """One process of the job, and its diary: a line of JSON for each step, from which `hasten test` makes its report.

    Use it as a context.
    """

    def __init__(self, folder: Path, shared: Path | None) -> None:
        from hasten.settings.place import read_place

        self.place = read_place()
        self.shared = shared
        self._folder = folder
        self._diary = open(diary(folder, self.place.rank), "w", encoding="utf-8")  # noqa: SIM115 - closed in __exit__

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self._diary.close()

    def note(self, **entry: Any) -> None:
        """Write a line into the diary at once."""
        self._diary.write(json.dumps(entry) + "\n")
        self._diary.flush()

    def accelerator(self, sharded: bool = False) -> Accelerator:
        """An Accelerator with the settings of the job, but replicated or sharded as asked, and without accumulation."""
        from hasten.accelerator import Accelerator
        from hasten.settings.export import exported
        from hasten.settings.handlers import GradScalerKwargs
        from hasten.state.accelerator import AcceleratorState
        from hasten.training.accumulation import GradientState

        AcceleratorState._reset_state()
        GradientState._reset_state()
        plugin = None
        if sharded:
            from torch import nn

            from hasten.parallel.fsdp import FullyShardedDataParallelPlugin

            plugin = FullyShardedDataParallelPlugin(auto_wrap_policy=lambda module: isinstance(module, nn.Linear))
        scaler = GradScalerKwargs(init_scale=256.0)  # no step of so few is skipped while it finds its scale
        with exported({"ACCELERATE_USE_FSDP": None, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": None}):
            return Accelerator(fsdp_plugin=plugin, kwargs_handlers=[scaler])

    def others_come(self, check: str) -> bool:
        """Whether every process of this machine reaches the end of the check that this one has failed."""
        first = self.place.rank - self.place.local_rank
        ranks = range(first, first + self.place.local_world_size)
        deadline = time.monotonic() + OTHERS_LIMIT
        while time.monotonic() < deadline:
            ends = [state_of(read_diary(self._folder, rank), check) for rank in ranks]
            if all(state in (OK, FAILED, SKIPPED) for state in ends):
                return True
            time.sleep(0.1)
        return False


class Check(NamedTuple):
    """A check, and what to do if it fails."""

    name: str
    run: Callable[[Job], str]
    advice: str


def diary(folder: Path, rank: int) -> Path:
    """The file of a process's diary."""
    return folder / f"rank-{rank}.jsonl"


def read_diary(folder: Path, rank: int) -> list[dict[str, Any]]:
    """The whole lines of a diary; none if there is no file."""
    try:
        text = diary(folder, rank).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.split("\n")[:-1]]


def state_of(entries: list[dict[str, Any]], check: str) -> str | None:
    """The last state of a check in a diary; None if it was not begun."""
    return next((entry["state"] for entry in reversed(entries) if entry.get("check") == check), None)


def expect(what: str, found: Any, right: Any) -> None:
    """Raise if two values differ."""
    if found != right:
        raise AssertionError(f"{what}: got {found}, the right answer is {right}")


# -- the checks: each raises if something is wrong, and returns a few words on what it has shown -------------------------


def _processes(job: Job) -> str:
    import datetime

    import torch

    from hasten.settings.handlers import InitProcessGroupKwargs
    from hasten.state.partial import PartialState

    limit = InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=COLLECTIVE_LIMIT))
    PartialState(timeout=limit.timeout)
    accelerator = job.accelerator()
    expect("number of processes", accelerator.num_processes, job.place.world_size)
    expect("rank", accelerator.process_index, job.place.rank)
    device = accelerator.device
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else "none"
    job.note(device=str(device), backend=backend, precision=accelerator.mixed_precision)
    matrix = torch.arange(6.0).reshape(2, 3).to(device)
    expect(f"a product of matrices on {device}", (matrix @ matrix.T).cpu().tolist(), [[5.0, 14.0], [14.0, 50.0]])
    accelerator.wait_for_everyone()
    return f"{accelerator.num_processes} met, {backend}"


def _collectives(job: Job) -> str:
    import torch

    from hasten.collectives.broadcast import broadcast
    from hasten.collectives.objects import broadcast_object_list, gather_object

    accelerator = job.accelerator()
    rank, size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    ranks = list(range(size))
    mine = {"a": torch.tensor([rank], device=device), "b": [torch.full((1, 2), float(rank), device=device)]}
    gathered = accelerator.gather(mine)
    expect("gather", gathered["a"].tolist(), ranks)
    expect("gather of a list", gathered["b"][0].tolist(), [[float(each)] * 2 for each in ranks])
    expect("sum", accelerator.reduce(torch.tensor([rank + 1.0], device=device)).tolist(), [size * (size + 1) / 2])
    mean = accelerator.reduce(torch.tensor([float(rank)], device=device), reduction="mean")
    expect("mean", mean.tolist(), [(size - 1) / 2])
    expect("broadcast", broadcast(torch.tensor([rank + 7], device=device)).tolist(), [7])
    ragged = accelerator.pad_across_processes(torch.ones(rank + 1, device=device))
    expect("padding", ragged.tolist(), [1.0] * (rank + 1) + [0.0] * (size - rank - 1))
    expect("gather of objects", gather_object([f"rank {rank}"]), [f"rank {each}" for each in ranks])
    expect("broadcast of objects", broadcast_object_list([rank, "x"]), [0, "x"])
    return "gather, reduce, broadcast, pad, objects"


def _data(job: Job) -> str:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = job.accelerator()
    count = 8 * accelerator.num_processes + 3  # the last batch is uneven
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(count)), batch_size=4, shuffle=True))
    for epoch in range(2):
        seen = torch.cat([accelerator.gather_for_metrics(batch) for (batch,) in loader]).tolist()
        expect(f"samples of epoch {epoch}", sorted(seen), list(range(count)))
    return f"{count} samples, each once per epoch"


def _ddp(job: Job) -> str:
    return _train(job, sharded=False)


def _fsdp(job: Job) -> str:
    return _train(job, sharded=True)


def _model() -> torch.nn.Module:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def _train(job: Job, sharded: bool) -> str:
    """Three steps on this process's share of each batch, and three of a plain loop on the whole of it."""
    import torch
    from torch.nn.functional import mse_loss

    plain = _model()
    accelerator = job.accelerator(sharded)
    model = _model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    batches = torch.randn(3, 4 * accelerator.num_processes, 12, generator=torch.Generator().manual_seed(1))
    share = slice(4 * accelerator.process_index, 4 * accelerator.process_index + 4)
    for batch in batches:
        mine = batch[share].to(accelerator.device)
        accelerator.backward(mse_loss(model(mine[:, :8]).float(), mine[:, 8:]))
        optimizer.step()
        optimizer.zero_grad()
        mse_loss(plain(batch[:, :8]), batch[:, 8:]).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    limit = _TOLERANCES[accelerator.mixed_precision]
    found, right = accelerator.get_state_dict(model), plain.state_dict()
    furthest = max((float((found[name].cpu().float() - right[name]).abs().max()) for name in found), default=0.0)
    if not furthest <= limit:  # nan, too
        raise AssertionError(
            f"the weights differ by {furthest:.2g} from those of a plain loop; at most {limit:g} is expected"
        )
    return f"as a plain loop, to {limit:g}"


def _checkpoint(job: Job) -> str:
    import torch

    from hasten.settings import environment

    if job.shared is None:
        raise SkipError("several machines: name a folder that all of them see with --shared_folder")
    accelerator = job.accelerator(sharded=bool(environment.get("use_fsdp")))
    model = _model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    batch = torch.ones(4, 8, device=accelerator.device)

    def step() -> None:
        accelerator.backward(model(batch).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()

    def weights() -> dict[str, Any]:
        return {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}

    step()
    folder = job.shared / "hasten-test-checkpoint"
    accelerator.save_state(str(folder))
    before, drawn = weights(), torch.rand(3).tolist()
    step()
    after = weights()
    accelerator.load_state(str(folder))
    loaded = weights()
    expect("loaded weights that differ", [name for name in before if not torch.equal(loaded[name], before[name])], [])
    expect("random numbers after loading", torch.rand(3).tolist(), drawn)
    step()
    again = weights()
    expect("weights after one more step that differ", [n for n in after if not torch.equal(again[n], after[n])], [])
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder)
    return "saved, loaded, and gone on alike"


_NETWORK = (
    "check that the processes reach each other: main_process_ip and main_process_port, firewalls between the machines, and for "
    "NCCL `NCCL_DEBUG=INFO` and the right NCCL_SOCKET_IFNAME"
)
CHECKS = (
    Check(
        "processes", _processes,
        "`hasten env` shows which devices are found; give fewer processes or other gpu_ids, or --cpu to try without "
        f"accelerators. If processes wait for each other, {_NETWORK}",
    ),
    Check("collectives", _collectives, f"{_NETWORK}; try --cpu, which uses gloo, to tell the network from the devices"),
    Check("data", _data, "if collectives work, this is a fault of hasten: please report it with the output of `hasten env`"),
    Check(
        "training (DDP)", _ddp,
        "if it is only too inexact, try mixed_precision no; else look for settings of compilation or precision in the "
        "configuration file",
    ),
    Check(
        "training (FSDP)", _fsdp,
        "if you use FSDP, check the settings fsdp_* of the configuration file (docs/sharding.md); else this need not concern you",
    ),
    Check("checkpoint", _checkpoint, "check that all processes may write to the folder, and that the disk has room"),
)  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run the checks of one process; the arguments are the folder of the diaries, and one that all machines share, if any."""
    import torch

    torch.set_num_threads(1)
    shared = Path(arguments[1]) if len(arguments) > 1 else None
    with Job(Path(arguments[0]), shared) as job:
        failures = 0
        for check in CHECKS:
            state = _run(job, check)
            failures += state == FAILED
            if state == FAILED and not job.others_come(check.name):
                return 1  # some wait for this one: the launcher ends them
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 1 if failures else 0


def _run(job: Job, check: Check) -> str:
    started = time.monotonic()
    job.note(check=check.name, state=BEGUN)
    state, text, trace = OK, "", ""
    try:
        text = check.run(job)
    except SkipError as error:
        state, text = SKIPPED, str(error)
    except Exception as error:
        state, text, trace = FAILED, f"{type(error).__name__}: {error}", "".join(_own_lines(error))
        traceback.print_exc()
    job.note(check=check.name, state=state, text=text, trace=trace, seconds=time.monotonic() - started)
    return state


def _own_lines(error: Exception) -> Iterator[str]:
    """Where in hasten or torch the error came from, innermost last."""
    for frame in traceback.extract_tb(error.__traceback__)[-3:]:
        yield f"{frame.filename}:{frame.lineno} in {frame.name}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""save_state until it is durable over writing and syncing the same bytes; load_state over reading them.

Whole models on one process; sharded models (FSDP2, SHARDED_STATE_DICT) on 2 and 4 gloo ranks, each of which would write or read
its share of the bytes.
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import RAW, Benchmark, Figure, Part, Wrong, main, take_turns

WIDTH, LAYERS = 2048, 8  # 134 MB of parameters, 403 MB with AdamW's two moments
TURNS = 3


def _sync(place: Path) -> None:
    """fsync every file and folder below `place`."""
    for path in [place, *place.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Plain:
    """The same bytes in one file: written and synced, read into memory that exists already."""

    def __init__(self, tensors: list[Any], folder: Path) -> None:
        self._arrays = [tensor.view(-1).numpy() for tensor in tensors]
        self._buffers = [array.copy() for array in self._arrays]
        self._folder = folder

    def save(self) -> None:
        self._folder.mkdir(exist_ok=True)
        with (self._folder / "bytes").open("wb", buffering=0) as file:
            for array in self._arrays:
                file.write(array.data)
        _sync(self._folder)

    def load(self) -> None:
        with (self._folder / "bytes").open("rb", buffering=0) as file:
            for buffer in self._buffers:
                if file.readinto(buffer.data) != buffer.nbytes:
                    raise OSError(f"{self._folder}: short read")


class Whole:
    """A model and its optimizer after one step, whole on each process, or for the library "raw" just these."""

    def __init__(self, library: str) -> None:
        torch.manual_seed(0)
        self._model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        self._bare = torch.optim.AdamW(self._model.parameters())
        self.accelerator: Any = None
        optimizer: Any = self._bare
        if library != RAW:
            self.accelerator = importlib.import_module(library).Accelerator(cpu=True)
            _, optimizer = self.accelerator.prepare(self._model, self._bare)
        for parameter in self._model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        """As they are now: loading may put new tensors in the place of the optimizer's."""
        parameters = list(self._model.parameters())
        moments = [self._bare.state[each][name] for each in parameters for name in ("exp_avg", "exp_avg_sq")]
        return [tensor.detach() for tensor in (*parameters, *moments)]


def measure(library: str) -> dict[str, float]:
    whole = Whole(library)
    accelerator, state = whole.accelerator, whole.tensors
    tensors = state()
    expected = [tensor.clone() for tensor in tensors]
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_DISK")) as place:
        plain, folder = Plain(tensors, Path(place) / "plain"), Path(place) / "state"

        def save() -> None:
            if accelerator is None:
                return plain.save()
            accelerator.save_state(str(folder))
            return _sync(folder)

        def load() -> None:
            if accelerator is None:
                return plain.load()
            return accelerator.load_state(str(folder))

        def remove() -> None:
            for each in Path(place).iterdir():
                shutil.rmtree(each)

        saving = take_turns(plain.save, save, TURNS, before=remove)
        remove()
        plain.save()
        save()
        for tensor in tensors:
            tensor.zero_()
        loading = take_turns(plain.load, load, TURNS)
        if accelerator is not None and not all(map(torch.equal, expected, state())):
            raise Wrong("load_state did not bring back what save_state saved")
        size = sum(tensor.nbytes for tensor in expected)
        written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if accelerator else size
    return {
        "save_ratio": saving.ratio,
        "save_s": saving.library_s,
        "save_ideal_s": saving.ideal_s,
        "load_ratio": loading.ratio,
        "load_s": loading.library_s,
        "load_ideal_s": loading.ideal_s,
        "bytes_ratio": written / size,
    }


class Divided:
    """A sharded model and its optimizer after one step, or for the library "raw" tensors of the same size."""

    def __init__(self, library: str, place: Path) -> None:
        torch.manual_seed(0)
        self.folder = place / "state"
        self.accelerator: Any = None
        if library == RAW:
            self._raw = [torch.randn(LAYERS * WIDTH // dist.get_world_size(), WIDTH) for _ in range(3)]
            return
        module = importlib.import_module(library)
        plugin = module.FullyShardedDataParallelPlugin(
            fsdp_version=2,
            state_dict_type="SHARDED_STATE_DICT",
            auto_wrap_policy="size_based_wrap",
            min_num_params=WIDTH,
        )
        self.accelerator = module.Accelerator(cpu=True, fsdp_plugin=plugin)
        model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        self._bare = torch.optim.AdamW(model.parameters())
        self._model, optimizer = self.accelerator.prepare(model, self._bare)
        for parameter in self._model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        """What this rank holds."""
        if self.accelerator is None:
            return self._raw
        parameters: list[Any] = list(self._model.parameters())
        moments = [self._bare.state[each][name] for each in parameters for name in ("exp_avg", "exp_avg_sq")]
        return [tensor.to_local().detach() for tensor in (*parameters, *moments)]

    def save(self) -> None:
        self.accelerator.save_state(str(self.folder))

    def load(self) -> None:
        self.accelerator.load_state(str(self.folder))

    def busiest(self) -> float:
        """Bytes that the busiest rank has written over its share of the state."""
        share = sum(tensor.nbytes for tensor in self.tensors())
        if self.accelerator is None:
            return 1.0
        ranks = range(dist.get_world_size())
        return (
            max(sum(path.stat().st_size for path in self.folder.rglob(f"__{rank}_*.distcp")) for rank in ranks) / share
        )


def _shared_place() -> Path:
    """A folder that all ranks know."""
    told: list[Any] = [tempfile.mkdtemp(dir=os.environ.get("BENCHMARK_DISK")) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    return Path(told[0])


def sharded(library: str) -> dict[str, float]:
    """Times on 2 ranks, until all of them are done."""
    state = Divided(library, Path())
    place = _shared_place()
    state.folder = place / "state"
    plain = Plain(state.tensors(), place / f"plain{dist.get_rank()}")
    expected = [tensor.clone() for tensor in state.tensors()]

    def together(run: Any) -> Any:
        def call() -> None:
            run()
            dist.barrier()

        return call

    def remove() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            for each in place.iterdir():
                shutil.rmtree(each)
        dist.barrier()

    try:
        save, load = (plain.save, plain.load) if state.accelerator is None else (state.save, state.load)
        saving = take_turns(together(plain.save), together(save), TURNS, before=remove)
        remove()
        plain.save()
        save()
        busiest = state.busiest()
        for tensor in state.tensors():
            tensor.zero_()
        loading = take_turns(together(plain.load), together(load), TURNS, before=dist.barrier)
        if state.accelerator is not None and not all(map(torch.equal, expected, state.tensors())):
            raise Wrong("load_state did not bring back what save_state saved")
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(place)
    return {"sharded_save": saving.ratio, "sharded_load": loading.ratio, "busiest_2": busiest}


class Copies:
    """Saves in the background, and copies of the same tensors in memory."""

    def __init__(self, accelerator: Any, tensors: list[torch.Tensor], folder: Path) -> None:
        self._accelerator, self._tensors, self._folder = accelerator, tensors, folder
        self._kept: Any = None

    def copy(self) -> None:
        self._kept = [tensor.clone() for tensor in self._tensors]

    def begin(self) -> None:
        if self._accelerator is None:
            self.copy()
        else:
            self._kept = self._accelerator.save_state(str(self._folder), blocking=False)

    def settle(self) -> None:
        """Wait for what is under way, outside of what is measured."""
        if hasattr(self._kept, "result"):
            self._kept.result()
        self._kept = None
        if dist.is_initialized():
            dist.barrier()


def background(library: str) -> dict[str, float]:
    """How long save_state(blocking=False) blocks, over copying the tensors in memory; 1 process, whole models."""
    whole = Whole(library)
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_DISK")) as place:
        copies = Copies(whole.accelerator, whole.tensors(), Path(place) / "state")
        turns = take_turns(copies.copy, copies.begin, TURNS, before=copies.settle)
        copies.settle()
    return {"blocked": turns.ratio, "blocked_s": turns.library_s}


def background2(library: str) -> dict[str, float]:
    """The same on 2 ranks, sharded."""
    state = Divided(library, Path())
    place = _shared_place()
    try:
        copies = Copies(state.accelerator, state.tensors(), place / "state")
        turns = take_turns(copies.copy, copies.begin, TURNS, before=copies.settle)
        copies.settle()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(place)
    return {"blocked_2": turns.ratio}


def sharded4(library: str) -> dict[str, float]:
    """Bytes on 4 ranks."""
    state = Divided(library, Path())
    place = _shared_place()
    state.folder = place / "state"
    try:
        if state.accelerator is not None:
            state.save()
        return {"busiest_4": state.busiest()}
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(place)


def _written() -> int:
    """Bytes that this process has written so far, to whatever file."""
    line = next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("wchar"))
    return int(line.split()[1])


def replicated(library: str) -> dict[str, float]:
    """Time on 2 ranks until both are done, over one process that writes and syncs the same bytes."""
    state = Whole(library)
    place = _shared_place()
    plain = Plain(state.tensors(), place / "plain")

    def ideal() -> None:
        if dist.get_rank() == 0:
            plain.save()
        dist.barrier()

    def save() -> None:
        if state.accelerator is None:
            return ideal()
        state.accelerator.save_state(str(place / "state"))
        return dist.barrier()

    def remove() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            for each in place.iterdir():
                shutil.rmtree(each)
        dist.barrier()

    try:
        saving = take_turns(ideal, save, TURNS, before=remove)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(place)
    return {"replicated_save": saving.ratio, "replicated_save_s": saving.library_s}


def replicated4(library: str) -> dict[str, float]:
    """Bytes on 4 ranks."""
    state = Whole(library)
    place = _shared_place()
    try:
        before = _written()
        if state.accelerator is not None:
            state.accelerator.save_state(str(place / "state"))
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, torch.tensor([_written() - before]))
        share = sum(tensor.nbytes for tensor in state.tensors()) / dist.get_world_size()
        return {"busiest_ddp": 1.0 if state.accelerator is None else max(count.item() for count in counts) / share}
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(place)


BENCHMARK = Benchmark(
    "benchmarks.checkpoint",
    "Checkpoint of an AdamW state of 0.403 GB",
    [
        Figure("save_state to durable over write + fsync", "save_ratio", 1.1),
        Figure("save_state to durable, s", "save_s"),
        Figure("write + fsync, s", "save_ideal_s"),
        Figure("load_state over reading", "load_ratio", 1.2),
        Figure("load_state, s", "load_s"),
        Figure("reading, s", "load_ideal_s"),
        Figure("bytes on disk over bytes of state", "bytes_ratio", 1.01, 3),
        Figure("sharded, 2 ranks: save_state to durable over write + fsync of the shares", "sharded_save", 1.1),
        Figure("sharded, 2 ranks: load_state over reading the shares", "sharded_load", 1.2),
        Figure("sharded, 2 ranks: bytes of the busiest rank over its share", "busiest_2", 1.05, 3),
        Figure("sharded, 4 ranks: bytes of the busiest rank over its share", "busiest_4", 1.05, 3),
        Figure("replicated, 2 ranks: save_state to durable over one process's write + fsync", "replicated_save", 1.1),
        Figure("replicated, 2 ranks: save_state to durable, s", "replicated_save_s"),
        Figure("replicated, 4 ranks: bytes of the busiest rank over its share", "busiest_ddp", 1.05, 3),
        Figure("save_state(blocking=False) until it returns over copying in memory", "blocked", 1.2),
        Figure("save_state(blocking=False) until it returns, s", "blocked_s", None, 3),
        Figure(
            "sharded, 2 ranks: save_state(blocking=False) until it returns over copying the shares", "blocked_2", 1.2
        ),
    ],
    [
        Part("checkpoint", measure),
        Part("sharded", sharded, ranks=2),
        Part("sharded4", sharded4, ranks=4),
        Part("replicated", replicated, ranks=2),
        Part("replicated4", replicated4, ranks=4),
        Part("background", background),
        Part("background2", background2, ranks=2),
    ],
)

if __name__ == "__main__":
    main(BENCHMARK)

"""save_state until it is durable over writing and syncing the same bytes; load_state over reading them."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

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


def measure(library: str) -> dict[str, float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters())
    bare = optimizer
    accelerator = None
    if library != RAW:
        accelerator = importlib.import_module(library).Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()

    def state() -> list[torch.Tensor]:
        """Loading may put new tensors in the place of the optimizer's."""
        parameters = list(model.parameters())
        moments = [bare.state[each][name] for each in parameters for name in ("exp_avg", "exp_avg_sq")]
        return [tensor.detach() for tensor in (*parameters, *moments)]

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
    ],
    [Part("checkpoint", measure)],
)

if __name__ == "__main__":
    main(BENCHMARK)

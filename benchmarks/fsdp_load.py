"""Loading 2 GB of weights into a sharded model on 2 ranks: memory of a rank, and time over reading its half of the bytes."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.measure import RAW, Benchmark, Figure, Part, Wrong, main, take_turns

RANKS = 2
LAYERS, WIDTH, FILES = 30, 4096, 4  # matrices of 67 MB
BYTES = LAYERS * WIDTH * WIDTH * 4
LARGEST = WIDTH * WIDTH * 4
TURNS = 3
BLOCK = 64 << 20

_WRITE = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
folder, layers, width, files = Path(sys.argv[1]), *map(int, sys.argv[2:])
weight_map = {}
for number in range(files):
    own = range(number * layers // files, (number + 1) * layers // files)
    save_file({f"{i}.weight": torch.full((width, width), float(i)) for i in own}, folder / f"{number}.safetensors")
    weight_map |= {f"{i}.weight": f"{number}.safetensors" for i in own}
(folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
"""


def _layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def _empty() -> nn.Sequential:
    with torch.device("meta"):
        return _layers()


def _accelerator(**settings: Any) -> Any:
    from hasten import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Linear"], **settings)
    return Accelerator(cpu=True, fsdp_plugin=plugin)


def _read_half(folder: Path) -> Callable[[], None]:
    """Read this rank's half of the bytes of each file into new memory."""
    rank = dist.get_rank()

    def read() -> None:
        for path in sorted(folder.glob("*.safetensors")):
            half = path.stat().st_size // 2
            target = torch.empty(half, dtype=torch.uint8)
            view = memoryview(target.numpy())
            with open(path, "rb", buffering=0) as file:
                file.seek(rank * half)
                while len(view):
                    view = view[file.readinto(view) :]  # type: ignore[attr-defined]
            kept.append(target)

    kept: list[torch.Tensor] = []

    def run() -> None:
        kept.clear()
        read()

    return run


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class _Folder:
    """The weights in a folder of their own, the same on both ranks."""

    def __enter__(self) -> Path:
        self.path = (
            Path(os.environ.get("BENCHMARK_DISK", tempfile.gettempdir())) / f"weights{os.environ['MASTER_PORT']}"
        )
        if dist.get_rank() == 0:
            self.path.mkdir()
            numbers = [str(number) for number in (LAYERS, WIDTH, FILES)]
            subprocess.run([sys.executable, "-c", _WRITE, str(self.path), *numbers], check=True)
        dist.barrier()
        return self.path

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.path)


def _check(model: Any) -> None:
    for index, layer in enumerate(model):
        if not bool((layer.weight.to_local() == index).all()):
            raise Wrong(f"layer {index} has other values")


def files(library: str) -> dict[str, float]:
    """Each rank reads its own part."""
    if library == RAW:
        with _Folder() as folder:
            turns = take_turns(_read_half(folder), _read_half(folder), TURNS, before=dist.barrier)
        return {"files_ratio": turns.ratio}
    if library != "hasten":
        return {}
    accelerator = _accelerator()
    with _Folder() as folder:
        model = accelerator.prepare(_empty())
        before = psutil.Process().memory_info().rss
        accelerator.load_weights(model, folder)
        grown = _peak() - before
        _check(model)
        models: list[Any] = []

        def prepare() -> None:
            models.clear()
            accelerator.free_memory()
            gc.collect()
            models[:] = [accelerator.prepare(_empty())]
            dist.barrier()

        turns = take_turns(
            _read_half(folder), lambda: accelerator.load_weights(models[0], folder), TURNS, before=prepare
        )
    return {
        "files_ratio": turns.ratio,
        "files_s": turns.library_s,
        "files_peak": grown / (BYTES / RANKS + 2 * LARGEST),
        "files_peak_mb": grown / 1e6,
    }


def first(library: str) -> dict[str, float]:
    """Rank 0 has the values, the other one gets its part of them."""
    if library != "hasten":
        return {}
    accelerator = _accelerator(cpu_ram_efficient_loading=True)
    model: nn.Module = _layers() if accelerator.is_main_process else _empty()
    dist.barrier()
    before = psutil.Process().memory_info().rss
    accelerator.prepare(model)
    grown = torch.tensor([_peak() - before])
    dist.broadcast(grown, RANKS - 1)
    return {"first_peak": grown.item() / (BYTES / RANKS + 2 * LARGEST), "first_peak_mb": grown.item() / 1e6}


BENCHMARK = Benchmark(
    "benchmarks.fsdp_load",
    "Loading 2 GB of weights into shards on 2 ranks",
    [
        Figure("from files: time over reading the bytes", "files_ratio", 1.1),
        Figure("from files: seconds", "files_s"),
        Figure("from files: peak memory of a rank over its shards and the two largest tensors", "files_peak", 1.0),
        Figure("from files: MB", "files_peak_mb", digits=0),
        Figure(
            "from rank 0: peak memory of the other rank over its shards and the two largest tensors", "first_peak", 1.0
        ),
        Figure("from rank 0: MB of the other rank", "first_peak_mb", digits=0),
    ],
    [Part("files", files, RANKS), Part("first", first, RANKS)],
)

if __name__ == "__main__":
    main(BENCHMARK)

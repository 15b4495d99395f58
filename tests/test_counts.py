"""The figures that are counts: modules, Python calls, operations, host syncs, collectives. They have no noise, so they are tests.

COUNTS_LIBRARY=accelerate, where that is installed, shows that the library it names does not hold them.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.counts import LiveBytes, Operations, count_calls
from benchmarks.launch import command
from benchmarks.loops import BATCH, prepared_loop, raw_loop, same_weights

from tests.ranks import run_ranks

LIBRARY = os.environ.get("COUNTS_LIBRARY", "hasten")
BATCHES = 21  # no multiple of 4: the last window of accumulation is short
RANDOM_STATE = 16384  # bytes; a loader keeps the random states that its epoch began with, so as to be resumable
READY = """
import json, sys
import torch
before = set(sys.modules)
import {library}
{library}.Accelerator(cpu=True)
print(json.dumps(sorted(set(sys.modules) - before)))
"""
NO_TORCH = (
    "import os\nopen(os.environ['TORCH_WAS_IMPORTED'], 'w').close()\nraise ImportError('torch must not be imported')\n"
)


def test_import_and_accelerator_add_at_most_30_modules():
    code = READY.format(library=LIBRARY)
    modules = json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)
    assert len(modules) <= 30, modules


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
def test_prepared_loop_adds_few_calls_and_no_operation_nor_host_sync(accumulation: int, bf16: bool):
    prepared, raw = prepared_loop(LIBRARY, BATCHES, accumulation, bf16), raw_loop(BATCHES, accumulation, bf16)
    for loop in (prepared, raw):
        loop.epoch()
    calls = count_calls(prepared.epoch).python - count_calls(raw.epoch).python
    with Operations() as own:
        prepared.epoch()
    with Operations() as ideal:
        raw.epoch()
    assert same_weights(prepared.model, raw.model)
    assert own.names == ideal.names
    assert own.syncs == ideal.syncs
    assert calls / BATCHES <= 60


@pytest.mark.parametrize("width", [16, 1024])
def test_prepared_loop_holds_no_more_tensor_bytes_than_the_loop_by_hand_whatever_the_model(width: int):
    peaks = []
    for name in ("raw", LIBRARY):
        with LiveBytes() as bytes_:
            prepared_loop(name, BATCHES, width=width, adam=True).epoch()
        peaks.append(bytes_.peak)
    batch = BATCH * (16 + 1) * 4  # the loader reads one batch ahead, to know the last one
    assert peaks[1] - peaks[0] <= batch + RANDOM_STATE


def launch_arguments(processes: int) -> list[str]:
    if processes == 1:
        return ["--cpu", "--num_processes", "1"]
    return ["--cpu" if LIBRARY == "hasten" else "--multi_gpu", "--num_processes", str(processes)]


@pytest.mark.parametrize(
    "arguments", [["--help"], launch_arguments(1), launch_arguments(2)], ids=["help", "one", "two"]
)
def test_launcher_never_imports_torch(arguments: list[str], tmp_path: Path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(NO_TORCH)
    script, imported = tmp_path / "script.py", tmp_path / "imported"
    script.write_text("import os, sys\nopen(sys.argv[1] + os.environ.get('RANK', '0'), 'w').close()\n")
    if arguments != ["--help"]:
        arguments = [*arguments, str(script), str(tmp_path / "rank")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TORCH_WAS_IMPORTED": str(imported)}
    done = subprocess.run(
        [command(LIBRARY), "launch", *arguments], env=environment, capture_output=True, text=True, timeout=60
    )
    assert not imported.exists()
    assert done.returncode == 0, done.stderr
    ranks = sorted(path.name for path in tmp_path.glob("rank*"))
    assert ranks == [f"rank{rank}" for rank in range(0 if arguments == ["--help"] else int(arguments[2]))]


def count_collectives(library: str) -> dict[str, int]:
    from benchmarks.collectives import cases, count, operations, same

    own = operations(library)
    counts = {}
    for name, (by_hand, data, _) in cases().items():
        assert same(own[name](data), by_hand(data)), name
        counts[name] = count(own[name], data)
    return counts


def test_collectives_of_twenty_tensors_are_at_most_two():
    for counts in run_ranks(count_collectives, 2, LIBRARY):
        assert set(counts) >= {"gather", "gather_for_metrics", "reduce", "broadcast", "pad"}
        assert all(count <= 2 for count in counts.values()), counts


def count_ddp_collectives(library: str, accumulation: int) -> int:
    loop = prepared_loop(library, 2 * BATCHES, accumulation, ddp=True)
    loop.epoch()
    with Operations() as operations:
        loop.epoch()
    return operations.collectives


@pytest.mark.parametrize("accumulation", [1, 4])
def test_ddp_loop_adds_no_collective_per_step(accumulation: int):
    by_hand = run_ranks(count_ddp_collectives, 2, "raw", accumulation)
    assert run_ranks(count_ddp_collectives, 2, LIBRARY, accumulation) == by_hand


def test_clipping_adds_no_operation():
    import torch

    accelerator: Any = importlib.import_module(LIBRARY).Accelerator(cpu=True)
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(200)]
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    with Operations() as ideal:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
    with Operations() as own:
        accelerator.clip_grad_norm_(parameters, 1.0)
    assert own.names == ideal.names

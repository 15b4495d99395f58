"""Checkpoints go back and forth between hasten and accelerate 1.15.0."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
SCRIPT = Path(__file__).with_name("exchanged.py")


def run(library: str, mode: str, folder: Path, kind: str, ranks: int) -> dict[str, Any]:
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    done = subprocess.run(
        [*command, str(SCRIPT), library, mode, str(folder), kind],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """How accelerate goes on from what it has saved itself: on several processes its loaders begin in another order."""
    known: dict[Any, dict[str, Any]] = {}

    def of(kind: str, ranks: int) -> dict[str, Any]:
        if (kind, ranks) not in known:
            folder = tmp_path_factory.mktemp("own") / "ck"
            run("accelerate", "save", folder, kind, ranks)
            known[kind, ranks] = run("accelerate", "load", folder, kind, ranks)
        return known[kind, ranks]

    return of


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize(("writer", "reader"), [("hasten", "accelerate"), ("accelerate", "hasten")])
def test_a_run_goes_on_in_the_other_library(
    writer: str, reader: str, kind: str, ranks: int, own: Any, tmp_path: Path
) -> None:
    saved = run(writer, "save", tmp_path / "ck", kind, ranks)
    loaded = run(reader, "load", tmp_path / "ck", kind, ranks)
    assert loaded["losses"] == pytest.approx(own(kind, ranks)["losses"], abs=1e-6)
    assert loaded["steps"] == saved["steps"]
    assert loaded["rate"] == saved["rate"]
    if ranks == 1:
        assert loaded["losses"] == pytest.approx(saved["losses"], abs=1e-6)


def test_files_that_two_processes_write_together_are_read_by_accelerate(own: Any, tmp_path: Path) -> None:
    run("hasten", "save", tmp_path / "ck", "shared", 2)
    loaded = run("accelerate", "load", tmp_path / "ck", "safetensors", 2)
    assert loaded["losses"] == pytest.approx(own("safetensors", 2)["losses"], abs=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_in_the_background_is_read_by_accelerate(ranks: int, own: Any, tmp_path: Path) -> None:
    run("hasten", "save", tmp_path / "ck", "background", ranks)
    loaded = run("accelerate", "load", tmp_path / "ck", "safetensors", ranks)
    assert loaded["losses"] == pytest.approx(own("safetensors", ranks)["losses"], abs=1e-6)

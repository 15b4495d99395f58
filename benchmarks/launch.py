"""Starting a script that does not import torch: one process over python, two over torchrun, and the help text."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import RAW, Benchmark, Figure, Part, Wrong, free_port, main, take_turns

SCRIPT = """
import os, sys
rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
open(os.path.join(sys.argv[1], f"{rank}-of-{world}"), "w").close()
"""
TURNS = {"one": 9, "help": 9, "two": 3}
TWO = {"hasten": ["--cpu", "--num_processes", "2"], "accelerate": ["--multi_gpu", "--num_processes", "2"]}


def command(name: str) -> str:
    """The console script `name` of this environment."""
    return str(Path(sysconfig.get_path("scripts")) / name)


def _run(arguments: Sequence[str], expected: Sequence[str] = (), folder: Path | None = None) -> None:
    """Run the command and check which ranks have left their file."""
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr[-2000:]}")
    if folder is not None:
        found = sorted(path.name for path in folder.iterdir())
        if found != list(expected):
            raise Wrong(f"{' '.join(arguments)}: the ranks {found} ran instead of {list(expected)}")
        for path in folder.iterdir():
            path.unlink()


def _launch(library: str, processes: int) -> dict[str, float]:
    name = "one" if processes == 1 else "two"
    with tempfile.TemporaryDirectory() as place:
        script, folder = Path(place) / "script.py", Path(place) / "ranks"
        script.write_text(SCRIPT)
        folder.mkdir()
        arguments = [str(script), str(folder)]
        torchrun = [command("torchrun"), "--nproc_per_node", "2", "--master_port", str(free_port())]
        ideal = [sys.executable, *arguments] if processes == 1 else [*torchrun, *arguments]
        options = ["--cpu"] if processes == 1 else TWO.get(library, [])
        own = ideal if library == RAW else [command(library), "launch", *options, *arguments]
        expected = [f"{rank}-of-{processes}" for rank in range(processes)]
        turns = take_turns(lambda: _run(ideal, expected, folder), lambda: _run(own, expected, folder), TURNS[name])
    return {f"{name}_ratio": turns.ratio, f"{name}_ms": turns.library_s * 1e3, f"{name}_ideal_ms": turns.ideal_s * 1e3}


def one(library: str) -> dict[str, float]:
    return _launch(library, 1)


def two(library: str) -> dict[str, float]:
    return _launch(library, 2)


def help_text(library: str) -> dict[str, float]:
    ideal = [sys.executable, "-c", "pass"]
    own = ideal if library == RAW else [command(library), "launch", "--help"]
    turns = take_turns(lambda: _run(ideal), lambda: _run(own), TURNS["help"])
    return {"help_ratio": turns.ratio, "help_ms": turns.library_s * 1e3}


BENCHMARK = Benchmark(
    "benchmarks.launch",
    "Launching a script without torch",
    [
        Figure("1 process: over `python script.py`", "one_ratio", 8, 1),
        Figure("1 process: ms", "one_ms", digits=0),
        Figure("launch --help: over `python -c pass`", "help_ratio", 8, 1),
        Figure("launch --help: ms", "help_ms", digits=0),
        Figure("2 processes: over torchrun", "two_ratio", 0.15, 2),
        Figure("2 processes: ms", "two_ms", digits=0),
    ],
    [Part("one", one), Part("help", help_text), Part("two", two)],
)

if __name__ == "__main__":
    main(BENCHMARK)

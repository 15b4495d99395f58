"""Taking turns: raw PyTorch, hasten and accelerate in fresh processes, round after round, and a table of their medians.

A benchmark is a list of `Figure` (the rows of its table) and of `Part` (functions that measure one library). Each part runs
in fresh processes, one per rank, once per library and round: raw, hasten, accelerate, raw, hasten, accelerate, ... Inside a
process the library and its ideal take turns as well (`take_turns`), so that a busy machine slows both alike. For the library
"raw" both are the ideal: its ratio is the noise of the measurement.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RAW = "raw"
LIBRARIES = ("hasten", "accelerate")
ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 600.0


class Wrong(Exception):
    """The library's result is not the ideal's: its speed is of no interest."""


@dataclass(frozen=True)
class Figure:
    """One row of the table: the values that the parts return under `key`; a bar is the most that is allowed."""

    name: str
    key: str
    bar: float | None = None
    digits: int = 2


def step_figures(prefix: str, label: str, bar: float) -> list[Figure]:
    """The rows of the values that `Turns.values` gives for a loop."""
    return [
        Figure(f"{label}: time over the loop by hand", f"{prefix}_ratio", bar, 3),
        Figure(f"{label}: us per step", f"{prefix}_us", digits=1),
        Figure(f"{label}: extra us per step", f"{prefix}_extra_us", digits=1),
    ]


@dataclass(frozen=True)
class Part:
    """A function that measures one library in a fresh process, on each of `ranks` ranks; rank 0's values count."""

    name: str
    measure: Callable[[str], Mapping[str, float]]
    ranks: int = 1


@dataclass(frozen=True)
class Benchmark:
    """A script: its module, its title, the rows of its table and the parts that fill them."""

    module: str
    title: str
    figures: Sequence[Figure]
    parts: Sequence[Part]


@dataclass(frozen=True)
class Turns:
    """Seconds of each turn, of the ideal and of the library, in the order in which they were taken."""

    ideal: list[float]
    library: list[float]

    @property
    def ratio(self) -> float:
        """The median of library / ideal over neighbouring turns, which a drift of the machine's speed cancels from."""
        return statistics.median(lib / ideal for lib, ideal in zip(self.library, self.ideal, strict=True))

    @property
    def ideal_s(self) -> float:
        return statistics.median(self.ideal)

    @property
    def library_s(self) -> float:
        return statistics.median(self.library)

    def values(self, prefix: str, number: int) -> dict[str, float]:
        """The ratio, and the microseconds of one of the `number` steps of a turn: all, and those more than the ideal."""
        return {
            f"{prefix}_ratio": self.ratio,
            f"{prefix}_us": self.library_s / number * 1e6,
            f"{prefix}_extra_us": (self.library_s - self.ideal_s) / number * 1e6,
        }


def clock() -> float:
    """Seconds by the clock that ``--clock`` chose: wall, or this process's processor time."""
    return time.process_time() if os.environ.get("BENCHMARK_CLOCK") == "cpu" else time.perf_counter()


def take_turns(
    ideal: Callable[[], object],
    library: Callable[[], object],
    turns: int,
    *,
    before: Callable[[], object] | None = None,
    read_clock: Callable[[], float] = clock,
) -> Turns:
    """Time `ideal` and `library` in turns, `turns` times after one unmeasured turn; who begins changes each time.

    `before` runs, unmeasured, before every turn (a barrier, where there are several ranks).
    """
    times: dict[str, list[float]] = {"ideal": [], "library": []}
    pair = [("ideal", ideal), ("library", library)]
    gc.collect()
    gc.freeze()
    for turn in range(turns + 1):
        for name, run in pair if turn % 2 else reversed(pair):
            if before is not None:
                before()
            start = read_clock()
            run()
            times[name].append(read_clock() - start)
    return Turns(times["ideal"][1:], times["library"][1:])


def find(library: str, name: str) -> object:
    """The public function `name` of `library`, at the top of it or where its collectives are."""
    for module in (library, f"{library}.utils", f"{library}.collectives.{name}"):
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"{library} has no public {name}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Worker:
    """One fresh process, on one thread; what it prints goes to a file."""

    process: subprocess.Popen[bytes]
    output: Path

    @classmethod
    def start(cls, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> Worker:
        own = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **environment}
        own.pop("PYTHONDONTWRITEBYTECODE", None)  # a library is measured as installed: compiled
        with output.open("wb") as file:
            command = [sys.executable, "-m", *arguments]
            return cls(subprocess.Popen(command, env=own, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT), output)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def fresh(benchmark: Benchmark, part: Part, library: str, clock_name: str = "wall") -> dict[str, float]:
    """What `part` returns for `library` on rank 0, each rank in a fresh process.

    Raises `Wrong` for a wrong result and RuntimeError, with the end of the output, for any other failure.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        arguments = [benchmark.module, "--worker", part.name, library, str(result)]
        environments = _environments(part.ranks)
        workers: list[Worker] = []
        try:
            for rank, environment in enumerate(environments):
                own = {**environment, "BENCHMARK_CLOCK": clock_name}
                workers.append(Worker.start(arguments, own, Path(folder) / f"output{rank}"))
            _wait(workers)
        finally:
            for worker in workers:
                worker.stop()
        if all(worker.process.returncode == 0 for worker in workers):
            return dict(json.loads(result.read_text()))
        raise _failure(workers)


def _environments(ranks: int) -> list[dict[str, str]]:
    """What torchrun would tell each rank; nothing for one rank."""
    if ranks == 1:
        return [{}]
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _wait(workers: Sequence[Worker]) -> None:
    """Wait until all have ended, or one has failed, or the time is over."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end and any(worker.process.poll() is None for worker in workers):
        if any(worker.process.poll() for worker in workers):
            time.sleep(1.0)  # the others may have something to say
            return
        time.sleep(0.01)


def _failure(workers: Sequence[Worker]) -> Wrong | RuntimeError:
    texts = []
    for rank, worker in enumerate(workers):
        lines = worker.output.read_text(errors="replace").strip().splitlines() or ["no output"]
        if lines[-1].startswith("benchmarks.measure.Wrong"):
            return Wrong(lines[-1].partition(": ")[2])
        texts.append(f"rank {rank}, exit code {worker.process.returncode}:\n" + "\n".join(lines[-20:]))
    return RuntimeError("\n".join(texts))


def _work(benchmark: Benchmark, name: str, library: str, result: str) -> None:
    """Inside a fresh process: measure one part of one library and let rank 0 write the values."""
    part = next(each for each in benchmark.parts if each.name == name)
    if part.ranks == 1:
        Path(result).write_text(json.dumps(part.measure(library)))
        return
    import torch.distributed as dist

    if library == RAW:
        dist.init_process_group("gloo")
    values = part.measure(library)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(values))
    dist.barrier()
    dist.destroy_process_group()


def main(benchmark: Benchmark) -> None:
    """The command line of a benchmark; exits with 1 when a library's result is wrong or could not be measured."""
    parser = argparse.ArgumentParser(prog=f"python -m {benchmark.module}", description=benchmark.title)
    parser.add_argument("--library", action="append", choices=LIBRARIES, help="measure this one (default: both)")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes per library (default: 3)")
    parser.add_argument("--part", action="append", help="measure these parts only: " + _names(benchmark))
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: processor time of one-rank parts"
    )
    parser.add_argument("--json", metavar="FILE", help="write all values of all rounds to FILE")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _work(benchmark, *arguments.worker)
        return
    libraries = [RAW, *(arguments.library or LIBRARIES)]
    parts = [part for part in benchmark.parts if not arguments.part or part.name in arguments.part]
    if not parts:
        parser.error(f"--part {' '.join(arguments.part)}: allowed are {_names(benchmark)}")
    values, failures = _rounds(benchmark, parts, libraries, arguments.rounds, arguments.clock)
    print(table(benchmark, libraries, values, failures, f"{arguments.clock} clock, {arguments.rounds} rounds"))
    if arguments.json:
        _write_json(arguments, benchmark, values, failures)
    sys.exit(1 if failures else 0)


def _names(benchmark: Benchmark) -> str:
    return ", ".join(part.name for part in benchmark.parts)


Values = dict[str, dict[str, list[float]]]  # library -> key -> one value per round


def _rounds(
    benchmark: Benchmark, parts: Sequence[Part], libraries: Sequence[str], rounds: int, clock_name: str
) -> tuple[Values, dict[str, str]]:
    """All rounds, in turns; a part that fails is not tried again for that library."""
    values: Values = {library: {} for library in libraries}
    failures: dict[str, str] = {}
    for part, library in [(part, library) for _ in range(rounds) for part in parts for library in libraries]:
        label = f"{library}, {part.name}"
        if label in failures:
            continue
        try:
            got = fresh(benchmark, part, library, clock_name if part.ranks == 1 else "wall")
        except Wrong as error:
            failures[label] = f"wrong: {error}"
        except RuntimeError as error:
            failures[label] = f"failed: {str(error).splitlines()[-1]}"
            print(f"{label} failed\n{error}", file=sys.stderr)
        else:
            for key, value in got.items():
                values[library].setdefault(key, []).append(value)
    return values, failures


def table(benchmark: Benchmark, libraries: Sequence[str], values: Values, failures: Mapping[str, str], how: str) -> str:
    """The figures as text: a row per figure with its bar, a column per library, and whether hasten holds the bar."""
    shown = [*libraries[1:], RAW]
    lines = [f"{benchmark.title}  [{how}]"]
    lines.append(f"{'figure':<52}{'bar':>9}" + "".join(f"{name:>12}" for name in shown))
    for figure in benchmark.figures:
        medians = {name: statistics.median(values[name][figure.key]) for name in shown if figure.key in values[name]}
        if not medians:
            continue
        cells = "".join(f"{medians[name]:>12.{figure.digits}f}" if name in medians else f"{'-':>12}" for name in shown)
        bar = "" if figure.bar is None else f"<= {figure.bar:g}"
        verdict = ""
        if figure.bar is not None and "hasten" in medians:
            verdict = "  held" if round(medians["hasten"], figure.digits) <= figure.bar else "  MISSED"
        lines.append(f"{figure.name:<52}{bar:>9}{cells}{verdict}")
    lines += [f"{label}: {text}" for label, text in failures.items()]
    return "\n".join(lines)


def _write_json(
    arguments: argparse.Namespace, benchmark: Benchmark, values: Values, failures: Mapping[str, str]
) -> None:
    import torch

    report = {
        "benchmark": benchmark.module,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "clock": arguments.clock,
        "bars": {figure.key: figure.bar for figure in benchmark.figures if figure.bar is not None},
        "values": values,
        "failures": dict(failures),
    }
    Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")

"""All benchmarks, one after the other, and a summary of the figures that have a bar; each takes the same options."""

import json
import statistics
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from benchmarks.measure import RAW, Benchmark

NAMES = (
    "import_time",
    "launch",
    "prepared_loop",
    "loader",
    "dispatch",
    "resume",
    "ddp_step",
    "fsdp_step",
    "collectives",
    "local_sgd",
    "clipping",
    "memory",
    "checkpoint",
)


def rows(benchmark: Benchmark, values: dict[str, dict[str, list[float]]]) -> list[str]:
    """Markdown rows, as in README.md: figure, bar, hasten, accelerate, raw."""
    lines = []
    for figure in benchmark.figures:
        if figure.bar is None:
            continue
        cells = [values.get(library, {}).get(figure.key) for library in ("hasten", "accelerate", RAW)]
        shown = ["-" if cell is None else f"{statistics.median(cell):.{figure.digits}f}" for cell in cells]
        title = f"{benchmark.module.removeprefix('benchmarks.')}: {figure.name}"
        lines.append(f"| {title} | <= {figure.bar:g} | {' | '.join(shown)} |")
    return lines


def main() -> None:
    summary, failed = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            report = Path(folder) / f"{name}.json"
            command = [sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:], "--json", str(report)]
            if subprocess.run(command).returncode:
                failed.append(name)
            print(flush=True)
            if report.exists():
                benchmark = import_module(f"benchmarks.{name}").BENCHMARK
                summary += rows(benchmark, json.loads(report.read_text())["values"])
    print("| figure | bar | hasten | accelerate | raw |\n|---|---|---|---|---|")
    print("\n".join(summary))
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()

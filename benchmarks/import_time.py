"""Importing a library and making its Accelerator over importing torch: processor time of whole processes, and modules."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

from benchmarks.measure import RAW, Benchmark, Figure, Part, main, take_turns

TURNS = 7
TORCH = "import torch"
COUNT = """
import json, sys, time
import torch
before, start = set(sys.modules), time.process_time()
{ready}
spent = time.process_time() - start
print(json.dumps([len(set(sys.modules) - before), spent]))
"""


def ready(library: str) -> str:
    """What a script does before its own first line; nothing for raw PyTorch."""
    return "pass" if library == RAW else f"import {library}; {library}.Accelerator(cpu=True)"


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def children_cpu() -> float:
    """Processor seconds of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def count_modules(library: str) -> tuple[int, float]:
    """Modules that `ready` adds to those of torch, and its processor seconds."""
    modules, seconds = json.loads(run(COUNT.format(ready=ready(library))))
    return modules, seconds


def measure(library: str) -> dict[str, float]:
    turns = take_turns(lambda: run(TORCH), lambda: run(f"{TORCH}; {ready(library)}"), TURNS, read_clock=children_cpu)
    modules, seconds = count_modules(library)
    return {
        "ratio": turns.ratio,
        "ms": turns.library_s * 1e3,
        "own_ms": seconds * 1e3,
        "own_ratio": 1 + seconds / turns.ideal_s,
        "modules": modules,
    }


BENCHMARK = Benchmark(
    "benchmarks.import_time",
    "Import and Accelerator(cpu=True) over import torch, processor time",
    [
        Figure("whole process over `import torch`", "ratio", 1.03, 3),
        Figure("1 + own part / `import torch`", "own_ratio", 1.03, 3),
        Figure("whole process, ms", "ms", digits=0),
        Figure("own part, ms", "own_ms", digits=1),
        Figure("extra modules", "modules", 30, 0),
    ],
    [Part("import", measure)],
)

if __name__ == "__main__":
    main(BENCHMARK)

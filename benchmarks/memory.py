"""Memory of the prepared loop beside the loop by hand: live tensors, resident memory, growth, and what free_memory frees."""

from __future__ import annotations

import gc
import resource
import sys
import weakref

import psutil

from benchmarks.counts import LiveBytes
from benchmarks.loops import prepared_loop
from benchmarks.measure import Benchmark, Figure, Part, main

BATCHES = 24
WIDTH = 4096  # 16-4096-1: 1.2 MB of parameters and AdamW state
STATES = 16384  # bytes of random states that an epoch began with, by which a loader resumes, and a batch read ahead
WIDE = 400_000  # 16-400000-1: 29 MB of parameters, AdamW


def tensors(library: str) -> dict[str, float]:
    """Bytes of the tensors that live at once, at most, from construction to the end of two epochs."""

    def peak(name: str) -> int:
        with LiveBytes() as bytes_:
            loop = prepared_loop(name, BATCHES, width=WIDTH, adam=True)
            loop.epoch()
            loop.epoch()
        return bytes_.peak

    ideal = peak("raw")
    own = peak(library)
    return {"peak_ratio": own / ideal, "peak_bytes": own, "extra_bytes": own - ideal}


def resident(library: str) -> dict[str, float]:
    """Growth of the most resident memory from before the model is built to the end of the first steps."""
    prepared_loop(library, 2).epoch()  # whatever is imported or allocated once
    gc.collect()
    before = psutil.Process().memory_info().rss
    loop = prepared_loop(library, BATCHES // 8, width=WIDE, adam=True)
    loop.epoch()
    unit = 1 if sys.platform == "darwin" else 1024
    return {"resident_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before) / 1e6}


def objects(library: str) -> dict[str, float]:
    """Python objects that later epochs add, and prepared objects that survive free_memory."""

    loop = prepared_loop(library, BATCHES, adam=True)
    for _ in range(3):
        loop.epoch()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(5):
        loop.epoch()
    gc.collect()
    grown = len(gc.get_objects()) - before
    held = [loop.model, *loop.model.parameters(), *loop.parts]
    held += [
        inner for part in loop.parts for inner in (getattr(part, "optimizer", None), getattr(part, "dataset", None))
    ]
    references = [weakref.ref(each) for each in held if each is not None]
    accelerator, parts = loop.accelerator, loop.parts
    del loop, held
    if accelerator is not None:
        parts = accelerator.free_memory(*parts)
    del parts
    gc.collect()
    survivors = [reference() for reference in references if reference() is not None]
    return {"grown": grown, "survivors": len(survivors)}


BENCHMARK = Benchmark(
    "benchmarks.memory",
    "Memory of the prepared loop",
    [
        Figure("peak bytes of live tensors over the loop by hand", "peak_ratio", 1.01, 4),
        Figure("peak bytes of live tensors", "peak_bytes", digits=0),
        Figure("extra bytes", "extra_bytes", STATES, 0),
        Figure("growth of resident memory, 16-400000-1 MLP, MB", "resident_mb", digits=1),
        Figure("Python objects added by 5 more epochs", "grown", 0, 0),
        Figure("prepared objects that survive free_memory", "survivors", 0, 0),
    ],
    [Part("tensors", tensors), Part("resident", resident), Part("objects", objects)],
)

if __name__ == "__main__":
    main(BENCHMARK)

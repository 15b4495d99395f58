"""A prepared loader over the plain one, and over a DistributedSampler loader on 2 ranks: time per batch, without any work."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from benchmarks.measure import RAW, Benchmark, Figure, Part, Wrong, main, take_turns

BATCH = 8
BATCHES = 242
TURNS = 40


def _measure(library: str, ranks: int, prefix: str) -> dict[str, float]:
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    samples = BATCH * BATCHES * ranks
    dataset = TensorDataset(torch.arange(samples), torch.randn(samples, 16))
    make_loader: Callable[..., DataLoader] = lambda: DataLoader(dataset, batch_size=BATCH, shuffle=True)  # noqa: E731
    prepared = make_loader()
    if library != RAW:
        accelerator = importlib.import_module(library).Accelerator(cpu=True)
        assert accelerator.num_processes == ranks
        prepared = accelerator.prepare(make_loader())
    epochs = {"raw": 0, "prepared": 0}
    if ranks == 1:
        plain = make_loader()
    else:
        sampler: DistributedSampler = DistributedSampler(dataset)
        plain = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
        if library == RAW:
            prepared = plain

    def by_hand() -> list[torch.Tensor]:
        if ranks > 1:
            sampler.set_epoch(epochs["raw"])
            epochs["raw"] += 1
        return [index for index, _ in plain]

    def by_library() -> list[torch.Tensor]:
        if library == RAW:
            return by_hand()
        return [index for index, _ in prepared]

    def check() -> None:
        mine = torch.cat(by_library())
        everything = [torch.empty_like(mine) for _ in range(ranks)]
        if ranks > 1:
            dist.all_gather(everything, mine)
        else:
            everything = [mine]
        if not torch.equal(torch.cat(everything).sort().values, torch.arange(samples)):
            raise Wrong("an epoch of the prepared loader is not every sample once")

    check()
    turns = take_turns(by_hand, by_library, TURNS, before=dist.barrier if ranks > 1 else None)
    check()
    return {
        f"{prefix}_ratio": turns.ratio,
        f"{prefix}_us": turns.library_s / BATCHES * 1e6,
        f"{prefix}_extra_us": (turns.library_s - turns.ideal_s) / BATCHES * 1e6,
    }


def one(library: str) -> dict[str, float]:
    return _measure(library, 1, "one")


def two(library: str) -> dict[str, float]:
    return _measure(library, 2, "two")


BENCHMARK = Benchmark(
    "benchmarks.loader",
    "Prepared loader, shuffled, 242 batches of 8 per rank",
    [
        Figure("1 process: over the plain loader", "one_ratio", 1.02, 3),
        Figure("1 process: us per batch", "one_us", digits=1),
        Figure("1 process: extra us per batch", "one_extra_us", digits=1),
        Figure("2 ranks: over a DistributedSampler loader", "two_ratio", 1.05, 3),
        Figure("2 ranks: us per batch", "two_us", digits=1),
        Figure("2 ranks: extra us per batch", "two_extra_us", digits=1),
    ],
    [Part("one", one), Part("two", two, ranks=2)],
)

if __name__ == "__main__":
    main(BENCHMARK)

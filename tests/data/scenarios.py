"""Loaders of every kind, and what is observed when one is prepared and iterated over.

`recorded.py` holds what accelerate 1.15.0 gives for them: this file needs nothing but torch, so that it can be run with it.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

SIZE = 11
FORK = "fork" if "fork" in torch.multiprocessing.get_all_start_methods() else None


class Numbers(Dataset[int]):
    """The sample at index i is i."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return int(index)


class Stream(IterableDataset[int]):
    """The numbers up to a size, shuffled by a generator if it has one."""

    def __init__(self, size: int = SIZE, generator: torch.Generator | None = None) -> None:
        self.size = size
        if generator is not None:
            self.generator = generator

    def __iter__(self) -> Iterator[int]:
        order = range(self.size)
        yield from torch.randperm(self.size, generator=self.generator).tolist() if hasattr(self, "generator") else order


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.size


class Drawing:
    """A sampler that draws each index from torch's own generator when it is asked for it."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            yield int(torch.randint(SIZE, ()))


class Batches:
    """A batch sampler with batches of any size."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


Build = Callable[[int], DataLoader[Any]]


def _loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), **{"batch_size": 2, **options})


def _sampled(sampler: Any, **options: Any) -> DataLoader[Any]:
    return _loader(sampler=sampler, **options)


_DISPATCH = {"dispatch_batches": True, "put_on_device": True}

# name -> (a function of the rank that builds a loader, settings of prepare_data_loader)
SCENARIOS: dict[str, tuple[Build, dict[str, Any]]] = {
    "sequential": (lambda rank: _loader(), {}),
    "sequential, drop_last": (lambda rank: _loader(drop_last=True), {}),
    "sequential, uneven": (lambda rank: _loader(), {"even_batches": False}),
    "sequential, generator": (lambda rank: _loader(generator=generator(3 + rank)), {}),
    "shuffle": (lambda rank: _loader(shuffle=True), {}),
    "shuffle, drop_last": (lambda rank: _loader(shuffle=True, drop_last=True), {}),
    "shuffle, split": (lambda rank: _loader(shuffle=True, batch_size=6), {"split_batches": True}),
    "shuffle, generator": (lambda rank: _loader(shuffle=True, generator=generator(3 + rank)), {}),
    "shuffle, no synchronization": (lambda rank: _loader(shuffle=True), {"rng_types": None}),
    "shuffle, torch too": (lambda rank: _loader(shuffle=True), {"rng_types": ["torch", "generator"]}),
    "shuffle, workers": (lambda rank: _loader(shuffle=True, num_workers=1, multiprocessing_context=FORK), {}),
    "sampler's generator": (lambda rank: _sampled(RandomSampler(Numbers(), generator=generator(3 + rank))), {}),
    "both generators": (
        lambda rank: _sampled(RandomSampler(Numbers(), generator=generator(3 + rank)), generator=generator(7 + rank)),
        {},
    ),
    "replacement": (lambda rank: _sampled(RandomSampler(Numbers(), replacement=True)), {}),
    "more samples": (lambda rank: _sampled(RandomSampler(Numbers(), num_samples=25)), {}),
    "weighted": (lambda rank: _sampled(WeightedRandomSampler([1.0] * SIZE, 13)), {}),
    "subset": (lambda rank: _sampled(SubsetRandomSampler(range(2, 9))), {}),
    "drawing": (lambda rank: _sampled(Drawing()), {}),
    "batch sampler": (
        lambda rank: DataLoader(Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), 2, False)),
        {},
    ),
    "uneven batches": (
        lambda rank: DataLoader(Numbers(), batch_sampler=Batches([[0, 1], [2], [3, 4, 5], [6], [7]])),
        {},
    ),
    "seedable": (lambda rank: _loader(shuffle=True), {"use_seedable_sampler": True, "data_seed": 7}),
    "seedable, generator": (
        lambda rank: _loader(shuffle=True, generator=generator(9)),
        {"use_seedable_sampler": True, "data_seed": 7},
    ),
    "seedable, replacement": (
        lambda rank: _sampled(RandomSampler(Numbers(), replacement=True, num_samples=9)),
        {"use_seedable_sampler": True, "data_seed": 7},
    ),
    "stream": (lambda rank: DataLoader(Stream(), batch_size=2), {}),
    "stream, drop_last": (lambda rank: DataLoader(Stream(), batch_size=2, drop_last=True), {}),
    "stream, split": (lambda rank: DataLoader(Stream(), batch_size=6), {"split_batches": True}),
    "stream, generator": (lambda rank: DataLoader(Stream(generator=generator(3 + rank)), batch_size=2), {}),
    "dispatch": (lambda rank: DataLoader(Stream(), batch_size=2), _DISPATCH),
    "dispatch, drop_last": (lambda rank: DataLoader(Stream(), batch_size=2, drop_last=True), _DISPATCH),
    "dispatch, split": (lambda rank: DataLoader(Stream(), batch_size=6), {**_DISPATCH, "split_batches": True}),
    "dispatch, shuffle": (lambda rank: _loader(shuffle=True), _DISPATCH),
    "dispatch, generator": (lambda rank: _loader(shuffle=True, generator=generator(3 + rank)), _DISPATCH),
    "one sample": (lambda rank: DataLoader(Numbers(1), batch_size=2, shuffle=True), {}),
    "no sample": (lambda rank: DataLoader(Numbers(0), batch_size=2), {}),
}


def digest(state: torch.Tensor) -> str:
    return hashlib.sha256(state.numpy().tobytes()).hexdigest()[:8]


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def play(name: str, rank: int, prepare: Callable[..., DataLoader[Any]]) -> dict[str, Any]:
    """Prepare a scenario's loader; then a whole pass, one left after two batches, and a whole one.

    Returns the batches of each pass, the state of torch's generator after preparing, after `iter`, after the first batch and
    after the pass, whether the last batch was known to be the last, and the number of complete passes.
    """
    build, settings = SCENARIOS[name]
    torch.manual_seed(5 + rank)
    loader = prepare(build(rank), torch.device("cpu"), **{"rng_types": ["generator"], **settings})
    states = [digest(torch.get_rng_state())]
    seen: list[list[Any]] = []
    lasts: list[bool] = []
    for limit in (None, 2, None):
        batches: list[Any] = []
        iterator = iter(loader)
        states.append(digest(torch.get_rng_state()))
        for batch in iterator:
            batches.append(plain(batch))
            if len(batches) == 1:
                states.append(digest(torch.get_rng_state()))
            if len(batches) == limit:
                break
        lasts.append(loader.end_of_dataloader)
        del iterator
        states.append(digest(torch.get_rng_state()))
        seen.append(batches)
    return {"seen": seen, "states": states, "lasts": lasts, "iteration": loader.iteration}

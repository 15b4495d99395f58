"""Samplers: a shuffle that depends on a seed and the epoch alone, and ways to begin a sampler at a later place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order is a function of (seed + epoch): equal on all ranks that have the same seed.

    A complete pass moves on to the next epoch; `set_epoch` chooses one.

    Args:
        args, kwargs: those of `torch.utils.data.RandomSampler`; its `generator`, if given, is seeded anew at each pass.
        data_seed: the seed of epoch 0; by default the one that `torch.manual_seed` was given last.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next pass has."""
        self.epoch = epoch


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches, at every pass.

    Args:
        batch_sampler: where the batches come from.
        skip_batches: how many of them to leave out.
    """

    def __init__(self, batch_sampler: Iterable[list[int]], skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[list[int]]:
        return batches_from(self.batch_sampler, self.skip_batches)

    @property
    def total_length(self) -> int:
        """The number of batches before skipping."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return max(0, self.total_length - self.skip_batches)


def samples_from(sampler: Iterable[int], start: int) -> Iterator[int]:
    """The samples of one pass over `sampler` after the first `start`, in constant time where the order is a plain count."""
    return advance(sampler, iter(sampler), 0, start)


def advance(sampler: Iterable[int], samples: Iterator[int], taken: int, start: int) -> Iterator[int]:
    """Move an iterator over `sampler`, of which `taken` samples are taken, on to sample `start`.

    A sampler that draws does so when the next sample is asked for, not before.
    """
    if type(sampler) is SequentialSampler:
        return iter(range(len(sampler))[start:])
    return islice(samples, start - taken, None)


def batches_from(batches: Iterable[Any], start: int) -> Iterator[Any]:
    """The batches of one pass over a batch sampler after the first `start`; nothing is read from the dataset.

    Samplers that can begin later themselves have a method `batches_from(start)`.
    """
    if start <= 0:
        return iter(batches)
    own = getattr(batches, "batches_from", None)
    if own is not None:
        return own(start)
    if type(batches) is BatchSampler:
        rest = samples_from(batches.sampler, start * batches.batch_size)
        return iter(BatchSampler(rest, batches.batch_size, batches.drop_last))
    if type(batches) is SequentialSampler:
        return samples_from(batches, start)
    return islice(iter(batches), start, None)


def innermost(batches: Any) -> Any:
    """The user's own batch sampler inside those that share it out or skip."""
    while (inner := getattr(batches, "batch_sampler", None)) is not None:
        batches = inner
    return batches


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """The sampler that chooses a loader's samples, also where a batch sampler hides it; None if there is none."""
    batches = dataloader.batch_sampler
    if batches is None:
        if not isinstance(innermost(dataloader.sampler), BatchSampler):
            return dataloader.sampler
        batches = dataloader.sampler
    return getattr(innermost(batches), "sampler", None)


def set_sampler(dataloader: DataLoader[Any], sampler: Iterable[int]) -> None:
    """Make a loader choose its samples by `sampler`, in the place where `get_sampler` finds one."""
    batches = dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler
    inner = innermost(batches)
    if hasattr(inner, "sampler"):
        inner.sampler = sampler
    elif dataloader.batch_sampler is None:
        dataloader.__dict__["sampler"] = sampler
    else:
        raise ValueError(f"{type(inner).__name__} makes its batches without a sampler, so there is none to replace.")

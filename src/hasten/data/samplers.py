"""Samplers: a shuffle that depends on a seed and the epoch alone, and ways to begin a sampler at a later place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
        self.is_shared = False  # whether all ranks are known to have this seed

    def __iter__(self) -> Iterator[int]:
        self.seeded()
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def seeded(self) -> torch.Generator:
        """The generator, seeded for the epoch."""
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.initial_seed + self.epoch)
        return self.generator

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


def draw_order(sampler: Any) -> tuple[range | torch.Tensor, Callable[[], None]] | None:
    """The whole order of one pass over one of torch's simple samplers, drawn as iterating over it draws.

    Returns the order and what to call where iterating would find the end; None for samplers that must be iterated over.
    """
    kind = type(sampler)
    if kind is SequentialSampler:
        return range(len(sampler)), lambda: None
    if kind not in (RandomSampler, SeedableRandomSampler) or sampler.replacement:
        return None
    number = len(sampler.data_source)
    if sampler.num_samples != number:
        return None
    generator = sampler.seeded() if kind is SeedableRandomSampler else sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    order = torch.randperm(number, generator=generator)

    def finish() -> None:
        # Torch looks for a part of a second permutation before it stops.
        torch.randperm(number, generator=generator)
        if kind is SeedableRandomSampler:
            sampler.set_epoch(sampler.epoch + 1)

    return order, finish


def samples_from(sampler: Iterable[int], start: int) -> Iterator[int]:
    """The samples of one pass over `sampler` after the first `start`, in the same time for every `start` where possible.

    A sampler that draws does so when the first sample is asked for, not before.
    """
    drawn = draw_order(sampler)
    if drawn is None:
        yield from islice(iter(sampler), start, None)
        return
    order, finish = drawn
    yield from order[start:] if isinstance(order, range) else order[start:].tolist()
    finish()


def batches_from(batches: Iterable[Any], start: int, offset: int = 0) -> Iterator[Any]:
    """The batches of one pass over a batch sampler after the first `start`; nothing is read from the dataset.

    Samplers that can begin later themselves have a method `batches_from(start, offset)`.

    Args:
        batches: torch's own batch sampler, or another one.
        start: batches to leave out.
        offset: what is left out before the first of them: samples of torch's own batch sampler, batches of another one.
    """
    if start <= 0 and offset <= 0:
        return iter(batches)
    own = getattr(batches, "batches_from", None)
    if own is not None:
        return own(start, offset)
    if type(batches) is BatchSampler:
        rest = samples_from(batches.sampler, offset + start * batches.batch_size)
        return iter(BatchSampler(rest, batches.batch_size, batches.drop_last))
    if isinstance(batches, (RandomSampler, SequentialSampler)):
        return samples_from(batches, start + offset)
    return islice(iter(batches), start + offset, None)


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

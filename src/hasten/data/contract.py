"""The epoch contract: what each rank gets of a loader's data in one epoch, and how an interrupted epoch goes on."""

from __future__ import annotations

import math
from collections.abc import Sized
from dataclasses import dataclass, field

from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from hasten.data.dispatch import DataLoaderDispatcher
from hasten.data.lineage import counts_in_parts
from hasten.data.prepared import PreparedLoader
from hasten.data.samplers import SeedableRandomSampler
from hasten.data.shard import BatchSamplerShard, IterableDatasetShard
from hasten.data.sharded import DataLoaderShard
from hasten.data.sharding import ALREADY, REPLICATE
from hasten.world.process import current


@dataclass(frozen=True)
class Share:
    """How one epoch's samples are dealt out; None where it can not be known before the data are read.

    Args:
        samples: those of each rank, repeated ones included.
        steps: batches of each rank.
        repeated: samples that are there once more, over all ranks.
        dropped: samples that nobody gets.
    """

    samples: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None
    repeated: int | None = None
    dropped: int | None = None


@dataclass(frozen=True)
class EpochContract:
    """What each rank gets of a prepared loader in one epoch. Prints as a table; the fields hold the same as data.

    Args:
        dataset: the class of the dataset.
        samples: its length, None if it has none.
        division: how it is shared out.
        parts: how many different parts there are.
        batch_size: samples of one rank's batch, None if batches have no fixed size.
        share: what each part has.
        order: what chooses the order.
        resume: what `load_state` restores.
    """

    dataset: str
    samples: int | None
    division: str
    parts: int
    batch_size: int | None
    share: Share
    order: str
    resume: str
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        share = self.share
        length = "an unknown number of samples" if self.samples is None else f"{self.samples:,} samples"
        rows = [
            ("dataset", f"{self.dataset}, {length}"),
            ("division", self.division),
            ("batch size", "not fixed" if self.batch_size is None else f"{self.batch_size:,} per rank"),
            ("samples per rank", _numbers(share.samples)),
            ("steps per rank", _numbers(share.steps)),
            ("repeated", _numbers(None if share.repeated is None else (share.repeated,))),
            ("dropped", _numbers(None if share.dropped is None else (share.dropped,))),
            ("order", self.order),
            ("resume", self.resume),
        ]
        rows += [("note", note) for note in self.notes]
        return "\n".join(f"{name:<17} {value}" for name, value in rows)


def _numbers(values: tuple[int, ...] | None) -> str:
    if values is None:
        return "known when the data are read"
    if len(set(values)) == 1:
        return f"{values[0]:,}"
    return ", ".join(f"{value:,}" for value in values)


def describe(loader: PreparedLoader) -> EpochContract:
    """The contract of a prepared loader, as it is now."""
    parts, division = _division(loader)
    own = _own_batch_size(loader, parts)
    share = _share(loader, parts, own)
    notes = []
    if share.steps is not None and len(set(share.steps)) > 1:
        notes.append(
            "The ranks have different numbers of steps: a loop that exchanges something in each step would wait for those "
            "that have ended. Use `even_batches=True`."
        )
    if loader.is_iterable and parts > 1 and loader.sharding not in (ALREADY, REPLICATE):
        if isinstance(loader.dataset, IterableDatasetShard):
            notes.append(
                "Each rank reads the whole stream and keeps its part; a dataset that can `.shard()` would read its part only."
            )
        elif not isinstance(loader, DataLoaderDispatcher):
            notes.append("Each rank reads its own sources, so that the ranks may have different numbers of samples.")
            if counts_in_parts(loader.dataset):
                notes.append(
                    "`take` and `skip` count in each rank's part: the samples are others than those of the whole stream. For the "
                    "same ones on any number of ranks set `dispatch_batches=True`, without workers."
                )
    return EpochContract(
        dataset=type(loader.whole_dataset).__name__,
        samples=_samples(loader),
        division=division,
        parts=parts,
        batch_size=own,
        share=share,
        order=_order(loader),
        resume="the position: the next pass goes on by itself"
        if loader.by_position
        else "the order: `skip_first_batches(loader, n)` goes on",
        notes=tuple(notes),
    )


def _samples(loader: PreparedLoader) -> int | None:
    """Samples that an epoch of all ranks is made of."""
    try:
        sampler = loader.get_sampler()
        if isinstance(sampler, DistributedSampler) or loader.is_iterable or sampler is None:
            return len(loader.whole_dataset)
        number: int = len(sampler)  # type: ignore[arg-type]
        return number
    except TypeError:
        return None


def _division(loader: PreparedLoader) -> tuple[int, str]:
    ranks = (loader.world or current()).size
    if isinstance(loader, DataLoaderDispatcher):
        parts = loader.parts
        how = "rank 0 reads, cuts each batch" if loader.split_batches else "rank 0 reads a batch for each"
        return parts, f"{how}, and sends it to {ranks} ranks" if ranks > 1 else "one process"
    shard = loader._shard if isinstance(loader, DataLoaderShard) else None
    if shard is not None:
        what = (
            "samples of a stream"
            if isinstance(shard, IterableDatasetShard)
            else "samples"
            if shard.is_sliced
            else "whole batches"
        )
        how = (
            f"each batch of the loader is cut into {shard.num_processes} parts"
            if shard.split_batches
            else f"{what} in turn"
        )
        return shard.num_processes, f"{how}, over {shard.num_processes} ranks"
    sampler = loader.get_sampler()
    if isinstance(sampler, DistributedSampler):
        return sampler.num_replicas, f"by its DistributedSampler, over {sampler.num_replicas} ranks"
    if loader.sharding == REPLICATE:
        return 1, f"all of it on each of {ranks} ranks; metrics count it once"
    if loader.sharding == ALREADY:
        return ranks, f"each of {ranks} ranks has its own part already"
    if ranks > 1 and loader.is_iterable:
        return ranks, f"by the dataset's own `.shard()`, over {ranks} ranks"
    return 1, "one process" if ranks == 1 else f"the same on {ranks} ranks of one model"


def _own_batch_size(loader: PreparedLoader, parts: int) -> int | None:
    shard = loader._shard if isinstance(loader, DataLoaderShard) else None
    if shard is not None:
        return None if shard.batch_size is None else shard._own_size
    batches = loader.indices.batches
    size: int | None = loader.batch_size if loader.is_iterable else getattr(batches, "batch_size", loader.batch_size)
    if size is None and loader.batch_sampler is None:
        return 1
    return size // parts if isinstance(loader, DataLoaderDispatcher) and loader.split_batches and size else size


def _share(loader: PreparedLoader, parts: int, own: int | None) -> Share:
    samples, sampler = _samples(loader), loader.get_sampler()
    if isinstance(sampler, DistributedSampler) and parts == sampler.num_replicas and own:
        extra = sampler.total_size - len(loader.whole_dataset)
        steps = sampler.num_samples // own if loader._drop_last else math.ceil(sampler.num_samples / own)
        each = (sampler.num_samples,) * parts
        return Share(each, (steps,) * parts, max(0, extra), max(0, -extra))
    shard = loader._shard if isinstance(loader, DataLoaderShard) else None
    if isinstance(shard, BatchSamplerShard) and not shard.is_sliced:
        return Share(steps=_lengths(shard))
    known = loader.sharding != ALREADY and not (
        shard is None and loader.is_iterable and parts > 1 and not _dispatches(loader)
    )
    if own is None and parts == 1 and isinstance(loader.indices.batches, Sized):
        return Share(steps=(len(loader.indices.batches),))
    if samples is None or own is None or not known:
        return Share()
    if _dispatches(loader) and parts > 1:
        return _dispatched(samples, own, parts, loader._drop_last)
    even = isinstance(shard, IterableDatasetShard) or (shard is not None and shard.even_batches)
    return deal(samples, own, parts, even, loader._drop_last)


def _dispatches(loader: PreparedLoader) -> bool:
    return isinstance(loader, DataLoaderDispatcher)


def _lengths(shard: BatchSamplerShard) -> tuple[int, ...] | None:
    try:
        options = (shard.split_batches, shard.even_batches)
        ranks = range(shard.num_processes)
        return tuple(len(BatchSamplerShard(shard.batch_sampler, shard.num_processes, rank, *options)) for rank in ranks)
    except TypeError:  # a batch sampler without a length
        return None


def deal(samples: int, own: int, parts: int, even: bool, drop_last: bool) -> Share:
    """What each part gets of so many samples, dealt out in batches of `own`."""
    rounds, rest = divmod(samples, own * parts)
    whole, steps = (rounds * own,) * parts, (rounds,) * parts
    if rest == 0 or drop_last:
        return Share(whole, steps, 0, rest)
    if even:
        return Share(tuple(each + own for each in whole), (rounds + 1,) * parts, own * parts - rest, 0)
    tails = [max(0, min(own, rest - part * own)) for part in range(parts)]
    return Share(
        tuple(each + tail for each, tail in zip(whole, tails, strict=True)),
        tuple(rounds + (tail > 0) for tail in tails),
        0,
        0,
    )


def _dispatched(samples: int, own: int, parts: int, drop_last: bool) -> Share:
    """As `deal`, where what is read for an incomplete last step is divided evenly."""
    rounds, rest = divmod(samples, own * parts)
    if rest == 0 or drop_last:
        return deal(samples, own, parts, False, drop_last)
    last = math.ceil(rest / parts)
    return Share((rounds * own + last,) * parts, (rounds + 1,) * parts, last * parts - rest, 0)


def _order(loader: PreparedLoader) -> str:
    sampler = loader.get_sampler()
    if loader.is_iterable:
        return "as the stream comes"
    if isinstance(sampler, SeedableRandomSampler):
        return f"shuffled by the seed {sampler.initial_seed} + epoch ({loader.iteration} now)"
    if isinstance(sampler, SequentialSampler):
        return "as the dataset is"
    if isinstance(sampler, RandomSampler):
        by = (
            "a generator that all ranks share"
            if loader.owns_generator
            else "torch's generator"
            if sampler.generator is None
            else "its generator"
        )
        return f"shuffled by {by}"
    return f"by a {type(sampler if sampler is not None else loader.indices.batches).__name__}"

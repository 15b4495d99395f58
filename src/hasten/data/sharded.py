"""A loader of which each rank reads its own part."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from hasten.data.prepared import PreparedLoader
from hasten.data.randomness import State
from hasten.data.resume import Count
from hasten.data.samplers import get_sampler
from hasten.data.shard import BatchSamplerShard, IterableDatasetShard, SamplerShard
from hasten.data.sharding import ALREADY, SHARD
from hasten.world.process import current


class DataLoaderShard(PreparedLoader):
    """A loader of which each rank reads its own part.

    Its batch sampler or its dataset is a shard already; this class moves the batches, gives the ranks the same random order,
    looks one batch ahead and knows its position.

    Args:
        dataset: the dataset, or this rank's shard of it.
        device: where the batches go; None leaves them where they are.
        rng_types: which generators get rank 0's state at the start of each pass: "torch", "cuda", "generator", ...
        synchronized_generator: the one that "generator" means.
        skip_batches: batches to leave out in the first pass.
        use_stateful_dataloader: continue by itself at the position that `load_state_dict` was given.
        iteration: the epoch of the first pass.
        kwargs: those of `torch.utils.data.DataLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            device,
            rng_types,
            synchronized_generator,
            skip_batches,
            use_stateful_dataloader,
            _drop_last,
            _non_blocking,
            iteration,
            **kwargs,
        )

    @property
    def _shard(self) -> BatchSamplerShard | IterableDatasetShard | None:
        """What cuts this rank's part out of the data, if something of ours does."""
        if isinstance(self.dataset, IterableDatasetShard):
            return self.dataset
        batches = self.indices.batches
        batches = batches.batch_sampler if isinstance(batches, SamplerShard) else batches
        return batches if isinstance(batches, BatchSamplerShard) else None

    @property
    def even_batches(self) -> bool | None:
        """Whether the ranks get equally many full batches; None where the data is a stream, or not shared out by batches."""
        shard = self._shard
        return shard.even_batches if isinstance(shard, BatchSamplerShard) else None

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        shard = self._shard
        assert isinstance(shard, BatchSamplerShard)
        shard.even_batches = value

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a step over all ranks; None if batches have no fixed size."""
        shard = self._shard
        if self.is_iterable and self.batch_size is None:
            return None
        if shard is None:
            size = getattr(self.indices.batches, "batch_size", self.batch_size)
            ranks = getattr(get_sampler(self), "num_replicas", 1)
        else:
            size = shard.batch_size
            ranks = 1 if shard.split_batches else shard.num_processes
        return None if size is None else size * ranks

    def _count(self) -> Count:
        shard, sampler = self._shard, get_sampler(self)
        if isinstance(shard, IterableDatasetShard):
            return Count("samples", shard.round_size)
        if shard is not None:
            return Count("samples" if shard.is_sliced else "batches", shard.units_per_round)
        count = super()._count()
        ranks = getattr(sampler, "num_replicas", 1) if count.what == "samples" else 1
        return Count(count.what, count.per_step * ranks)

    def _others_go_on(self, done: int, count: Count) -> bool:
        shard = self._shard
        if not isinstance(shard, BatchSamplerShard) or shard.even_batches or shard.drop_last:
            return False
        if count.what == "batches":
            return isinstance(shard.batch_sampler, Sized) and done < len(shard.batch_sampler)
        samples = self._samples_per_pass()
        return samples is not None and done < samples

    def _read_size(self) -> int:
        shard = self._shard
        return shard.round_size if isinstance(shard, IterableDatasetShard) else super()._read_size()

    def _leave_out(self, offset: int) -> None:
        shard, sampler = self._shard, get_sampler(self)
        if isinstance(shard, IterableDatasetShard):
            shard.offset = offset
            return
        if offset and shard is None and self.is_iterable:
            raise NotImplementedError(
                f"The saved position, after {offset} samples, lies within a batch of this loader, which has {self.batch_size}. Use "
                "a batch size that divides it."
            )
        ranks = getattr(sampler, "num_replicas", 1) if shard is None else 1
        if offset % ranks:
            raise NotImplementedError(
                f"The saved position, after {offset} samples, can not be found by a DistributedSampler of {ranks} ranks, which "
                "deals single samples. Use a number of ranks that divides it, or let `prepare` share a plain sampler out."
            )
        super()._leave_out(offset // ranks)

    @property
    def whole_dataset(self) -> Any:
        """The user's dataset, also where `dataset` is this rank's shard of it."""
        return self.dataset.dataset if isinstance(self.dataset, IterableDatasetShard) else self.dataset

    def _samples_per_pass(self) -> int | None:
        sampler = get_sampler(self)
        return sampler.total_size if isinstance(sampler, DistributedSampler) else super()._samples_per_pass()

    def _find(self, state: State) -> tuple[int, int]:
        ranks = (self.world or current()).size
        if state["ranks"] != ranks and (state["is_own_part"] or self._is_own_part()):
            raise ValueError(
                f"The position was saved by {state['ranks']} ranks and can not be continued by {ranks}: the loader is each rank's "
                "own part of the data, and nobody knows how these parts have changed. Let `prepare` share the data out, or begin "
                "another epoch with `loader.set_epoch(...)`."
            )
        return super()._find(state)

    def _is_own_part(self) -> bool:
        if self.sharding == ALREADY:
            return not isinstance(get_sampler(self), DistributedSampler)
        divided = self.is_iterable and self._shard is None and (self.world or current()).size > 1
        return self.sharding == SHARD and divided

    @property
    def padded_ranks(self) -> int:
        """In the last step, this many ranks, the last ones, have a repeated sample at the end of their batch."""
        sampler = get_sampler(self)
        dealt = isinstance(sampler, DistributedSampler) and self._shard is None and not self._drop_last
        return max(0, sampler.total_size - self.total_dataset_length) if dealt else 0

    @property
    def has_uneven_rows(self) -> bool:
        """Whether the ranks' batches in the loop's body may have different lengths."""
        if self._drop_last:
            return False
        if self._is_own_part():  # each worker ends with a shorter batch
            return self.end_of_dataloader or (self.is_iterable and self.num_workers > 1)
        shard = self._shard
        return self.end_of_dataloader and isinstance(shard, BatchSamplerShard) and not shard.even_batches

    def _remainder_at_start(self) -> int:
        shard, sampler = self._shard, get_sampler(self)
        if self.sharding != SHARD and not isinstance(sampler, DistributedSampler):
            return 0  # nothing is repeated
        if self._drop_last or isinstance(shard, IterableDatasetShard):
            return -1
        if isinstance(sampler, DistributedSampler):
            # It deals single samples, so that those it repeats are not the last ones of the global batch.
            return -1 if sampler.total_size > self.total_dataset_length else 0
        if shard is not None and not shard.even_batches:
            return 0
        size, length, position = self.total_batch_size, self._samples_per_pass(), self.progress.position
        if self.is_iterable or size is None or length is None:
            return 0 if shard is None else -1
        return (length - (position.offset if position is not None else 0)) % size

    def _remainder_at_end(self) -> int:
        shard, before = self._shard, self._remainder_at_start()
        if self._drop_last or shard is None or before >= 0:
            return before
        items_are_batches = self.is_iterable and self.batch_size is None
        return -1 if items_are_batches and shard.real else shard.real

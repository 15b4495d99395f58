"""A loader of which each rank reads its own part."""

from __future__ import annotations

from typing import Any

import torch

from hasten.data.prepared import PreparedLoader
from hasten.data.shard import BatchSamplerShard, IterableDatasetShard, SamplerShard


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
    def total_batch_size(self) -> int | None:
        """Samples of a step over all ranks; None if batches have no fixed size."""
        if isinstance(self.dataset, IterableDatasetShard):
            shard = self.dataset
            return shard.batch_size * (1 if shard.split_batches else shard.num_processes)
        batches = self.indices.batches
        if isinstance(batches, SamplerShard):
            return batches.shard.num_processes
        size = getattr(batches, "batch_size", self.batch_size)
        if isinstance(batches, BatchSamplerShard) and size is not None and not batches.split_batches:
            return size * batches.num_processes
        return size

    @property
    def total_dataset_length(self) -> int:
        """Samples of the whole dataset, all ranks together.

        Raises:
            TypeError: the dataset has no length.
        """
        whole = self.dataset.dataset if isinstance(self.dataset, IterableDatasetShard) else self.dataset
        return len(whole)  # type: ignore[arg-type]

    def _samples_per_pass(self) -> int | None:
        if isinstance(self.dataset, IterableDatasetShard):
            return None
        return super()._samples_per_pass()

    def _shard(self) -> BatchSamplerShard | None:
        batches = self.indices.batches
        batches = getattr(batches, "shard", batches)
        return batches if isinstance(batches, BatchSamplerShard) else None

    def _remainder_at_start(self) -> int:
        if self._drop_last or self.is_iterable:
            return -1
        shard, size, length = self._shard(), self.total_batch_size, self._samples_per_pass()
        if shard is not None and not shard.even_batches:
            return 0
        return -1 if size is None or length is None else length % size

    def _remainder_at_end(self) -> int:
        if self._drop_last:
            return -1
        if isinstance(self.dataset, IterableDatasetShard):
            # With several workers each one repeats samples at its own end; items of unknown size can not be counted.
            real = self.dataset.real if self.num_workers <= 1 else -1
            return real if real == 0 or self.batch_size is not None else -1
        shard = self._shard()
        if self.remainder >= 0 or shard is None or not shard.even_batches:
            return max(0, self.remainder)
        return shard.real

"""What the user sets about data loaders."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DataLoaderConfiguration:
    """How a prepared loader divides its data over the ranks.

    Args:
        split_batches: the loader's batch size is that of all ranks together, and each rank takes its part of each batch.
            By default the loader's batch size is that of one rank.
        dispatch_batches: one rank reads and sends the others their batches. None: only for iterable datasets.
        even_batches: repeat samples from the start so that every rank has the same number of full batches.
        use_seedable_sampler: shuffle by a sampler seeded with (seed + epoch), equal on all ranks without communication.
        data_seed: seed of that sampler; None draws one from torch's generator.
        non_blocking: copy batches to the device without waiting (useful with pinned memory).
        use_stateful_dataloader: use torchdata's `StatefulDataLoader`.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

"""What makes the order of a loader's samples: the objects that choose them, and the generators that they draw from."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hasten.data.randomness import ALL, TORCH
from hasten.data.samplers import SeedableRandomSampler, get_sampler, innermost
from hasten.data.shard import BatchSamplerShard, SamplerShard
from hasten.world.process import World

# Samplers and batch samplers that draw from torch's generators only.
_TORCH_ONLY = {
    BatchSampler,
    BatchSamplerShard,
    RandomSampler,
    SamplerShard,
    SeedableRandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
}


class Order:
    """The makers of a loader's order.

    Args:
        loader: as it is now; its sampler may be replaced between two passes.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.sampler = get_sampler(loader)
        self.is_stream = isinstance(loader.dataset, IterableDataset)
        self.choosers: list[Any] = []
        for part in (loader.batch_sampler, loader.sampler, innermost(loader.batch_sampler), self.sampler):
            if part is not None and not any(part is earlier for earlier in self.choosers):
                self.choosers.append(part)

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch to everything that has epochs, the dataset included."""
        for part in (*self.choosers, self.loader.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def generators(self) -> list[torch.Generator]:
        """The generators that the order is drawn from, besides the process's own."""
        parts = [self.loader, *self.choosers]
        if self.is_stream:  # what a map-style dataset draws is not the order
            parts += [self.loader.dataset, getattr(self.loader.dataset, "dataset", None)]
        found: list[torch.Generator] = []
        for part in parts:
            # A seedable sampler seeds its own at each pass.
            generator = None if isinstance(part, SeedableRandomSampler) else getattr(part, "generator", None)
            if isinstance(generator, torch.Generator) and not any(generator is other for other in found):
                found.append(generator)
        return found

    def kinds(self) -> tuple[str, ...]:
        """Which of the process's own generators the order may be drawn from."""
        if self.is_stream:
            return TORCH if self.loader.num_workers else ALL
        return TORCH if all(type(part) in _TORCH_ONLY for part in self.choosers) else ALL

    def share_seed(self, world: World) -> None:
        """Give a seedable sampler rank 0's seed: with other seeds, ranks would see samples twice or never."""
        sampler = self.sampler
        if not isinstance(sampler, SeedableRandomSampler) or sampler.is_shared:
            return
        from hasten.collectives.wire import wire_of

        wire = wire_of(world)
        assert wire is not None
        seed = list(sampler.initial_seed.to_bytes(9, "little", signed=True))
        sent = torch.tensor(seed, dtype=torch.uint8, device=wire.device)
        wire.broadcast(sent, 0)
        sampler.initial_seed = int.from_bytes(bytes(sent.tolist()), "little", signed=True)
        sampler.is_shared = True

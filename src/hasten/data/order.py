"""What makes the order of a loader's samples: the objects that choose them, and the generators that they draw from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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

from hasten.data.randomness import ALL, TORCH, State, rewound
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
        loader: as it is now; its sampler may be replaced between two passes, see `is_of`.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        # Not the loader itself: it keeps this object, and would wait for the garbage collector to go with it.
        self._dataset, self._batches, self._sampler = loader.dataset, loader.batch_sampler, loader.sampler
        self._inner = innermost(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        self._num_workers = loader.num_workers
        self._seeds_workers_from: torch.Generator | None = loader.generator
        self.sampler = get_sampler(loader)
        self.owns_generator: bool = getattr(loader, "owns_generator", False)
        """Whether the sampler's generator was made by us: with several ranks, for a sampler that has none with one."""
        self.is_stream = isinstance(loader.dataset, IterableDataset)
        parts = (self._batches, self._sampler, innermost(self._batches), self.sampler)
        # Each one once, by identity: samplers may compare as they like.
        self.choosers: list[Any] = list({id(part): part for part in parts if part is not None}.values())
        self._with_epochs = [part for part in (*self.choosers, self._dataset) if hasattr(part, "set_epoch")]
        # A seedable sampler seeds its own generator at each pass; what a map-style dataset draws is not the order.
        self._holders = [part for part in self.choosers if not isinstance(part, SeedableRandomSampler)]
        if self.is_stream:
            self._holders += [self._dataset, getattr(self._dataset, "dataset", None)]
        self.kinds = self._kinds()
        """Which of the process's own generators the order may be drawn from."""

    def is_of(self, loader: DataLoader[Any]) -> bool:
        """Whether the loader still has these makers."""
        batches, sampler = loader.batch_sampler, loader.sampler
        return (
            batches is self._batches
            and sampler is self._sampler
            and loader.dataset is self._dataset
            and loader.num_workers == self._num_workers
            and loader.generator is self._seeds_workers_from
            and innermost(sampler if batches is None else batches) is self._inner
            and getattr(self._inner, "sampler", self.sampler) is self.sampler
        )

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch to everything that has epochs, the dataset included."""
        for part in self._with_epochs:
            part.set_epoch(epoch)

    def generators(self) -> list[torch.Generator]:
        """The generators that the order is drawn from, besides the process's own; one that was made by us comes last."""
        found = [] if self._seeds_workers_from is None else [self._seeds_workers_from]
        for part in self._holders:
            own = getattr(part, "generator", None)
            if own is not None and isinstance(own, torch.Generator) and all(own is not one for one in found):
                found.append(own)
        if self.owns_generator:
            found.sort(key=lambda generator: generator is self.sampler.generator)
        return found

    def translated(self, state: State) -> State:
        """A loader's state, where a sampler without a generator draws otherwise on one rank than on several.

        Alone it draws from the process's generator, at first a seed; among several ranks from a generator that was made for it.
        """
        if state["owns_generator"] == self.owns_generator:
            return state
        state = {**state, "generators": list(state["generators"])}
        saved = dict(state.get("order") or {})
        if self.owns_generator:
            drawn = self._permutation(state, saved)
            saved.pop("permutation", None)
            saved["generators"] = [*saved.get("generators", ()), drawn.get_state()]
            torch.empty((), dtype=torch.int64).random_(generator=drawn)  # the next epoch has another order
            state["generators"].append(drawn.get_state())
        else:
            state["generators"].pop()
            if saved:
                saved["generators"] = list(saved["generators"])
                saved["permutation"] = saved["generators"].pop()
        return {**state, "order": saved} if state.get("order") else state

    def _permutation(self, state: State, saved: State) -> torch.Generator:
        """The generator that an order was drawn from, which one rank alone drew from the process's."""
        generator = torch.Generator()
        if "permutation" in saved:
            return generator.set_state(saved["permutation"])
        if "torch" not in saved:  # between epochs there is no order yet: what `prepare` has seeded will do
            return generator.set_state(self.sampler.generator.get_state())
        with rewound({"torch": saved["torch"]}):
            if state["draws_seed"] and self._seeds_workers_from is None:
                torch.empty((), dtype=torch.int64).random_()
            if isinstance(self.sampler, RandomSampler):
                generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
            else:
                generator.set_state(torch.get_rng_state())
        return generator

    @contextmanager
    def drawing_from(self, permutation: torch.Tensor | None) -> Iterator[None]:
        """Let the sampler draw from a generator of this state inside; from what it draws always if there is none."""
        if permutation is None:
            yield
            return
        own, self.sampler.generator = self.sampler.generator, torch.Generator()
        self.sampler.generator.set_state(permutation)
        try:
            yield
        finally:
            self.sampler.generator = own

    def _kinds(self) -> tuple[str, ...]:
        if self.is_stream:
            return TORCH if self._num_workers else ALL
        return TORCH if _TORCH_ONLY.issuperset(map(type, self.choosers)) else ALL

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
        wire.broadcast(sent, 0, name="the seed of a sampler")
        sampler.initial_seed = int.from_bytes(bytes(sent.tolist()), "little", signed=True)
        sampler.is_shared = True

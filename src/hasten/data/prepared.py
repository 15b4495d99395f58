"""What every prepared loader does: it looks one batch ahead, knows its position, and stands on the stack of running loaders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hasten.collectives.nested import send_to_device
from hasten.data.randomness import ALL, TORCH, capture, restore, rewound
from hasten.data.resume import FetchWatch, Position, Progress
from hasten.data.samplers import SeedableRandomSampler, get_sampler, innermost, set_sampler
from hasten.data.skippable import SkippableLoader
from hasten.world import torch_private
from hasten.world.context import CONTEXT
from hasten.world.process import World, current

END: Any = object()

# Samplers and batch samplers that draw from torch's generators only.
_TORCH_ONLY = {
    BatchSampler,
    RandomSampler,
    SeedableRandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    type(None),
}
# What needs no look at where it is, on a machine with nothing but a CPU.
_UNMOVED = {torch.Tensor, str, bytes, int, float, bool, type(None)}


class PreparedLoader(SkippableLoader):
    """A DataLoader whose loop knows in the body of its last batch that it is the last, and that can be continued exactly.

    Attributes:
        end_of_dataloader: whether the batch in the loop's body is the last one.
        remainder: how many samples of the last global batch are not repeated ones; 0 if all, -1 if unknown.
        device: where the batches are moved to; None leaves them where they are.
    """

    device: torch.device | None
    rng_types: list[Any] | None
    synchronized_generator: torch.Generator | None
    by_position: bool
    progress: Progress
    world: World | None
    end_of_dataloader: bool
    remainder: int
    _non_blocking: bool
    _drop_last: bool

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
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        DataLoader.__init__(self, dataset, **kwargs)
        self._finish(
            device=device,
            rng_types=rng_types,
            synchronized_generator=synchronized_generator,
            skip_batches=skip_batches,
            by_position=use_stateful_dataloader,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
            progress=Progress(iteration),
        )

    def _finish(self, **fields: Any) -> None:
        defaults = {
            "rng_types": None,
            "synchronized_generator": None,
            "skip_batches": 0,
            "by_position": False,
            "_drop_last": False,
            "_non_blocking": False,
            "world": None,
            "end_of_dataloader": False,
            "remainder": -1,
        }
        missing = {name: value for name, value in defaults.items() if name not in self.__dict__}
        super()._finish(**{**missing, **fields})

    # -- one pass ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        progress, outer = self.progress, (self.progress.position, self.end_of_dataloader, self.remainder)
        skip, resumed = progress.take_pending(self.skip_batches, self.by_position)
        if skip is None:
            self.skip_batches = 0
            return
        position = progress.position = Position(batches=skip)
        self.end_of_dataloader, self.remainder = False, self._remainder_at_start()
        self._tell_epoch(progress.iteration)
        CONTEXT.loaders.push(self)
        try:
            batches, batch = self._begin(position, resumed)
            device, non_blocking = self.device, self._non_blocking
            if device is not None and _stays(batch, device):
                device = None
            watch = FetchWatch(progress, position) if self._fetches_here() and progress.fetch_kinds != () else None
            while batch is not END:
                if device is not None:
                    batch = send_to_device(batch, device, non_blocking)
                if watch is not None:
                    watch.before()
                following = next(batches, END)
                if watch is not None and not watch.after():
                    watch = None
                if following is END:
                    position.last = self.end_of_dataloader = True
                    self.remainder = self._remainder_at_end()
                position.batches += 1
                yield batch
                batch = following
            progress.position = None
            progress.iteration += position.batches > 0
        finally:
            CONTEXT.loaders.remove(self)
            self._leave(position, outer)

    def _leave(self, position: Position, outer: tuple[Position | None, bool, int]) -> None:
        """Forget what belonged to this pass alone; a loop around it over the same loader goes on where it was."""
        self.skip_batches = self.indices.start = 0
        position.running = False
        if outer[0] is not None and outer[0].running:
            self.progress.position, self.end_of_dataloader, self.remainder = outer

    def _begin(self, position: Position, resumed: dict[str, Any] | None) -> tuple[Iterator[Any], Any]:
        """Draw the order of the pass, or draw that of an interrupted pass again; returns the batches and the first of them."""
        generators = self._generators()
        if resumed is None:
            self._synchronize()
            position.order = capture(self._order_kinds(), generators)
            batches = self._open(position.batches)
            return batches, next(batches, END)
        # What the checkpoint restored stays as it is: an uninterrupted run would not draw now.
        ahead = resumed["ahead"] if position.batches == resumed["batches"] else None
        with rewound(resumed["order"], generators):
            self._synchronize()
            position.order = capture(self._order_kinds(), generators)
            self.indices.holds = True
            batches = self._open(position.batches)
            if self.is_iterable or not self.indices.draw(self._batches_per_step()):
                if ahead is not None:
                    restore(ahead)
                return batches, next(batches, END)
        if ahead is None:
            return batches, next(batches, END)
        with rewound(ahead):
            return batches, next(batches, END)

    def _open(self, skip: int) -> Iterator[Any]:
        """This rank's batches, from a reader whose workers draw a seed only if an uninterrupted run would."""
        if not self.progress.keeps_workers or torch_private.keeps_workers(self):
            return self._deliveries(skip)
        own, self.generator = self.generator, torch.Generator()
        self.generator.set_state(torch.get_rng_state())
        try:
            return self._deliveries(skip)
        finally:
            self.generator = own

    def _deliveries(self, skip: int) -> Iterator[Any]:
        return self.read(skip)

    def _batches_per_step(self) -> int:
        """Batches that are read for one step of the loop."""
        return 1

    def _fetches_here(self) -> bool:
        """Whether this process itself loads the samples."""
        return self.num_workers == 0

    def _synchronize(self) -> None:
        """Give all ranks the random state of the first."""
        world = self.world or current()
        if self.rng_types and world.size > 1:
            from hasten.world import rng

            rng.synchronize_rng_states(self.rng_types, self.synchronized_generator)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _remainder_at_start(self) -> int:
        return -1

    def _remainder_at_end(self) -> int:
        return self.remainder

    # -- epochs and positions ----------------------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """The epoch of the running or the next pass: complete passes are counted."""
        return self.progress.iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        self.progress.iteration = value

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, also for the samplers and the dataset."""
        self.progress.set_epoch(epoch)
        self._tell_epoch(epoch)

    def _order_parts(self) -> list[Any]:
        """The objects that make the order: batch samplers, samplers and the dataset, each once."""
        parts: list[Any] = []
        for part in (self.batch_sampler, self.sampler, innermost(self.batch_sampler), get_sampler(self), self.dataset):
            if part is not None and not any(part is earlier for earlier in parts):
                parts.append(part)
        return parts

    def _tell_epoch(self, epoch: int) -> None:
        for part in self._order_parts():
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def _generators(self) -> list[torch.Generator]:
        """The generators that the order is drawn from, besides the process's own."""
        parts = [self, *self._order_parts()]
        if self.is_iterable:
            parts.append(getattr(self.dataset, "dataset", None))
        else:
            parts.pop()  # what a map-style dataset draws is not the order
        found: list[torch.Generator] = []
        for part in parts:
            # A seedable sampler seeds its own at each pass.
            generator = None if isinstance(part, SeedableRandomSampler) else getattr(part, "generator", None)
            if isinstance(generator, torch.Generator) and not any(generator is other for other in found):
                found.append(generator)
        return found

    def _order_kinds(self) -> tuple[str, ...]:
        """The kinds of generators that the order may be drawn from."""
        if self.is_iterable:
            return TORCH if self.num_workers else ALL
        kinds = {type(innermost(self.batch_sampler)), type(get_sampler(self))}
        return TORCH if kinds <= _TORCH_ONLY else ALL

    def state_dict(self) -> dict[str, Any]:
        """The position: the epoch, the batches and samples handed out in it, and the random states that its order came from.

        Right at any moment, also in the loop's body although the next batch has been fetched already. Tensors, numbers,
        strings, lists and dictionaries only.
        """
        state = self.progress.save()
        sampler, size, length = get_sampler(self), self.total_batch_size, self._samples_per_pass()
        samples = -1 if size is None else state["batches"] * size
        state["samples"] = samples if length is None or samples < 0 else min(samples, length)
        state["generators"] = [generator.get_state() for generator in self._generators()]
        state["seed"] = sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None
        state["keeps_workers"] = self.progress.keeps_workers or torch_private.keeps_workers(self)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a position: the next pass has the order of the interrupted one.

        `skip_first_batches(loader, n)` leaves out what was seen already; loaders with `use_stateful_dataloader` do so by
        themselves. The process's own generators are left alone. A position between epochs changes only the epoch.

        Raises:
            ValueError: the state is not that of a prepared loader, or of one with other generators.
        """
        generators = self._generators()
        if "iteration" not in state_dict or len(state_dict.get("generators", ())) != len(generators):
            raise ValueError(
                f"This is not the state of a loader like this one: it has {sorted(state_dict)} with "
                f"{len(state_dict.get('generators', ()))} generators, the loader has {len(generators)}. Build the loader with "
                "the same sampler and `generator` as when the state was saved, and prepare it in the same order."
            )
        self.progress.load(state_dict)
        self.progress.keeps_workers = state_dict["keeps_workers"]
        for generator, value in zip(generators, state_dict["generators"], strict=True):
            generator.set_state(value)
        sampler = get_sampler(self)
        if isinstance(sampler, SeedableRandomSampler) and state_dict["seed"] is not None:
            sampler.initial_seed = state_dict["seed"]

    # -- sizes -------------------------------------------------------------------------------------------------------

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a step over all ranks; None if batches have no fixed size."""
        return self.batch_size

    @property
    def total_dataset_length(self) -> int:
        """Samples of the whole dataset.

        Raises:
            TypeError: the dataset has no length.
        """
        return len(self.dataset)  # type: ignore[arg-type]

    def _samples_per_pass(self) -> int | None:
        """Samples that a pass over all ranks hands out, repeated ones not counted; None if unknown."""
        try:
            return len(self.dataset if self.is_iterable else get_sampler(self))  # type: ignore[arg-type]
        except TypeError:
            return None

    def get_sampler(self) -> Sampler[Any] | None:
        """The sampler that chooses the samples; None if there is none."""
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Choose the samples by another sampler."""
        set_sampler(self, sampler)

    def _picklable(self) -> dict[str, Any]:
        return {**super()._picklable(), "world": None, "progress": Progress(self.iteration)}


def _stays(batch: Any, device: torch.device) -> bool:
    """Whether neither this batch nor others of its form can be anywhere else: there is only the CPU."""
    if device.type != "cpu" or torch.accelerator.is_available():
        return False
    leaves = batch.values() if type(batch) is dict else batch if type(batch) in (list, tuple) else (batch,)
    return all(type(leaf) in _UNMOVED for leaf in leaves)

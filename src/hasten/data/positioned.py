"""A loader's place: its epoch and its position, as a state that means the same on any number of ranks."""

from __future__ import annotations

import warnings
from typing import Any

from torch.utils.data import BatchSampler, Sampler

from hasten.data.lineage import loses_samples
from hasten.data.order import Order
from hasten.data.randomness import State
from hasten.data.resume import ENDING, RUNNING, Count, Progress
from hasten.data.samplers import SeedableRandomSampler, get_sampler, set_sampler
from hasten.data.skippable import SkippableLoader
from hasten.world import torch_private
from hasten.world.process import World, current


class PositionedLoader(SkippableLoader):
    """A DataLoader that knows its epoch and its position, can say them, and can be put in a position that was said."""

    progress: Progress
    by_position: bool
    world: World | None
    _order: Order | None

    def _order_now(self) -> Order:
        """The makers of the order, looked for again if one of them has been replaced."""
        if self._order is None or not self._order.is_of(self):
            self._order = Order(self)
        return self._order

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
        self._order_now().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position: the epoch, the batches and samples handed out in it, and the random states that its order came from.

        Right at any moment, also in the loop's body although the next batch has been fetched already. Tensors, numbers,
        strings, lists and dictionaries only.
        """
        state = self.progress.save()
        order, count = self._order_now(), self._count()
        state["counts"], state["done"] = count.what, state["offset"] + state["batches"] * count.per_step
        state["samples"] = self._samples_after(state["done"], count)
        if state["status"] == ENDING and self._others_go_on(state["done"], count):
            state["status"] = RUNNING  # the ranks must agree on the pass in which they go on
        state["batch"], state["reading"] = self._batch_of(count), self._reading()
        state["length"] = self._length()
        state["ranks"], state["is_own_part"] = (self.world or current()).size, self._is_own_part()
        state["owns_generator"] = order.owns_generator
        state["generators"] = [generator.get_state() for generator in order.generators()]
        state["seed"] = order.sampler.initial_seed if isinstance(order.sampler, SeedableRandomSampler) else None
        state["keeps_workers"] = self.progress.keeps_workers or torch_private.keeps_workers(self)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a position: the next pass has the order of the interrupted one.

        `skip_first_batches(loader, n)` leaves out what was seen already; loaders with `use_stateful_dataloader` do so by
        themselves. The process's own generators are left alone. A position between epochs changes only the epoch.

        Raises:
            ValueError: the state is not that of a prepared loader, or of one with other generators.
        """
        order = self._order_now()
        generators = order.generators()
        if {"iteration", "status", "generators", "owns_generator"} <= state_dict.keys():
            state_dict = order.translated(state_dict)
        if not {"iteration", "status"} <= state_dict.keys() or len(state_dict.get("generators", ())) != len(generators):
            raise ValueError(
                f"This is not the state of a loader like this one: it has {sorted(state_dict)} with "
                f"{len(state_dict.get('generators', ()))} generators, the loader has {len(generators)}. Build the loader with "
                "the same sampler and `generator` as when the state was saved, and prepare it in the same place."
            )
        self.progress.load(state_dict)
        if self.progress.pending is not None:
            self._compare(state_dict)
        self.progress.keeps_workers = state_dict["keeps_workers"]
        for generator, value in zip(generators, state_dict["generators"], strict=True):
            generator.set_state(value)
        if isinstance(order.sampler, SeedableRandomSampler) and state_dict["seed"] is not None:
            order.sampler.initial_seed = state_dict["seed"]

    def _compare(self, state: State) -> None:
        """Say what has changed, so that the rest of an epoch can not be that of the interrupted one."""
        length, saved, reading = self._length(), state.get("length", -1), self._reading()
        if not self.by_position and state.get("reading", reading) != reading:
            warnings.warn(_other_places(state["reading"], reading), stacklevel=3)
        if -1 not in (length, saved) and length != saved and not self._is_own_part():
            warnings.warn(
                f"The dataset had {saved} samples when the position was saved, and has {length}: the rest of the interrupted epoch "
                "will have other samples, or another order. `loader.set_epoch(loader.iteration + 1)` leaves it out.",
                stacklevel=3,
            )

    def _count(self) -> Count:
        """How the positions of this loader are counted: by samples if a pass can begin at any of them."""
        batches = self.indices.batches
        if self.is_iterable:
            return Count("samples", self.batch_size or 1)
        if type(batches) is BatchSampler:
            return Count("samples", batches.batch_size)
        single = self.batch_sampler is None and not isinstance(batches, BatchSampler)
        return Count("samples" if single else "batches", 1)

    def _others_go_on(self, done: int, count: Count) -> bool:
        """Whether other ranks have batches after so much of a pass, the end of which is this rank's last batch."""
        return False

    def _samples_after(self, done: int, count: Count) -> int:
        """The samples that so much of a pass has, those of all ranks, repeated ones not counted; -1 if unknown."""
        size, length = self.total_batch_size, self._samples_per_pass()
        if size is None:
            return -1
        samples = done if count.what == "samples" else done * size // count.per_step
        return samples if length is None else min(samples, length)

    def _reading(self) -> list[int]:
        """What the order of a stream depends on that several workers read: how many they are, and what each one reads at a time."""
        several = self.is_iterable and self.num_workers > 1
        return [self.num_workers, self._read_size()] if several else []

    def _read_size(self) -> int:
        return self.batch_size or 1

    def _batch_of(self, count: Count) -> int:
        """Samples of what is counted; -1 if unknown."""
        size = self.total_batch_size
        return -1 if size is None else size // count.per_step

    def _find(self, state: State) -> tuple[int, int]:
        """The offset and the batches before a saved position, also if the number of ranks has changed."""
        reading = self._reading()
        if state.get("reading", reading) != reading:
            raise ValueError(_other_places(state["reading"], reading))
        count = self._count()
        done, offset = self._done(state, count), state["offset"] if state["counts"] == count.what else 0
        for start in (0, offset):
            steps, rest = divmod(done - start, count.per_step)
            if rest == 0 and steps >= 0:
                return start, steps
        return done, 0

    def _done(self, state: State, count: Count) -> int:
        size = self._batch_of(count)
        if state["counts"] == count.what and (count.what == "samples" or state.get("batch", size) == size):
            return state["done"]
        if count.what == "samples" and state["samples"] >= 0:
            return state["samples"]
        if count.what == "batches" and size > 0 and state["samples"] >= 0 and state["samples"] % size == 0:
            return state["samples"] // size
        raise NotImplementedError(
            f"The saved position, after {state['done']} {state['counts']}{_of(state.get('batch', -1))}, can not be found by "
            f"counting {count.what}{_of(size)}. Prepare the loader as it was prepared when the position was saved (same kind of "
            "batch sampler, `dispatch_batches`, batch size)."
        )

    def _leave_out(self, offset: int) -> None:
        """Let the next pass begin after so much of its order; 0 for a whole pass."""
        self.indices.offset = offset

    def _data_source(self) -> Any:
        """What keeps the place in a stream: the user's own loader class, or the dataset that this process reads; or None."""
        if not self.is_iterable or loses_samples(self.whole_dataset):
            return None
        own = super()
        if hasattr(own, "state_dict"):  # StatefulDataLoader of torchdata
            return own
        whole = self.whole_dataset
        return whole if self._fetches_here() and hasattr(whole, "state_dict") else None

    def _is_own_part(self) -> bool:
        """Whether this rank reads data that are not a known part of the whole: then a position means something to it alone."""
        return False

    def _fetches_here(self) -> bool:
        """Whether this process itself loads the samples."""
        return self.num_workers == 0

    # -- sizes -------------------------------------------------------------------------------------------------------

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a step over all ranks; None if batches have no fixed size."""
        return self.batch_size

    @property
    def whole_dataset(self) -> Any:
        """The user's dataset, also where `dataset` is this rank's shard of it."""
        return self.dataset

    @property
    def total_dataset_length(self) -> int:
        """Samples of the whole dataset, all ranks together.

        Raises:
            TypeError: the dataset has no length.
        """
        return len(self.whole_dataset)

    def _length(self) -> int:
        """Samples of the whole dataset; -1 if it has no length."""
        try:
            return self.total_dataset_length
        except TypeError:
            return -1

    def _samples_per_pass(self) -> int | None:
        """Samples that a pass over all ranks hands out, repeated ones not counted; None if unknown."""
        try:
            return self.total_dataset_length if self.is_iterable else len(get_sampler(self))
        except TypeError:
            return None

    def get_sampler(self) -> Sampler[Any] | None:
        """The sampler that chooses the samples; None if there is none."""
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Choose the samples by another sampler."""
        set_sampler(self, sampler)

    def _picklable(self) -> dict[str, Any]:
        return {**super()._picklable(), "world": None, "progress": Progress(self.iteration), "_order": None}


def _other_places(saved: list[int], now: list[int]) -> str:
    return (
        "The saved position can not be found: when several workers read a stream, each has a place of its own, which depends on "
        "the number of workers, the batch size and the number of processes. Workers and samples that one reads at a time were "
        f"{saved or 'those of one reader'} and are {now or 'those of one reader'}. Use the same again, or begin another epoch "
        "with `loader.set_epoch(...)`."
    )


def _of(size: int) -> str:
    return f" of {size}" if size > 1 else ""

"""What every prepared loader does: it looks one batch ahead, knows its position, and stands on the stack of running loaders."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

from hasten.collectives.nested import send_to_device
from hasten.data.order import Order
from hasten.data.randomness import State, capture, restore, rewound
from hasten.data.resume import Count, FetchWatch, Position, Progress
from hasten.data.samplers import SeedableRandomSampler, get_sampler, set_sampler
from hasten.data.sharding import REPLICATE, SHARD
from hasten.data.skippable import SkippableLoader
from hasten.world import torch_private
from hasten.world.context import CONTEXT
from hasten.world.process import World, current

END: Any = object()

# What needs no look at where it is, on a machine with nothing but a CPU.
_UNMOVED = {torch.Tensor, str, bytes, int, float, bool, type(None)}


class PreparedLoader(SkippableLoader):
    """A DataLoader whose loop knows in the body of its last batch that it is the last, and that can be continued exactly.

    Attributes:
        end_of_dataloader: whether the batch in the loop's body is the last one.
        device: where the batches are moved to; None leaves them where they are.
    """

    device: torch.device | None
    rng_types: list[Any] | None
    synchronized_generator: torch.Generator | None
    owns_generator: bool
    by_position: bool
    sharding: str
    progress: Progress
    world: World | None
    end_of_dataloader: bool
    _remainder: int | None
    _order: Order | None
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
            "owns_generator": False,
            "sharding": SHARD,
            "synchronized_generator": None,
            "skip_batches": 0,
            "by_position": False,
            "_drop_last": False,
            "_non_blocking": False,
            "world": None,
            "end_of_dataloader": False,
            "_remainder": -1,
        }
        missing = {name: value for name, value in defaults.items() if name not in self.__dict__}
        super()._finish(**{**missing, **fields, "_order": None})

    def _order_now(self) -> Order:
        """The makers of the order, looked for again if one of them has been replaced."""
        if self._order is None or not self._order.is_of(self):
            self._order = Order(self)
        return self._order

    # -- one pass ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        progress, outer = self.progress, (self.progress.position, self.end_of_dataloader, self._remainder)
        offset, skipped, resumed = 0, self.skip_batches, None
        if progress.pending is not None:
            begin = progress.take_pending(skipped, self._find if self.by_position else None)
            if begin is None:
                self.skip_batches = 0
                return
            offset, skipped, resumed = begin
        position = progress.position = Position(offset, skipped)
        if offset:
            self._leave_out(offset)
        self.end_of_dataloader, self._remainder = False, None
        order = self._order_now()
        order.set_epoch(progress.iteration)
        CONTEXT.loaders.push(self)
        try:
            batches, batch = self._begin(order, position, resumed)
            if batch is not END:
                batches, batch = self._on_the_way(batches, batch, position)
                for following in batches:
                    position.batches += 1
                    yield batch
                    batch = following
                position.last = self.end_of_dataloader = True
                self._remainder = None
                position.batches += 1
                yield batch
            progress.position = None
            progress.iteration += position.batches > 0
        finally:
            CONTEXT.loaders.remove(self)
            self._leave(position, outer)

    def _on_the_way(self, batches: Iterator[Any], first: Any, position: Position) -> tuple[Iterator[Any], Any]:
        """The batches and the first of them, watched if need be, each on the device as soon as it is fetched."""
        if self.progress.fetch_kinds != () and self._fetches_here():
            batches = FetchWatch(self.progress, position).over(batches)
        source = self._data_source() if self.by_position else None
        if source is not None:
            batches = _noting_state(batches, source, position)
        if self.device is None or _stays(first, self.device):
            return batches, first
        move = partial(send_to_device, device=self.device, non_blocking=self._non_blocking)
        return map(move, batches), move(first)

    def _leave(self, position: Position, outer: tuple[Position | None, bool, int | None]) -> None:
        """Forget what belonged to this pass alone; a loop around it over the same loader goes on where it was."""
        self.skip_batches = self.indices.start = 0
        if position.offset:
            self._leave_out(0)
        self.indices.holds = position.running = False
        if outer[0] is not None and outer[0].running:
            self.progress.position, self.end_of_dataloader, self._remainder = outer

    def _begin(self, order: Order, position: Position, resumed: State | None) -> tuple[Iterator[Any], Any]:
        """Draw the order of the pass, or draw that of an interrupted pass again; returns the batches and the first of them."""
        generators, kinds = order.generators(), self._kinds(order)
        if resumed is None:
            self._synchronize(order)
            position.order = capture(kinds, generators)
            position.draws_seed = not (self.progress.keeps_workers or torch_private.keeps_workers(self))
            batches = self._open(position, position.batches)
            return batches, next(batches, END)
        ahead = resumed["ahead"] if position.batches == resumed["batches"] else None
        # What the checkpoint restored stays as it is: an uninterrupted run would not draw the order now.
        drawn = {**(ahead or {}), **resumed["order"]}
        permutation = drawn.pop("permutation", None)
        with rewound(drawn, generators), order.drawing_from(permutation):
            self._synchronize(order)
            position.order, position.draws_seed = capture(kinds, generators), resumed["draws_seed"]
            if permutation is not None:
                position.order["permutation"] = permutation
            self.indices.holds = True
            batches = self._open(position, skip=0 if self._restore_data(resumed, position) else position.batches)
            if self.is_iterable:
                return batches, _fetch_again(batches, ahead)
            if not self.indices.draw(self._batches_per_step(), otherwise=lambda: restore(ahead or {})):
                return batches, next(batches, END)
            self._after_order()
        return batches, _fetch_again(batches, ahead)

    def _data_source(self) -> Any:
        """What keeps the place in a stream: the user's own loader class, or the dataset that this process reads; or None."""
        if not self.is_iterable:
            return None
        own = super()
        if hasattr(own, "state_dict"):  # StatefulDataLoader of torchdata
            return own
        whole = self.whole_dataset
        return whole if self._fetches_here() and hasattr(whole, "state_dict") else None

    def _is_own_part(self) -> bool:
        """Whether this rank reads data that are not a known part of the whole: then a position means something to it alone."""
        return False

    def _restore_data(self, resumed: State, position: Position) -> bool:
        """Put the stream in the place that a position has noted, if it fits; then nothing is read and dropped."""
        source = self._data_source() if resumed.get("data") is not None else None
        fits = self.by_position or position.batches == resumed["batches"]
        if source is None or not fits:
            return False
        source.load_state_dict(copy.deepcopy(resumed["data"]))
        self._leave_out(0)
        return True

    def _open(self, position: Position, skip: int) -> Iterator[Any]:
        """This rank's batches; the workers that are started for them draw a seed only if an uninterrupted run does."""
        if position.draws_seed or torch_private.keeps_workers(self):
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

    def _kinds(self, order: Order) -> tuple[str, ...]:
        """Which of the process's generators must be put back to begin the pass again."""
        return order.kinds

    def _after_order(self) -> None:
        """Do what must be done again right after the order has been drawn again."""

    def _fetches_here(self) -> bool:
        """Whether this process itself loads the samples."""
        return self.num_workers == 0

    def _synchronize(self, order: Order) -> None:
        """Give all ranks the random state of the first."""
        world = self.world or current()
        if self.rng_types is None or world.size == 1:
            return
        if self.rng_types:
            from hasten.world import rng

            rng.synchronize_rng_states(self.rng_types, self.synchronized_generator, world=world)
        order.share_seed(world)

    # -- the end -----------------------------------------------------------------------------------------------------

    @property
    def remainder(self) -> int:
        """How many samples of the last global batch are not repeated ones; 0 if all, -1 if unknown.

        Counted when it is asked for: most passes never are.
        """
        if self._remainder is None:
            self._remainder = self._remainder_at_end() if self.end_of_dataloader else self._remainder_at_start()
        return self._remainder

    def _remainder_at_start(self) -> int:
        return -1

    def _remainder_at_end(self) -> int:
        return self._remainder_at_start()

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
        self.progress.keeps_workers = state_dict["keeps_workers"]
        for generator, value in zip(generators, state_dict["generators"], strict=True):
            generator.set_state(value)
        if isinstance(order.sampler, SeedableRandomSampler) and state_dict["seed"] is not None:
            order.sampler.initial_seed = state_dict["seed"]

    def _count(self) -> Count:
        """How the positions of this loader are counted: by samples if a pass can begin at any of them."""
        batches = self.indices.batches
        if self.is_iterable:
            return Count("samples", self.batch_size or 1)
        if type(batches) is BatchSampler:
            return Count("samples", batches.batch_size)
        single = self.batch_sampler is None and not isinstance(batches, BatchSampler)
        return Count("samples" if single else "batches", 1)

    def _samples_after(self, done: int, count: Count) -> int:
        """The samples that so much of a pass has, those of all ranks, repeated ones not counted; -1 if unknown."""
        size, length = self.total_batch_size, self._samples_per_pass()
        if size is None:
            return -1
        samples = done if count.what == "samples" else done * size // count.per_step
        return samples if length is None else min(samples, length)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank gets all of the data."""
        return self.sharding == REPLICATE

    @property
    def padded_ranks(self) -> int:
        """In the last step, this many ranks, the last ones, have a repeated sample at the end of their batch."""
        return 0

    def _find(self, state: State) -> tuple[int, int]:
        """The offset and the batches before a saved position, also if the number of ranks has changed."""
        count = self._count()
        done, offset = self._done(state, count), state["offset"] if state["counts"] == count.what else 0
        for start in (0, offset):
            steps, rest = divmod(done - start, count.per_step)
            if rest == 0 and steps >= 0:
                return start, steps
        return done, 0

    def _done(self, state: State, count: Count) -> int:
        if state["counts"] == count.what:
            return state["done"]
        size = None if self.total_batch_size is None else self.total_batch_size // count.per_step
        if count.what == "samples" and state["samples"] >= 0:
            return state["samples"]
        if count.what == "batches" and size and state["samples"] >= 0 and state["samples"] % size == 0:
            return state["samples"] // size
        raise NotImplementedError(
            f"The saved position, after {state['done']} {state['counts']}, can not be found by counting {count.what}. Prepare the "
            "loader as it was prepared when the position was saved (same kind of batch sampler, `dispatch_batches`, batch size)."
        )

    def _leave_out(self, offset: int) -> None:
        """Let the next pass begin after so much of its order; 0 for a whole pass."""
        self.indices.offset = offset

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


def _noting_state(batches: Iterator[Any], source: Any, position: Position) -> Iterator[Any]:
    """The same batches; before each of them is fetched, the state of where they come from is noted."""
    while True:
        position.data = copy.deepcopy(source.state_dict())
        batch = next(batches, END)
        if batch is END:
            return
        yield batch


def _fetch_again(batches: Iterator[Any], ahead: State | None) -> Any:
    """The batch that an interrupted pass had fetched ahead, from the random state that it was fetched from."""
    with nullcontext() if ahead is None else rewound(ahead):
        return next(batches, END)


def _stays(batch: Any, device: torch.device) -> bool:
    """Whether neither this batch nor others of its form can be anywhere else: there is only the CPU."""
    leaves = batch.values() if type(batch) is dict else batch if type(batch) in (list, tuple) else (batch,)
    return _UNMOVED.issuperset(map(type, leaves)) and _is_only_place(device)


@cache
def _is_only_place(device: torch.device) -> bool:
    # Asked once: torch takes ten microseconds to tell the type of a device.
    return device.type == "cpu" and not torch.accelerator.is_available()

"""A loader that only rank 0 reads: it sends every other rank its batches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, default_convert

from hasten.data.delivery import Delivery, Message
from hasten.data.order import Order
from hasten.data.package import Package
from hasten.data.prepared import PreparedLoader
from hasten.data.randomness import ALL, Glance, capture, rewound
from hasten.data.read_ahead import ReadAhead
from hasten.data.resume import Count
from hasten.data.shard import data_part
from hasten.data.steps import Step, Steps
from hasten.world.process import World, current

T = TypeVar("T")

_READS_IN_THE_LOOP = (
    "`read_ahead` has no effect on this loader: its data are read between the loop's steps, because {}. In another thread the "
    "numbers would be others. {}"
)
_DRAWS = (
    "reading draws from the process's random generators (torch, random or numpy), as the loop may, too",
    "Draw from a generator of the dataset's own, or read with `num_workers`.",
)
_GENERATOR = (
    "the order is drawn from a generator of its own, whose state is part of the loader's state",
    "Leave out `generator`, or shuffle with `use_seedable_sampler=True`.",
)
_POSITION = (
    "the dataset is asked for its state before each step, to continue there",
    "Continue by skipping (`resume='order'`), or read with `num_workers`.",
)


class DataLoaderDispatcher(PreparedLoader):
    """A loader that rank 0 reads for all ranks.

    A step reads one batch per part of the data and gives each rank a whole one, whatever it holds; or, with `split_batches`,
    one batch that is cut into parts. What is read for an incomplete last step is divided evenly and completed with the first
    rows of the pass; batches that can not be divided are given whole, to the first ranks, and the first batch to the rest.
    An error while reading is raised on every rank.

    One step is always read and sent before the loop needs it. With `read_ahead` rank 0 also reads, divides and packs the step
    after that, in a thread, while the loop's body runs: a step then takes as long as the slower of the two. The dataset, the
    samplers, `collate_fn` and `slice_fn` are called in that thread, so they must not depend on what the body does (a model that
    it trains, an attribute or an epoch that it sets), and must bear being called while it runs. What is known to depend on it is
    read without a thread, and a warning says so: reading that draws from the process's random generators (as the second step
    of the pass shows), orders with a generator of their own, and datasets that are asked for their place. So the samples, and
    a pass continued from a checkpoint, are the same with and without. Leaving the loop waits for the step that is being read;
    it is dropped, as is the one before it.

    Args:
        dataset: the dataset; only rank 0 reads it.
        split_batches: cut each batch into one part per rank.
        skip_batches: steps to leave out in the first pass.
        use_stateful_dataloader: continue by itself at the position that `load_state_dict` was given.
        slice_fn: cuts a rank's part out of all that was read for a step.
        torch_device_mesh: see `prepare_data_loader`.
        iteration: the epoch of the first pass.
        read_ahead: read the next step while the loop's body runs, see above.
        kwargs: those of `torch.utils.data.DataLoader`.
    """

    split_batches: bool
    slice_fn: Callable[..., Any] | None
    parts: int
    read_ahead: bool

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        *,
        read_ahead: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            current().device,
            None,
            None,
            skip_batches,
            use_stateful_dataloader,
            _drop_last,
            _non_blocking,
            iteration,
            **kwargs,
        )
        self.split_batches = split_batches
        self.slice_fn = slice_fn
        self.parts = data_part(0, current().size, torch_device_mesh)[1]
        self.read_ahead = read_ahead

    def _finish(self, **fields: Any) -> None:
        missing = {} if "read_ahead" in self.__dict__ else {"read_ahead": False}
        super()._finish(**{**missing, **fields})
        self._real, self._uneven = 0, (False, False)

    @property
    def _world(self) -> World:
        return self.world or current()

    @property
    def _steps(self) -> Steps:
        return Steps(
            parts=self.parts,
            split=self.split_batches,
            drop_last=self._drop_last,
            batch_size=getattr(self.indices.batches, "batch_size", self.batch_size),
            samples=None if self.is_iterable else self._samples_per_pass(),
            slice_fn=self.slice_fn,
        )

    def _batches_per_step(self) -> int:
        return self._steps.number

    def _fetches_here(self) -> bool:
        return self.num_workers == 0 and self._world.is_main

    def _kinds(self, order: Order) -> tuple[str, ...]:
        return ALL if self._fetches_here() else order.kinds

    def _after_order(self) -> None:
        if self.indices.first is not None:
            self._first_batch()  # an uninterrupted run loaded it first, with what it draws

    # -- reading and sending -----------------------------------------------------------------------------------------

    def _note(self, real: int, uneven: bool) -> None:
        """Remember what is known of the rows that have come, and of those before, which are in the loop's body now."""
        self._real, self._uneven = real, (self._uneven[1], uneven)

    @property
    def has_uneven_rows(self) -> bool:
        """Whether the ranks' batches in the loop's body have different lengths."""
        return self._uneven[self.end_of_dataloader]

    def _deliveries(self, skip: int) -> Iterator[Any]:
        self._real = 0
        if not self._world.is_main:
            torch.empty((), dtype=torch.int64).random_()  # the seed that reading draws on rank 0
            return self._received()
        alone = self._world.size == 1
        try:
            number = skip * self._batches_per_step() + (self.indices.offset if self.is_iterable else 0)
            batches = self._read_after(number, noting_first=not alone)
        except Exception as error:
            if not alone:
                Delivery(self._world).send_error(error)
            raise
        if alone:
            return self._ahead(batches) if self.read_ahead else batches
        return self._sent(self._steps.divide(batches, self._first_batch if skip or self.indices.offset else None))

    def _read_after(self, number: int, noting_first: bool) -> Iterator[Any]:
        """The batches after so many. The very first one is noted: its rows complete the last step."""
        self._first, self.indices.first, self.indices.notes_first = None, None, noting_first
        if number == 0 or not self.is_iterable:
            return self.read(number)
        batches = self.read(0)
        self._first = next(batches, None)
        next(islice(batches, number - 1, number - 1), None)
        return batches

    def _first_batch(self) -> Any:
        if self._first is None:
            # It was skipped by index; loading it now must not draw in the place of another batch.
            with rewound(capture(ALL)):
                self._first = self._load(self.indices.first)
        return self._first

    def _load(self, indices: Any) -> Any:
        """The batch of these indices, or the item of the one index of a loader that does not batch."""
        if self.batch_sampler is None:
            items = self.dataset[indices]
        elif hasattr(self.dataset, "__getitems__"):
            items = self.dataset.__getitems__(indices)
        else:
            items = [self.dataset[index] for index in indices]
        return (self.collate_fn or default_convert)(items)

    def _sent(self, steps: Iterator[Step]) -> Iterator[Any]:
        """Rank 0's own batches, after the others' are sent."""
        delivery = Delivery(self._world)
        packed = self._packed(steps, delivery)
        with closing(self._ahead(packed) if self.read_ahead else packed) as packed:
            yield from self._send_each(packed, delivery)

    def _send_each(self, packed: Iterator[tuple[Any, Message, int, bool]], delivery: Delivery) -> Iterator[Any]:
        while True:
            try:
                step = next(packed, None)
            except Exception as error:
                delivery.send_error(error)
                raise
            if step is None:
                delivery.send_end()
                return
            own, message, real, uneven = step
            self._note(real, uneven)
            delivery.send(message)
            del message, step
            yield own

    def _packed(
        self, steps: Iterator[Step], delivery: Delivery
    ) -> Generator[tuple[Any, Message, int, bool], None, None]:
        """For each step rank 0's own batch, the message to the others, and what is known of the rows."""
        ranks = self._world.size
        wanted = [rank * self.parts // ranks for rank in range(1, ranks)]
        for parts, real, uneven in steps:
            packages = {part: Package(parts[part]) for part in set(wanted)}
            note = real << 1 | uneven
            yield parts[0], delivery.message([packages[part] for part in wanted], note), real, uneven

    def _ahead(self, items: Iterator[T]) -> Generator[T, None, None]:
        """The same items, read in a thread from the third on, if that makes no difference."""
        yield from islice(items, 1)  # with it the order is drawn
        before = Glance(ALL)
        second = list(islice(items, 1))
        draws = bool(before.changed())
        if not second:
            return
        reason = _DRAWS if draws else self._reason_to_read_in_the_loop()
        if reason is not None:
            warnings.warn(_READS_IN_THE_LOOP.format(*reason), stacklevel=2)
            yield from chain(second, items)
            return
        if self.indices.first is not None:
            self._first_batch()  # puts the random generators back, which only this thread may
        timeout = self._world.timeout
        reader = ReadAhead(items, None if timeout is None else timeout.total_seconds())
        try:
            yield from chain(second, reader)
        finally:
            reader.close()

    def _reason_to_read_in_the_loop(self) -> tuple[str, str] | None:
        if self._order_now().generators():
            return _GENERATOR
        return _POSITION if self.by_position and self._data_source() is not None else None

    def _received(self) -> Iterator[Any]:
        delivery = Delivery(self._world)
        while (item := delivery.receive()) is not None:
            batch, note = item
            self._note(note >> 1, bool(note & 1))
            yield batch

    def _count(self) -> Count:
        batches, number = self.indices.batches, self._batches_per_step()
        if not self.is_iterable and type(batches) is BatchSampler:
            return Count("samples", number * batches.batch_size)
        return Count("batches", number)

    # -- sizes -------------------------------------------------------------------------------------------------------

    def _remainder_at_end(self) -> int:
        return -1 if self._drop_last else self._real

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a step over all ranks; None if batches have no fixed size."""
        size = getattr(self.indices.batches, "batch_size", self.batch_size)
        return None if size is None else size * self._batches_per_step()

    def __len__(self) -> int:
        skip, self.skip_batches = self.skip_batches, 0
        try:
            batches = super().__len__()
        finally:
            self.skip_batches = skip
        number = self._batches_per_step()
        return max(0, (batches // number if self._drop_last else math.ceil(batches / number)) - skip)

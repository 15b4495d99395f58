"""A loader that only rank 0 reads: it sends every other rank its batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import default_convert

from hasten.data.delivery import Delivery, Package
from hasten.data.order import Order
from hasten.data.prepared import PreparedLoader
from hasten.data.randomness import ALL, capture, rewound
from hasten.data.rows import NotRowsError, count_rows, cut, join
from hasten.data.shard import data_part
from hasten.world.process import World, current


class DataLoaderDispatcher(PreparedLoader):
    """A loader that rank 0 reads for all ranks.

    A step reads one batch per part of the data and gives each rank a whole one, whatever it holds; or, with `split_batches`,
    one batch that is cut into parts. What is read for an incomplete last step is divided evenly and completed with the first
    rows of the pass; batches that can not be divided are given whole, to the first ranks, and the first batch to the rest.
    An error while reading is raised on every rank.

    Args:
        dataset: the dataset; only rank 0 reads it.
        split_batches: cut each batch into one part per rank.
        skip_batches: steps to leave out in the first pass.
        use_stateful_dataloader: continue by itself at the position that `load_state_dict` was given.
        slice_fn: cuts a rank's part out of all that was read for a step.
        torch_device_mesh: see `prepare_data_loader`.
        iteration: the epoch of the first pass.
        kwargs: those of `torch.utils.data.DataLoader`.
    """

    split_batches: bool
    slice_fn: Callable[..., Any] | None
    parts: int

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

    @property
    def _world(self) -> World:
        return self.world or current()

    def _batches_per_step(self) -> int:
        return 1 if self.split_batches else self.parts

    def _fetches_here(self) -> bool:
        return self.num_workers == 0 and self._world.is_main

    def _kinds(self, order: Order) -> tuple[str, ...]:
        return ALL if self._fetches_here() else order.kinds()

    def _after_order(self) -> None:
        if self.indices.first is not None:
            self._first_batch()  # an uninterrupted run loaded it first, with what it draws

    # -- reading and sending -----------------------------------------------------------------------------------------

    def _deliveries(self, skip: int) -> Iterator[Any]:
        self._real = 0
        if not self._world.is_main:
            torch.empty((), dtype=torch.int64).random_()  # the seed that reading draws on rank 0
            return self._received()
        try:
            batches = self._read_after(skip)
        except Exception as error:
            if self._world.size > 1:
                Delivery(self._world).send_error(error)
            raise
        return batches if self._world.size == 1 else self._sent(self._steps(batches))

    def _read_after(self, skip: int) -> Iterator[Any]:
        """The batches after `skip` steps. The first one of the pass is noted: it completes the last step."""
        number = skip * self._batches_per_step()
        self._first, self.indices.first, self.indices.notes_first = None, None, True
        if number == 0 or not self.is_iterable:
            return self.read(number)
        batches = self.read(0)
        self._first = next(batches, None)
        return islice(batches, number - 1, None)

    def _first_batch(self) -> Any:
        if self._first is None:
            # It was skipped by index; loading it now must not draw in the place of another batch.
            with rewound(capture(ALL)):
                self._first = (self.collate_fn or default_convert)(
                    [self.dataset[index] for index in self.indices.first]
                )
        return self._first

    def _sent(self, steps: Iterator[tuple[list[Any], int]]) -> Iterator[Any]:
        """Rank 0's own batches, after the others' are sent."""
        world, delivery = self._world, Delivery(self._world)
        wanted = [rank * self.parts // world.size for rank in range(1, world.size)]
        while True:
            try:
                step = next(steps, None)
                packages = {} if step is None else {part: Package(step[0][part]) for part in set(wanted)}
            except Exception as error:
                delivery.send_error(error)
                raise
            if step is None:
                delivery.send_end()
                return
            parts, self._real = step
            delivery.send([packages[part] for part in wanted], self._real)
            yield parts[0]

    def _received(self) -> Iterator[Any]:
        delivery = Delivery(self._world)
        while (item := delivery.receive()) is not None:
            batch, self._real = item
            yield batch

    def _steps(self, batches: Iterator[Any]) -> Iterator[tuple[list[Any], int]]:
        """For each step the batch of every part, and how many rows of the step are not repeated ones (0: all)."""
        number, size = self._batches_per_step(), getattr(self.indices.batches, "batch_size", self.batch_size)
        read = list(islice(batches, number))
        if self._first is None and self.indices.first is None:
            self._first = read[0] if read else None
        while read:
            following = None
            if len(read) < number or (size is not None and count_rows(read[-1]) != size):
                following = list(islice(batches, number))
                if not following:
                    yield from self._last_step(read)
                    return
            yield self._whole_step(read), 0
            read = list(islice(batches, number)) if following is None else following

    def _whole_step(self, read: list[Any]) -> list[Any]:
        if self.slice_fn is None and not self.split_batches:
            return read
        joined = read[0] if len(read) == 1 else join(read)
        return self._divide(joined, self._rows_per_part(joined))

    def _rows_per_part(self, joined: Any) -> int:
        rows = count_rows(joined)
        if rows is None or rows % self.parts:
            raise ValueError(
                f"A batch of {'unknown size' if rows is None else f'{rows} rows'} can not be cut into {self.parts} equal parts "
                "(`split_batches` or `slice_fn_for_dispatch`). Make every batch a multiple of the number of processes, or set "
                "`split_batches=False` to give each rank whole batches."
            )
        return rows // self.parts

    def _divide(self, joined: Any, rows: int) -> list[Any]:
        slices = [slice(part * rows, (part + 1) * rows) for part in range(self.parts)]
        if self.slice_fn is None:
            return [cut(joined, each) for each in slices]
        number = self.parts
        return [
            self.slice_fn(joined, each, process_index=part, num_processes=number) for part, each in enumerate(slices)
        ]

    def _last_step(self, read: list[Any]) -> Iterator[tuple[list[Any], int]]:
        complete = len(read) == self._batches_per_step()
        if self._drop_last and not complete:
            return
        try:
            joined = join(read)
            rows = count_rows(joined)
            assert rows is not None
            each = math.ceil(rows / self.parts)
            missing = each * self.parts - rows
            if missing:
                joined = join([joined, *_repeated(self._first_batch(), missing)])
            yield self._divide(joined, each), rows if missing else 0
        except NotRowsError:
            if self.split_batches or self.slice_fn is not None:
                raise
            real = sum(count_rows(batch) or 0 for batch in read)
            fill = [] if complete else [self._first_batch()] * (self.parts - len(read))
            yield [*read, *fill], 0 if complete else real or -1

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


def _repeated(first: Any, rows: int) -> list[Any]:
    """Copies of the first batch, the last one cut, that have so many rows together."""
    size = count_rows(first)
    assert size
    parts = [first] * (rows // size)
    return [*parts, cut(first, slice(0, rows % size))] if rows % size else parts

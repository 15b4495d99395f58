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
from hasten.data.shard import data_part
from hasten.data.steps import Steps
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

    @property
    def _steps(self) -> Steps:
        return Steps(
            parts=self.parts,
            split=self.split_batches,
            drop_last=self._drop_last,
            batch_size=getattr(self.indices.batches, "batch_size", self.batch_size),
            slice_fn=self.slice_fn,
        )

    def _batches_per_step(self) -> int:
        return self._steps.number

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
        alone = self._world.size == 1
        try:
            batches = self._read_after(skip * self._batches_per_step(), noting_first=not alone)
        except Exception as error:
            if not alone:
                Delivery(self._world).send_error(error)
            raise
        return batches if alone else self._sent(self._steps.divide(batches, self._first_batch if skip else None))

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

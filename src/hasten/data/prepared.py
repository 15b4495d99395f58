"""What every prepared loader does: it looks one batch ahead, knows its position, and stands on the stack of running loaders."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from hasten.collectives.nested import send_to_device
from hasten.data.lineage import forget_place
from hasten.data.order import Order
from hasten.data.positioned import PositionedLoader
from hasten.data.randomness import State, capture, restore, rewound
from hasten.data.resume import FetchWatch, Position, Progress
from hasten.data.sharding import REPLICATE, SHARD
from hasten.world import torch_private
from hasten.world.context import CONTEXT
from hasten.world.process import current

END: Any = object()

# What needs no look at where it is, on a machine with nothing but a CPU.
_UNMOVED = {torch.Tensor, str, bytes, int, float, bool, type(None)}


class PreparedLoader(PositionedLoader):
    """A DataLoader whose loop knows in the body of its last batch that it is the last, and that can be continued exactly.

    Attributes:
        end_of_dataloader: whether the batch in the loop's body is the last one.
        device: where the batches are moved to; None leaves them where they are.
        move_ahead: whether they are copied on a stream of their own.
    """

    device: torch.device | None
    rng_types: list[Any] | None
    synchronized_generator: torch.Generator | None
    owns_generator: bool
    sharding: str
    end_of_dataloader: bool
    move_ahead: bool
    _remainder: int | None
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
            "move_ahead": False,
            "world": None,
            "end_of_dataloader": False,
            "_remainder": -1,
        }
        missing = {name: value for name, value in defaults.items() if name not in self.__dict__}
        super()._finish(**{**missing, **fields, "_order": None})

    # -- one pass ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        watcher = CONTEXT.loaders.watcher
        return self._pass() if watcher is None else watcher.watched(self, self._pass())

    def _pass(self) -> Iterator[Any]:
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
                batches, batch, hand_out = self._on_the_way(batches, batch, position)
                for following in batches:
                    position.batches += 1
                    yield batch if hand_out is None else hand_out(batch)
                    batch = following
                position.last = self.end_of_dataloader = True
                self._remainder = None
                position.batches += 1
                yield batch if hand_out is None else hand_out(batch)
            progress.position = None
            progress.iteration += position.batches + offset > 0
        finally:
            CONTEXT.loaders.remove(self)
            self._leave(position, outer)

    def _on_the_way(
        self, batches: Iterator[Any], first: Any, position: Position
    ) -> tuple[Iterator[Any], Any, Callable[[Any], Any] | None]:
        """The batches and the first of them, watched if need be, each sent to the device as soon as it is fetched; and what must
        be done with each when it is handed out, if anything.
        """
        if self.progress.fetch_kinds != () and self._fetches_here():
            batches = FetchWatch(self.progress, position).over(batches)
        source = self._data_source() if self.by_position else None
        if source is not None:
            batches = _noting_state(batches, source, position)
        if self.device is None or _stays(first, self.device):
            return batches, first, None
        if self.move_ahead:
            from hasten.data.side_stream import SideStream, has_streams

            if has_streams(self.device):
                side = SideStream(self.device, self._non_blocking)
                return map(side.start, batches), side.start(first), side.hand_out
        move = partial(send_to_device, device=self.device, non_blocking=self._non_blocking)
        return map(move, batches), move(first), None

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
                first = _fetch_again(batches, ahead)
                forget_place(self.whole_dataset)
                return batches, first
            if not self.indices.draw(self._batches_per_step(), otherwise=lambda: restore(ahead or {})):
                return batches, next(batches, END)
            self._after_order()
        return batches, _fetch_again(batches, ahead)

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

    @property
    def is_replicated(self) -> bool:
        """Whether every rank gets all of the data."""
        return self.sharding == REPLICATE

    @property
    def padded_ranks(self) -> int:
        """In the last step, this many ranks, the last ones, have a repeated sample at the end of their batch."""
        return 0


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

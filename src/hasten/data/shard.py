"""Each rank's part of the data: of the batches of a batch sampler, or of the stream of an iterable dataset."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, get_worker_info

from hasten.data.samplers import draw_order

# The mesh axes along which one model is spread: ranks that differ only in these need the same batches.
_MODEL_AXES = ("tp", "cp", "sp", "pp", "ep")


def data_part(rank: int, ranks: int, mesh: Any = None) -> tuple[int, int]:
    """Which part of the data a rank gets, and how many different parts there are."""
    if mesh is None:
        return rank, ranks
    sizes = [mesh.size(index) for index, name in enumerate(mesh.mesh_dim_names or ()) if name in _MODEL_AXES]
    copies = math.prod(sizes)
    return rank // copies, max(1, ranks // copies)


class BatchSamplerShard(BatchSampler):
    """One rank's part of a batch sampler's batches.

    Rank r of N gets the batches r, r + N, r + 2N, ...; or, with `split_batches`, the r-th part of every batch. With
    `even_batches` all ranks get the same number of full batches: what is missing at the end is taken from the start of the
    pass. With the batch sampler's `drop_last`, rounds that are not complete are left out.

    A batch sampler without a batch size gives batches of any size; they are dealt out whole, and a last round that is
    incomplete is filled up with the first batches.

    Args:
        batch_sampler: gives the batches of all ranks, in the same order on every rank.
        num_processes: number of ranks.
        process_index: this rank.
        split_batches: cut each batch into one part per rank.
        even_batches: complete the last round.

    Raises:
        ValueError: `split_batches` with a batch size that the ranks can not share equally.
    """

    def __init__(
        self,
        batch_sampler: Iterable[list[int]],
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last: bool = getattr(batch_sampler, "drop_last", False)
        self.real = 0  # samples of the last round that are not repeated ones, once the pass is over; 0 if all are real
        if split_batches:
            check_divisible(self.batch_size, num_processes, "`BatchSamplerShard`")

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler of the batch sampler."""
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def total_length(self) -> int:
        """The number of batches over all ranks."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __len__(self) -> int:
        if self.split_batches:
            return self._split_length()
        rounds, rest = divmod(self.total_length, self.num_processes)
        if rest == 0 or self.drop_last:
            return rounds
        return rounds + 1 if self.even_batches or self.process_index < rest else rounds

    def _split_length(self) -> int:
        batches = self.total_length
        if self.even_batches or self.drop_last or self.sampler is None or batches == 0:
            return batches
        # The last batch may be too short to reach this rank.
        last = len(self.sampler) - (batches - 1) * self.size
        return batches if last > self.process_index * self._own_size else batches - 1

    @property
    def size(self) -> int:
        """Samples of a batch of the batch sampler."""
        assert self.batch_size is not None
        return self.batch_size

    @property
    def _own_size(self) -> int:
        return self.size // self.num_processes if self.split_batches else self.size

    def __iter__(self) -> Iterator[list[int]]:
        return self.batches_from(0)

    @property
    def units_per_round(self) -> int:
        """What all ranks take in a round: samples if `is_sliced`, else batches of the batch sampler."""
        if self.is_sliced:
            return self._own_size * self.num_processes
        return 1 if self.split_batches else self.num_processes

    @property
    def is_sliced(self) -> bool:
        """Whether a round is a slice of a sampler's order, so that a pass can begin at any sample."""
        return type(self.batch_sampler) is BatchSampler

    def batches_from(self, start: int, offset: int = 0) -> Iterator[list[int]]:
        """This rank's batches of one pass after its first `start`, found by counting and not by reading.

        Args:
            start: this rank's batches to leave out.
            offset: what is left out before the first of them: samples of the order if `is_sliced`, else whole batches.
        """
        self.real = 0
        if type(self.batch_sampler) is BatchSampler:
            return self._slices(self.batch_sampler.sampler, start, offset)
        return self._split(start + offset) if self.split_batches else self._deal(start, offset)

    def _slices(self, sampler: Iterable[int], start: int, offset: int) -> Iterator[list[int]]:
        """Torch's own batch sampler makes batches of consecutive samples: a round is a slice of the order."""
        own = self._own_size
        size = own * self.num_processes
        begin, end = self.process_index * own, (self.process_index + 1) * own
        drawn = draw_order(sampler)
        if drawn is not None:
            order, finish = drawn
            skipped = offset + start * size
            whole = offset + max(0, len(order) - offset) // size * size
            yield from _columns(order, skipped, whole, size, begin, end)
            finish()
            if skipped <= whole:
                yield from self._last(_listed(order[whole:]), _listed(order[:size]), begin, end)
            return
        samples = iter(sampler)
        first = list(islice(samples, size))
        chunk = _after(first, samples, offset + start * size)
        while len(chunk) == size:
            yield chunk[begin:end]
            chunk = list(islice(samples, size))
        yield from self._last(chunk, first, begin, end)

    def _last(self, rest: list[int], first: list[int], begin: int, end: int) -> Iterator[list[int]]:
        if not rest or self.drop_last:
            return
        if self.even_batches:
            self.real = len(rest)
            rest = rest + list(islice(cycle(first), self._own_size * self.num_processes - len(rest)))
        if rest[begin:end]:
            yield rest[begin:end]

    def _split(self, start: int) -> Iterator[list[int]]:
        """Each batch of a batch sampler of any kind, cut into one part per rank."""
        own = self._own_size
        begin, end = self.process_index * own, (self.process_index + 1) * own
        batches = iter(self.batch_sampler)
        first: list[int] = []
        for number, batch in enumerate(batches):
            first = first or list(batch)
            if number < start:
                continue
            missing = self.size - len(batch)
            if missing != 0:
                self._check_last(batches, number, len(batch))
            if missing > 0 and self.even_batches:
                self.real = len(batch)
                batch = [*batch, *islice(cycle(first), missing)]
            if batch[begin:end]:
                yield batch[begin:end]

    def _check_last(self, batches: Iterator[list[int]], number: int, size: int) -> None:
        """Only the last batch may be shorter: the repetitions in another one would be counted, and a longer one lose samples."""
        if size > self.size or next(batches, None) is not None:
            raise ValueError(
                f"With `split_batches` a batch of {self.size} samples is cut into {self.num_processes} parts, but batch number "
                f"{number} of {type(self.batch_sampler).__name__} has {size}. Give all batches but the last the size that its "
                "`batch_size` says, or leave `split_batches` out: then batches of any size are dealt out whole."
            )

    def _deal(self, start: int, offset: int) -> Iterator[list[int]]:
        """Whole batches of a batch sampler of any kind, one per rank and round."""
        ranks = self.num_processes
        batches = iter(self.batch_sampler)
        first = list(islice(batches, ranks))
        dealt = _after(first, batches, offset + start * ranks)
        while len(dealt) == ranks:
            following = None
            if self.batch_size is not None and len(dealt[-1]) < self.batch_size:
                # A short batch is usually the last one.
                following = list(islice(batches, ranks))
                dealt = dealt if following else self._complete(dealt, first)
            yield dealt[self.process_index]
            dealt = list(islice(batches, ranks)) if following is None else following
        if dealt and not self.drop_last:
            dealt = self._complete(dealt, first)
            if self.process_index < len(dealt):
                yield dealt[self.process_index]

    def _complete(self, dealt: list[list[int]], first: list[list[int]]) -> list[list[int]]:
        """The last round, with its short last batch and its missing batches filled from the start of the pass."""
        if not self.even_batches or self.drop_last:
            return dealt
        real = sum(map(len, dealt))
        if self.batch_size is None:
            dealt = [*dealt, *islice(cycle(first), self.num_processes - len(dealt))]
        else:
            pool = cycle(list(chain.from_iterable(first)))
            short = max(0, self.batch_size - len(dealt[-1]))
            dealt = [*dealt[:-1], [*dealt[-1], *islice(pool, short)]]
            dealt += [list(islice(pool, self.batch_size)) for _ in range(self.num_processes - len(dealt))]
        self.real = real if sum(map(len, dealt)) > real else 0
        return dealt


def _after(first: list[Any], rest: Iterator[Any], skip: int) -> list[Any]:
    """The next `len(first)` items after so many; `first` are those that have been read already."""
    size = len(first)
    if skip < size:
        return first[skip:] + list(islice(rest, skip))
    next(islice(rest, skip - size, skip - size), None)
    return list(islice(rest, size))


_BLOCK = 4096  # samples of a plain count that are listed at a time


def _columns(
    order: range | torch.Tensor, start: int, stop: int, size: int, begin: int, end: int
) -> Iterator[list[int]]:
    """Samples `begin` to `end` of each round of `size` samples between `start` and `stop`, whole rounds all of them."""
    if isinstance(order, torch.Tensor):
        if start < stop:
            yield from order[start:stop].view(-1, size)[:, begin:end].tolist()
        return
    block = max(1, _BLOCK // size) * size
    for at in range(start, stop, block):
        yield from torch.arange(at, min(at + block, stop)).view(-1, size)[:, begin:end].tolist()


def _listed(order: range | torch.Tensor) -> list[int]:
    return list(order) if isinstance(order, range) else order.tolist()


class SamplerShard:
    """One rank's part of a sampler whose samples are not batched (`DataLoader(batch_size=None)`)."""

    def __init__(
        self, sampler: Iterable[int], num_processes: int = 1, process_index: int = 0, even_batches: bool = True
    ) -> None:
        self.batch_sampler = BatchSamplerShard(
            BatchSampler(sampler, 1, False), num_processes, process_index, even_batches=even_batches
        )

    def __iter__(self) -> Iterator[int]:
        return self.batches_from(0)

    def batches_from(self, start: int, offset: int = 0) -> Iterator[int]:
        """This rank's samples after its first `start`, after the first `offset` of all ranks."""
        return chain.from_iterable(self.batch_sampler.batches_from(start, offset))

    def __len__(self) -> int:
        return len(self.batch_sampler)


_NOTHING = -1  # the samples of a reader that found none, and the epoch if none was chosen


class IterableDatasetShard(IterableDataset[Any]):
    """One rank's part of an iterable dataset: each rank reads the stream and keeps its own slice of every global batch.

    The last global batch is completed with the samples of the first one, unless `drop_last`.

    Args:
        dataset: gives the same stream on every rank.
        batch_size: samples per rank and batch; with `split_batches`, over all ranks.
        drop_last: leave an incomplete last global batch out.
        num_processes: number of ranks.
        process_index: this rank.
        split_batches: `batch_size` counts the samples of all ranks together.

    Raises:
        ValueError: `split_batches` with a batch size that the ranks can not share equally.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches:
            check_divisible(batch_size, num_processes, "`IterableDatasetShard`")
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.offset = 0  # samples of the stream that the next pass leaves out before it shares out the rest
        # Tensors, because their memory can be shared with the worker processes that read in this one's place.
        self._epoch = torch.tensor(_NOTHING)
        self._real = torch.zeros(1, dtype=torch.int64)  # of each reader

    def share(self, workers: int) -> None:
        """Let worker processes report the length of the last global batch to this one, and see the epoch also if they are kept."""
        self._epoch.share_memory_()
        self._real = torch.zeros(workers, dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch of the next pass."""
        return max(0, int(self._epoch))

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._epoch.fill_(value)

    @property
    def real(self) -> int:
        """Samples of the last global batch that are not repeated ones, once the stream has ended; 0 if all are real.

        -1 if several workers have read and repeated, each at its own end.
        """
        found = [real for real in self._real.tolist() if real != _NOTHING]
        if not any(found):
            return 0
        return found[0] if len(found) == 1 else -1

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, also of the dataset if it has epochs."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    @property
    def _own_size(self) -> int:
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    @property
    def round_size(self) -> int:
        """Samples that all ranks take in a round."""
        return self._own_size * self.num_processes

    def __len__(self) -> int:
        """Samples of this rank; exact if the dataset's own length is."""
        own = self._own_size
        rounds, rest = divmod(len(self.dataset), self.round_size)  # type: ignore[arg-type]
        return own * (rounds if rest == 0 or self.drop_last else rounds + 1)

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        own, round_size = self._own_size, self.round_size
        begin, end = self.process_index * own, (self.process_index + 1) * own
        worker = get_worker_info()
        if worker is not None and self._epoch != _NOTHING and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)  # a worker that is kept has not heard of it
        real = self._real[0 if worker is None or len(self._real) == 1 else worker.id]
        samples = iter(self.dataset)
        first = list(islice(samples, round_size))
        real.fill_(0 if first else _NOTHING)
        offset, self.offset = self.offset, 0  # a worker that is kept must not leave it out again
        chunk = _after(first, samples, offset)
        while len(chunk) == round_size:
            yield from chunk[begin:end]
            chunk = list(islice(samples, round_size))
        if chunk and not self.drop_last:
            real.fill_(len(chunk))
            chunk += islice(cycle(list(first)), round_size - len(chunk))
            yield from chunk[begin:end]


def check_divisible(batch_size: int | None, ranks: int, what: str) -> None:
    """Raise unless a batch can be cut into equal parts for the ranks."""
    if batch_size is None:
        raise ValueError(
            f"{what} can not split batches of unknown size: give the loader a `batch_size`, or its batch sampler a "
            "`batch_size` attribute, or set `split_batches=False`."
        )
    if batch_size % ranks:
        raise ValueError(
            f"To use {what} in `split_batches` mode, the batch size ({batch_size}) needs to be a round multiple of the "
            f"number of processes ({ranks}); the next are {batch_size // ranks * ranks or ranks} and "
            f"{(batch_size // ranks + 1) * ranks}."
        )

"""A DataLoader that can begin at a later batch, made from any DataLoader without calling its constructor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import chain, islice
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from hasten.data.samplers import batches_from
from hasten.world.context import CONTEXT
from hasten.world.torch_private import LoaderOverIndices, forget_iterator

logger = logging.getLogger(__name__)

Self = TypeVar("Self", bound="SkippableLoader")


class IndexSource:
    """What a loader reads its indices from: its batch sampler, or its sampler if it does not batch.

    Torch keeps this object as long as it keeps its workers, so what changes from pass to pass is set here.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches
        self.start = 0
        self.offset = 0
        self.holds = False
        self.notes_first = False
        self.first: Any = None
        self._open: HeldIndices | None = None
        self._then: Callable[[], None] | None = None

    def __iter__(self) -> Iterator[Any]:
        noting = self.notes_first and (self.start > 0 or self.offset > 0)
        indices = self._noting_first() if noting else batches_from(self.batches, self.start, self.offset)
        if self._then is not None:
            then, self._then = self._then, None
            return _calling(indices, then)
        if not self.holds:
            return indices
        self._open = HeldIndices(indices)
        return self._open

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def _noting_first(self) -> Iterator[Any]:
        if type(self.batches) is BatchSampler:
            samples, size = iter(self.batches.sampler), self.batches.batch_size
            self.first = list(islice(samples, size))
            rest = islice(chain(self.first, samples), self.offset + self.start * size, None)
            yield from BatchSampler(rest, size, self.batches.drop_last)
        else:
            indices = iter(self.batches)
            self.first = next(indices, None)
            yield from islice(chain((self.first,), indices), self.offset + self.start, None)

    def draw(self, count: int, otherwise: Callable[[], None]) -> bool:
        """Take `count` batches of indices from the sampler now, for later.

        Returns:
            Whether that was possible. If the pass has not asked for indices yet, `otherwise` is called as soon as it has got
            its first.
        """
        self.holds = False
        opened, self._open = self._open, None
        if opened is None:
            self._then = otherwise
            return False
        opened.held.extend(islice(opened.indices, count))
        return True


def _calling(indices: Iterator[Any], then: Callable[[], None]) -> Iterator[Any]:
    for batch in islice(indices, 1):
        then()
        yield batch
    yield from indices


class HeldIndices:
    """An iterator over indices, some of which were taken from the sampler before they were needed."""

    def __init__(self, indices: Iterator[Any]) -> None:
        self.indices = indices
        self.held: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.held.pop(0) if self.held else next(self.indices)


class SkippableLoader(LoaderOverIndices):
    """A DataLoader that leaves out the first `skip_batches` batches of its first pass.

    Batches of map-style datasets are skipped by index and never loaded; those of iterable datasets can only be read and dropped.
    """

    skip_batches: int

    def __init__(self, dataset: Any, skip_batches: int = 0, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        self._finish(skip_batches=skip_batches)

    @classmethod
    def adopt(cls: type[Self], loader: DataLoader[Any], replaced: dict[str, Any], **fields: Any) -> Self:
        """A loader of this class with all that `loader` was given, its class's own methods included.

        Args:
            loader: stays as it is.
            replaced: attributes of a DataLoader to have another value.
            fields: what this class adds.
        """
        clone = object.__new__(_subclass(cls, type(loader)))
        # Not by assignment: a DataLoader refuses to change its samplers.
        clone.__dict__.update(loader.__dict__)
        clone.__dict__.update(replaced)
        forget_iterator(clone)
        clone._finish(**fields)
        return clone

    def _finish(self, **fields: Any) -> None:
        self.__dict__.update(fields)
        self.indices = IndexSource(self.sampler if self.batch_sampler is None else self.batch_sampler)

    def copy(self: Self, **fields: Any) -> Self:
        """A loader like this one that reads on its own."""
        clone = object.__new__(type(self))
        clone.__dict__.update(self.__dict__)
        forget_iterator(clone)
        clone._finish(**fields)
        return clone

    @cached_property
    def is_iterable(self) -> bool:
        """Whether the data comes as a stream and not by index."""
        return isinstance(self.dataset, IterableDataset)

    def read(self, skip: int) -> Iterator[Any]:
        """The batches of one pass after the first `skip`, as torch gives them."""
        self.indices.start = 0 if self.is_iterable else skip
        batches = super().__iter__()
        if self.is_iterable and skip > 0:
            _say_that_it_reads(skip)
            next(islice(batches, skip, skip), None)
        return batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        skip = self.skip_batches
        try:
            yield from self.read(skip)
        finally:
            self.indices.start = self.skip_batches = 0

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind, user = type(self), type(self)
        if "_parts" in kind.__dict__:
            kind, user = kind.__dict__["_parts"]
        return _restore, (kind, user), self._picklable()

    def _picklable(self) -> dict[str, Any]:
        return {**self.__dict__, "_iterator": None}


def _say_that_it_reads(batches: int) -> None:
    if CONTEXT.first_time("a stream is skipped by reading"):
        logger.warning(
            "%d batches of a stream are read and dropped to go on after them: it can only be read forward. A dataset with "
            "`state_dict` and `load_state_dict` under DataLoaderConfiguration(resume='position') goes on at once, if it does not "
            "shuffle in a buffer.",
            batches,
        )


def _subclass(kind: type[Self], user: type[DataLoader[Any]]) -> type[Self]:
    """`kind` with the methods of the user's own loader class beneath it."""
    if issubclass(kind, user):
        return kind
    return type(kind.__name__, (kind, user), {"_parts": (kind, user), "__module__": kind.__module__})


def _restore(kind: type[SkippableLoader], user: type[DataLoader[Any]]) -> SkippableLoader:
    return object.__new__(_subclass(kind, user))

"""Steps: what is read for all ranks at once, and how it is divided into the parts that they get."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from hasten.data.rows import NotRowsError, count_rows, cut, join


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How batches make steps.

    Args:
        parts: how many different parts a step has.
        split: a step is one batch that is cut into parts; otherwise it is one whole batch per part.
        drop_last: leave out a last step for which a batch is missing.
        batch_size: rows of a complete batch, if they are known.
        slice_fn: takes the place of cutting: `(data, slice, process_index=..., num_processes=...)`.
    """

    parts: int
    split: bool = False
    drop_last: bool = False
    batch_size: int | None = None
    slice_fn: Callable[..., Any] | None = None

    @property
    def number(self) -> int:
        """Batches of a step."""
        return 1 if self.split else self.parts

    def divide(self, batches: Iterator[Any], first: Callable[[], Any] | None = None) -> Iterator[tuple[list[Any], int]]:
        """For each step the parts, and how many rows of all of them are not repeated ones (0: all, -1: unknown).

        Args:
            batches: what is read.
            first: gives the first batch of the pass, whose rows complete the last step, if `batches` does not begin with it.

        Raises:
            ValueError: a batch can not be cut into equal parts.
        """
        read = list(islice(batches, self.number))
        if first is None and read:
            kept = read[0]
            first = lambda: kept  # noqa: E731
        while read:
            following = None
            if len(read) < self.number or (self.batch_size is not None and count_rows(read[-1]) != self.batch_size):
                following = list(islice(batches, self.number))
                if not following:
                    assert first is not None
                    yield from self._last(read, first)
                    return
            yield self._whole(read), 0
            read = list(islice(batches, self.number)) if following is None else following

    def _whole(self, read: list[Any]) -> list[Any]:
        if self.slice_fn is None and not self.split:
            return read
        joined = read[0] if self.split else join(read)
        rows = count_rows(joined)
        if rows is None or rows % self.parts:
            raise self._uncut("unknown size" if rows is None else f"{rows} rows")
        return self._cut(joined, rows // self.parts)

    def _uncut(self, size: str) -> ValueError:
        return ValueError(
            f"A batch of {size} can not be cut into {self.parts} equal parts (`split_batches` or `slice_fn_for_dispatch`). Make "
            "the rows of every batch a multiple of the number of processes, or set `split_batches=False` and no `slice_fn` to "
            "give each process whole batches."
        )

    def _cut(self, joined: Any, rows: int) -> list[Any]:
        slices = [slice(part * rows, (part + 1) * rows) for part in range(self.parts)]
        if self.slice_fn is None:
            return [cut(joined, each) for each in slices]
        numbers = {"num_processes": self.parts}
        return [self.slice_fn(joined, each, process_index=part, **numbers) for part, each in enumerate(slices)]

    def _last(self, read: list[Any], first: Callable[[], Any]) -> Iterator[tuple[list[Any], int]]:
        """A last step with fewer batches or rows: divided evenly and completed; or dealt out whole if it has no rows."""
        complete = len(read) == self.number
        if self.drop_last and not complete:
            return
        try:
            joined = join(read)
            rows = count_rows(joined)
            assert rows is not None
            each = math.ceil(rows / self.parts)
            missing = each * self.parts - rows
            if missing:
                joined = join([joined, *_repeated(first(), missing)])
            yield self._cut(joined, each), rows if missing else 0
        except NotRowsError:
            if self.split or self.slice_fn is not None:
                raise self._uncut("unknown size") from None
            rows_read = [count_rows(batch) for batch in read]
            real = -1 if None in rows_read else sum(rows for rows in rows_read if rows)
            filling = [first()] * (self.parts - len(read)) if not complete else []
            yield read + filling, 0 if complete else real


def _repeated(first: Any, rows: int) -> list[Any]:
    """Copies of the first batch, the last one cut, that have so many rows together."""
    size = count_rows(first)
    if not size:
        raise NotRowsError("The first batch has no rows that could complete the last one.")
    parts = [first] * (rows // size)
    return [*parts, cut(first, slice(0, rows % size))] if rows % size else parts

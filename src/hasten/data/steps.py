"""Steps: what is read for all ranks at once, and how it is divided into the parts that they get."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from hasten.data.rows import ROWS, Form, NotRowsError, form_of


class Step(NamedTuple):
    """What is handed out at once.

    Args:
        parts: one batch for each part of the data.
        real: how many rows of all of them are not repeated ones; 0: all, -1: unknown.
        uneven: whether they have different numbers of rows.
    """

    parts: list[Any]
    real: int = 0
    uneven: bool = False


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How batches make steps.

    Args:
        parts: how many different parts a step has.
        split: a step is one batch that is cut into parts; otherwise it is one whole batch per part.
        drop_last: leave out a last step for which a batch is missing.
        batch_size: rows of a complete batch, if they are known.
        samples: those of a whole pass, if they are known.
        slice_fn: takes the place of cutting: `(data, slice, process_index=..., num_processes=...)`.
    """

    parts: int
    split: bool = False
    drop_last: bool = False
    batch_size: int | None = None
    samples: int | None = None
    slice_fn: Callable[..., Any] | None = None

    @property
    def number(self) -> int:
        """Batches of a step."""
        return 1 if self.split else self.parts

    def divide(self, batches: Iterator[Any], first: Callable[[], Any] | None = None) -> Iterator[Step]:
        """The steps of a pass.

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
        form = self._form(read)
        while read:
            following = None
            if len(read) < self.number or (self.batch_size is not None and form.count(read[-1]) != self.batch_size):
                following = list(islice(batches, self.number))
                if not following:
                    assert first is not None
                    if not (self.drop_last and len(read) < self.number):
                        yield self._last(read, first, form)
                    return
            yield self._whole(read, form)
            read = list(islice(batches, self.number)) if following is None else following

    def _form(self, read: list[Any]) -> Form:
        if not read or self.slice_fn is not None:
            return ROWS
        size = self.batch_size
        return form_of(read[0], size if size is None or self.samples is None else min(size, self.samples))

    def _whole(self, read: list[Any], form: Form) -> Step:
        if self.slice_fn is None and not self.split:
            return Step(read, uneven=len(set(map(form.count, read))) > 1)
        joined = read[0] if self.split else form.join(read)
        rows = form.count(joined)
        if rows is None or rows % self.parts:
            raise self._uncut("unknown size" if rows is None else f"{rows} rows")
        return Step(self._cut(joined, rows // self.parts, form))

    def _uncut(self, size: str) -> ValueError:
        return ValueError(
            f"A batch of {size} can not be cut into {self.parts} equal parts (`split_batches` or `slice_fn_for_dispatch`). Make "
            "the rows of every batch a multiple of the number of processes, or set `split_batches=False` and no `slice_fn` to "
            "give each process whole batches."
        )

    def _cut(self, joined: Any, rows: int, form: Form) -> list[Any]:
        slices = [slice(part * rows, (part + 1) * rows) for part in range(self.parts)]
        if self.slice_fn is None:
            return [form.cut(joined, each) for each in slices]
        numbers = {"num_processes": self.parts}
        return [self.slice_fn(joined, each, process_index=part, **numbers) for part, each in enumerate(slices)]

    def _last(self, read: list[Any], first: Callable[[], Any], form: Form) -> Step:
        """A last step with fewer batches or rows: divided evenly and completed; or dealt out whole if it has no rows."""
        try:
            joined = form.join(read)
            rows = form.count(joined)
            assert rows is not None
            each = math.ceil(rows / self.parts)
            missing = each * self.parts - rows
            if missing:
                joined = form.join([joined, *_repeated(first(), missing, form)])
        except NotRowsError:
            return self._undivided(read, first, form)
        return Step(self._cut(joined, each, form), rows if missing else 0)

    def _undivided(self, read: list[Any], first: Callable[[], Any], form: Form) -> Step:
        """The batches of a last step as they are, and the first one in the place of those that are missing."""
        if self.split or self.slice_fn is not None:
            raise self._uncut("unknown size") from None
        missing = self.number - len(read)
        counts = list(map(form.count, read))
        real = -1 if None in counts else sum(rows for rows in counts if rows)
        parts = read + [first()] * missing
        return Step(parts, real if missing else 0, len(set(map(form.count, parts))) > 1)


def _repeated(first: Any, rows: int, form: Form) -> list[Any]:
    """Copies of the first batch, the last one cut, that have so many rows together."""
    size = form.count(first)
    if not size:
        raise NotRowsError("The first batch has no rows that could complete the last one.")
    parts = [first] * (rows // size)
    return [*parts, form.cut(first, slice(0, rows % size))] if rows % size else parts

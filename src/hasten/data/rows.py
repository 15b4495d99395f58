"""The rows of a batch: how many there are, batches joined into one, and parts cut out of it, whatever the structure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from hasten.collectives.nested import (
    dataclass_values,
    honor_dataclass,
    honor_mapping,
    honor_type,
    is_dataclass_instance,
)

_SCALARS = (str, bytes, int, float, bool, complex, type(None))


class NotRowsError(ValueError):
    """A batch has no rows that could be joined or cut."""


def count_rows(batch: Any) -> int | None:
    """The length of the first array in a batch, or of its first list of plain values; None if there is neither."""
    if _is_array(batch):
        return int(batch.shape[0]) if batch.ndim else None
    if _is_column(batch):
        return len(batch)
    for _, part in _parts(batch) or ():
        rows = count_rows(part)
        if rows is not None:
            return rows
    return None


def join(batches: Sequence[Any]) -> Any:
    """One batch with the rows of all.

    Raises:
        NotRowsError: they have no rows, or not of one form.
    """
    sizes = [count_rows(batch) for batch in batches]
    if None in sizes:
        raise NotRowsError(f"A {type(batches[0]).__name__} without arrays has no rows.")
    try:
        return _merge(batches, sizes)
    except NotRowsError:
        raise
    except (RuntimeError, ValueError, KeyError, TypeError, IndexError) as error:
        raise NotRowsError(str(error)) from error


def _merge(values: Sequence[Any], sizes: Sequence[int | None]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor) and first.ndim:
        return torch.cat(list(values))
    if _is_array(first) and first.ndim:
        import numpy

        return numpy.concatenate(list(values))
    if _is_column(first) and [len(value) for value in values] == list(sizes):
        return honor_type(first, [row for value in values for row in value])
    if _parts(first) is None or _is_column(first):
        return first  # what does not belong to single rows
    columns = [dict(_parts(value) or ()) for value in values]
    if any(column.keys() != columns[0].keys() for column in columns):
        raise NotRowsError("The batches have different fields.")
    return _rebuild(first, {key: _merge([column[key] for column in columns], sizes) for key in columns[0]})


def cut(batch: Any, rows: slice) -> Any:
    """A batch with some of the rows of `batch`."""
    total = count_rows(batch)

    def walk(value: Any) -> Any:
        if _is_array(value):
            return value[rows] if value.ndim else value
        if _is_column(value):
            return honor_type(value, value[rows]) if len(value) == total else value
        parts = _parts(value)
        return value if parts is None else _rebuild(value, {key: walk(part) for key, part in parts})

    return walk(batch)


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (type(value).__module__ == "numpy" and hasattr(value, "ndim"))


def _is_column(value: Any) -> bool:
    """Whether a list holds one plain value per row, as strings do after collating."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(row, _SCALARS) for row in value)


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    if is_dataclass_instance(value):
        return list(dataclass_values(value).items())
    return None


def _rebuild(like: Any, parts: dict[Any, Any]) -> Any:
    if isinstance(like, (list, tuple)):
        return honor_type(like, parts.values())
    if isinstance(like, Mapping):
        return honor_mapping(like, parts)
    return honor_dataclass(like, parts)


class Form:
    """How batches are made of rows: here, their arrays and lists of plain values have a row for each."""

    def count(self, batch: Any) -> int | None:
        """The rows of a batch; None if they are unknown."""
        return count_rows(batch)

    def join(self, batches: Sequence[Any]) -> Any:
        """One batch with the rows of all.

        Raises:
            NotRowsError: that is impossible.
        """
        return join(batches)

    def cut(self, batch: Any, rows: slice) -> Any:
        """A batch with some of the rows."""
        return cut(batch, rows)


ROWS = Form()


class Columns(Form):
    """Batches that are known by a complete one: which parts of it have a row for each sample.

    Args:
        tree: True for a part that has, a dictionary for a container with such parts, False for anything else.
        divides: whether nothing else depends on the samples.
    """

    def __init__(self, tree: Any, divides: bool) -> None:
        self.tree = tree
        self.divides = divides

    def count(self, batch: Any) -> int | None:
        """The rows of a batch; None if they are unknown."""
        return _first_length(batch, self.tree)

    def join(self, batches: Sequence[Any]) -> Any:
        """One batch with the rows of all."""
        if not self.divides:
            raise NotRowsError("The arrays of a batch have different lengths.")
        try:
            return _join_columns(batches, self.tree)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise NotRowsError(str(error)) from error

    def cut(self, batch: Any, rows: slice) -> Any:
        """A batch with some of the rows."""
        return _walk_columns(batch, self.tree, lambda column: column[rows])


def form_of(batch: Any, size: int | None) -> Form:
    """The form of a pass's batches.

    Args:
        batch: the first one.
        size: the samples of a complete batch, if they are known.
    """
    lengths = set(_lengths(batch))
    tree = False if size is None else _tree(batch, size)
    if _has_column(tree):
        return Columns(tree, divides=not set(_lengths(batch, tree)))
    return ROWS if len(lengths) <= 1 else Columns(False, divides=False)


def _tree(value: Any, size: int) -> Any:
    if _is_array(value):
        return value.ndim > 0 and len(value) == size
    if type(value) in (list, tuple) and len(value) == size and not _are_columns(value, size):
        return True  # an item for each sample, as `collate_fn=list` makes it
    parts = _parts(value)
    return False if parts is None else {key: _tree(part, size) for key, part in parts}


def _are_columns(items: Sequence[Any], size: int) -> bool:
    """Whether these are as many columns as there are samples: of a complete batch, or lists of one that is shorter."""
    if not all(_is_array(item) or _is_list_of_one_kind(item) for item in items):
        return False
    lengths = {len(item) if not _is_array(item) or item.ndim else -1 for item in items}
    return lengths == {size} or (len(lengths) == 1 and max(lengths) < size and not any(map(_is_array, items)))


def _is_list_of_one_kind(item: Any) -> bool:
    return type(item) in (list, tuple) and len(set(map(type, item))) == 1


def _has_column(tree: Any) -> bool:
    return any(map(_has_column, tree.values())) if isinstance(tree, dict) else tree


def _lengths(value: Any, tree: Any = False) -> Iterator[int]:
    """The first dimensions of all arrays that are no columns of the tree."""
    if tree is True:
        return
    if _is_array(value):
        if value.ndim:
            yield int(value.shape[0])
    elif not _is_column(value):
        for key, part in _parts(value) or ():
            yield from _lengths(part, tree.get(key, False) if isinstance(tree, dict) else False)


def _first_length(value: Any, tree: Any) -> int | None:
    if tree is True:
        return len(value)
    if isinstance(tree, dict):
        for key, part in _parts(value) or ():
            length = _first_length(part, tree.get(key, False))
            if length is not None:
                return length
    return None


def _join_columns(values: Sequence[Any], tree: Any) -> Any:
    first = values[0]
    if tree is True:
        return _merge(values, list(map(count_rows, values))) if _is_array(first) else honor_type(first, chain(*values))
    if not _has_column(tree):
        return first
    parts = [dict(_parts(value) or ()) for value in values]
    if any(part.keys() != tree.keys() for part in parts):
        raise NotRowsError("The batches have different fields.")
    return _rebuild(first, {key: _join_columns([part[key] for part in parts], tree[key]) for key in tree})


def _walk_columns(value: Any, tree: Any, change: Callable[[Any], Any]) -> Any:
    if tree is True:
        return change(value)
    if not isinstance(tree, dict):
        return value
    return _rebuild(
        value, {key: _walk_columns(part, tree.get(key, False), change) for key, part in _parts(value) or ()}
    )

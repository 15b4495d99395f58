"""The rows of a batch: how many there are, batches joined into one, and parts cut out of it, whatever the structure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

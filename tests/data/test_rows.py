from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch

from hasten.data.rows import ROWS, NotRowsError, count_rows, cut, form_of, join

Point = namedtuple("Point", ["x", "y"])


@dataclass(frozen=True)
class Sample:
    values: torch.Tensor
    names: list[str]


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (column(1, 2, 3), 3),
        ({"name": ["a", "b"], "x": column(1, 2)}, 2),
        ([None, {"x": numpy.zeros((4, 2))}], 4),
        (Sample(column(1), ["a"]), 1),
        (torch.tensor(1.0), None),
        ("text", None),
        ([], None),
        ({"a": object()}, None),
    ],
)
def test_counting(batch: Any, rows: int | None):
    assert count_rows(batch) == rows


def test_joining_keeps_every_type():
    factory: Any = defaultdict(list, a=column(1))
    one = {"p": Point(column(1), ["a"]), "s": Sample(column(1), ["a"]), "d": factory, "n": numpy.array([1])}
    other = {
        "p": Point(column(2, 3), ["b", "c"]),
        "s": Sample(column(2, 3), ["b", "c"]),
        "d": defaultdict(list, a=column(2, 3)),
        "n": numpy.array([2, 3]),
    }
    joined = join([OrderedDict(one, scale=torch.tensor(7.0), tag="same"), OrderedDict(other, scale=0, tag="same")])
    assert type(joined) is OrderedDict
    assert type(joined["p"]) is Point
    assert joined["p"].x.tolist() == joined["s"].values.tolist() == joined["n"].tolist() == [1, 2, 3]
    assert joined["p"].y == joined["s"].names == ["a", "b", "c"]
    assert joined["d"].default_factory is list
    assert (joined["scale"].item(), joined["tag"]) == (7.0, "same")


@pytest.mark.parametrize(
    "batches",
    [
        [torch.zeros(2, 3), torch.zeros(2, 4)],
        [{"a": column(1)}, {"b": column(1)}],
        [[column(1), column(2)], [column(1)]],
        [object(), object()],
        [column(1), [column(1)]],
    ],
)
def test_what_cannot_be_joined(batches: list[Any]):
    with pytest.raises(NotRowsError):
        join(batches)


def test_cutting_keeps_every_type():
    batch = [Sample(column(1, 2, 3), ["a", "b", "c"]), {"scale": torch.tensor(7.0), "same": ["x"]}, (4, 5, 6), None]
    part = cut(batch, slice(1, 3))
    assert part[0].values.tolist() == [2, 3]
    assert part[0].names == ["b", "c"]
    assert (part[1]["scale"].item(), part[1]["same"], part[2], part[3]) == (7.0, ["x"], (5, 6), None)


# ---- forms ----


def pictures(*boxes: int) -> list[torch.Tensor]:
    return [torch.full((count, 4), count) for count in boxes]


def batch_of(kind: str, first: int, samples: int) -> Any:
    """Samples from a number on; the picture of sample i has i % 3 + 2 boxes."""
    numbers = list(range(first, first + samples))
    boxes = pictures(*(number % 3 + 2 for number in numbers))
    tensor = torch.tensor(numbers)
    return {
        "tensor": tensor,
        "columns": [tensor, tensor * 2],
        "items": boxes,
        "records": [{"x": box, "n": number} for box, number in zip(boxes, numbers, strict=True)],
        "pairs": list(zip(boxes, numbers, strict=True)),
        "zipped": (tuple(boxes), tuple(numbers)),
        "mapping": {"boxes": boxes, "n": tensor, "names": [f"s{number}" for number in numbers], "scale": 0.5},
        "point": Point(boxes, [tensor]),
    }[kind]


def described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: described(part) for key, part in value.items()}
    return [type(value).__name__, *map(described, value)] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("kind", ["tensor", "columns", "items", "records", "pairs", "zipped", "mapping", "point"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_batches_of_any_form_are_counted_joined_and_cut(kind: str, size: int):
    form = form_of(batch_of(kind, 0, size), size)
    assert form.count(batch_of(kind, 4, 1)) == 1
    joined = form.join([batch_of(kind, 0, size), batch_of(kind, size, size), batch_of(kind, 2 * size, 1)])
    whole = 2 * size + 1
    assert form.count(joined) == whole
    assert described(joined) == described(batch_of(kind, 0, whole))
    assert described(form.cut(joined, slice(1, whole))) == described(batch_of(kind, 1, whole - 1))


def test_arrays_of_different_lengths_stay_together():
    graph = {"nodes": torch.zeros(7, 2), "edges": torch.zeros(11), "y": torch.zeros(3)}
    for batch, size, count in (
        (graph, 3, 3),
        (list(graph.values()), 4, None),
        (graph, 5, None),
        (graph, None, None),
    ):
        form = form_of(batch, size)
        assert form.count(batch) == count
        with pytest.raises(NotRowsError, match="different lengths"):
            form.join([batch, batch])


def test_the_columns_of_a_short_batch_are_no_samples():
    """With batches of two and one sample, its two columns could be taken for two samples."""
    assert form_of(batch_of("zipped", 1, 1), 2) is ROWS
    assert form_of(batch_of("items", 1, 2), 2).tree is True  # type: ignore[attr-defined]


def test_what_does_not_belong_to_samples_stays():
    def batch(first: int, notes: list[str]) -> Any:
        return {"x": torch.arange(first, first + 2), "notes": notes, "ids": [[first], [first, 1]]}

    form = form_of(batch(0, ["a", "b", "c"]), 2)
    joined = form.join([batch(0, ["a", "b", "c"]), batch(2, [])])
    assert described(joined) == described(
        {"x": torch.arange(4), "notes": ["a", "b", "c"], "ids": [[0], [0, 1], [2], [2, 1]]}
    )
    with pytest.raises(NotRowsError, match="different fields"):
        form.join([batch(0, []), {**batch(2, []), "more": 1}])


def test_more_rows_than_samples_are_rows():
    views = {"x": torch.arange(6)}
    form = form_of(views, 3)
    assert form is ROWS
    assert form.count(form.join([views, views])) == 12

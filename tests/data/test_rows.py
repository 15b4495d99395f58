from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch

from hasten.data.rows import NotRowsError, count_rows, cut, join

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

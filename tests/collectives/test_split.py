from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasten.collectives.split import split_between_processes
from hasten.world.process import World

META, CPU = torch.device("meta"), torch.device("cpu")


class Dataset:
    """What is needed of a `datasets.Dataset`."""

    column_names = ("x",)

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: Any) -> "Dataset":
        return Dataset([self.rows[index] for index in indices])


def parts(inputs: Any, size: int, padded: bool = False, device: torch.device = CPU) -> list[Any]:
    found = []
    for rank in range(size):
        with split_between_processes(inputs, padded, world=World(rank=rank, size=size, device=device)) as part:
            found.append(part)
    return found


def test_a_process_alone_gets_its_argument_back():
    for inputs in ([1], {"a": [1], "b": []}, "text", None):
        with split_between_processes(inputs, apply_padding=True) as part:
            assert part is inputs


@given(st.integers(0, 30), st.integers(2, 5))
def test_parts_are_even_and_together_the_whole(length: int, size: int):
    whole = list(range(length))
    found = parts(whole, size)
    assert sum(found, []) == whole  # noqa: RUF017
    assert [len(part) for part in found] == sorted((len(part) for part in found), reverse=True)
    assert len(found[0]) - len(found[-1]) <= 1
    padded = parts(whole, size, padded=True)
    assert {len(part) for part in padded} == {-(-length // size)}
    for plain, filled in zip(found, padded, strict=True):
        assert filled == plain + whole[-1:] * (len(filled) - len(plain))


def test_seventeen_over_four():
    assert [len(part) for part in parts(list(range(17)), 4)] == [5, 4, 4, 4]
    assert parts([1], 3) == [[1], [], []]
    assert parts([1], 3, padded=True) == [[1]] * 3


def test_types_are_kept_and_tuples_can_be_padded():
    assert parts((1, 2, 3), 2, padded=True) == [(1, 2), (3, 3)]
    tensors = parts(torch.arange(6).view(3, 2), 2, padded=True)
    assert [part.tolist() for part in tensors] == [[[0, 1], [2, 3]], [[4, 5], [4, 5]]]
    assert [part.rows for part in parts(Dataset([1, 2, 3]), 2, padded=True)] == [[1, 2], [3, 3]]
    assert [part.rows for part in parts(Dataset([1, 2, 3]), 2)] == [[1, 2], [3]]


def test_padded_tensors_come_out_on_the_device():
    assert [part.device for part in parts(torch.arange(3), 2, padded=True, device=META)] == [META] * 2
    assert [part.device.type for part in parts(torch.arange(3), 2, device=META)] == ["cpu"] * 2


def test_mappings_are_split_value_by_value_and_never_changed():
    inputs = OrderedDict(a=[1, 2, 3], b={"c": torch.arange(3), "d": (4, 5, 6)}, name="text")
    first, second = parts(inputs, 2)
    assert type(first) is OrderedDict
    assert (first["a"], first["b"]["c"].tolist(), first["b"]["d"], first["name"]) == ([1, 2], [0, 1], (4, 5), "text")
    assert (second["a"], second["b"]["c"].tolist(), second["b"]["d"]) == ([3], [2], (6,))
    assert inputs["a"] == [1, 2, 3]
    assert inputs["b"]["d"] == (4, 5, 6)
    assert parts({"a": [1, 2, 3]}, 2, padded=True)[1] == {"a": [3, 3]}


def test_values_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match=r"must have the same length, but they have \{'a': 3, 'b': 2\}"):
        parts({"a": [1, 2, 3], "b": [1, 2]}, 2)


def test_what_cannot_be_split_comes_out_whole():
    for inputs in ("text", 5, None, {}, {1, 2}, range(3)):
        assert all(part is inputs or part == inputs == {} for part in parts(inputs, 2, padded=True))
    assert parts([], 2, padded=True) == [[], []]
    with pytest.raises(TypeError, match="0-d tensor"):
        parts(torch.tensor(1), 2)

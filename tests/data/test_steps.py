from typing import Any

import pytest
import torch

from hasten.data.steps import Steps


def batches(*sizes: int) -> Any:
    """Batches of consecutive numbers."""
    numbers = torch.arange(sum(sizes)).split(list(sizes))
    return iter(numbers)


def divided(steps: Steps, *sizes: int) -> list[Any]:
    return [([part.tolist() for part in parts], real) for parts, real, _ in steps.divide(batches(*sizes))]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((2, 2, 2, 2), [([[0, 1], [2, 3]], 0), ([[4, 5], [6, 7]], 0)]),
        ((2, 2, 2), [([[0, 1], [2, 3]], 0), ([[4], [5]], 0)]),
        ((2, 2, 2, 1), [([[0, 1], [2, 3]], 0), ([[4, 5], [6, 0]], 3)]),
        ((2, 2, 1), [([[0, 1], [2, 3]], 0), ([[4], [0]], 1)]),
        ((1,), [([[0], [0]], 1)]),
        ((), []),
    ],
)
def test_a_batch_for_every_part(sizes: tuple[int, ...], expected: list[Any]):
    assert divided(Steps(parts=2, batch_size=2), *sizes) == expected


def test_the_first_batch_is_repeated_as_often_as_needed():
    assert divided(Steps(parts=4, batch_size=2), 1) == [([[0], [0], [0], [0]], 1)]


def test_the_first_batch_of_the_pass_may_be_another():
    first = lambda: torch.tensor([90, 91])  # noqa: E731
    ((parts, real, _),) = Steps(parts=2, batch_size=2).divide(batches(1), first)
    assert ([part.tolist() for part in parts], real) == ([[0], [90]], 1)


def test_batches_of_their_own_size_stay_whole():
    assert divided(Steps(parts=2), 3, 5, 4, 7) == [
        ([[0, 1, 2], [3, 4, 5, 6, 7]], 0),
        ([[8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18]], 0),
    ]


def test_batches_of_different_lengths_are_noted():
    sizes = (2, 2, 2, 1, 2, 2)
    assert [step.uneven for step in Steps(parts=2, batch_size=2).divide(batches(*sizes))] == [False, True, False]
    assert [step.uneven for step in Steps(parts=2).divide(batches(3, 5, 4, 4))] == [True, False]


def test_an_incomplete_step_is_dropped():
    steps = Steps(parts=2, batch_size=2, drop_last=True)
    assert divided(steps, 2, 2, 2) == [([[0, 1], [2, 3]], 0)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((4, 4), [([[0, 1], [2, 3]], 0), ([[4, 5], [6, 7]], 0)]),
        ((4, 3), [([[0, 1], [2, 3]], 0), ([[4, 5], [6, 0]], 3)]),
        ((4, 2), [([[0, 1], [2, 3]], 0), ([[4], [5]], 0)]),
    ],
)
def test_one_batch_for_all_parts(sizes: tuple[int, ...], expected: list[Any]):
    assert divided(Steps(parts=2, split=True, batch_size=4), *sizes) == expected


def test_what_cannot_be_joined_is_dealt_out_whole():
    read = [torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, 5)]
    steps = list(Steps(parts=2).divide(iter(read)))
    assert [[tuple(part.shape) for part in parts] for parts, *_ in steps] == [[(2, 3), (2, 4)], [(1, 5), (1, 5)]]
    objects = [["a", {"b"}], ["c", {"d"}], ["e", {"f"}]]
    assert list(Steps(parts=2).divide(iter(objects))) == [
        (objects[:2], 0, False),
        ([objects[2], objects[0]], -1, False),
    ]
    ragged = [[torch.zeros(2, 3)], [torch.zeros(2, 4)], [torch.zeros(2, 3)], [torch.zeros(1, 4)], [torch.zeros(2, 9)]]
    *_, (parts, real, uneven) = Steps(parts=3).divide(iter(ragged))
    assert [part[0].shape for part in parts] == [(1, 4), (2, 9), (2, 3)]
    assert (real, uneven) == (3, True)


def test_a_function_of_the_user_cuts():
    def last_first(data: Any, rows: slice, process_index: int, num_processes: int) -> Any:
        return data[rows].flip(0), process_index, num_processes

    steps = list(Steps(parts=2, batch_size=2, slice_fn=last_first).divide(batches(2, 2, 1)))
    found = [[(part.tolist(), *rest) for part, *rest in parts] for parts, *_ in steps]
    assert found == [[([1, 0], 0, 2), ([3, 2], 1, 2)], [([4], 0, 2), ([0], 1, 2)]]


@pytest.mark.parametrize(
    ("read", "text"), [([torch.zeros(3), torch.zeros(4)], "3 rows"), ([{"a"}, {"b"}], "unknown size")]
)
def test_batches_that_cannot_be_cut(read: list[Any], text: str):
    with pytest.raises(ValueError, match=f"{text}.*split_batches=False"):
        list(Steps(parts=2, split=True).divide(iter(read)))


def test_a_last_batch_that_cannot_be_cut():
    with pytest.raises(ValueError, match="unknown size"):
        list(Steps(parts=2, split=True, batch_size=2).divide(iter([{"a"}])))


def pictures(*boxes: int) -> list[torch.Tensor]:
    return [torch.full((count, 4), count) for count in boxes]


@pytest.mark.parametrize(
    ("settings", "read", "expected"),
    [
        (
            {"parts": 2},
            [pictures(3, 0), pictures(1, 2), pictures(4)],
            [([[3, 0], [1, 2]], 0), ([[4], [3]], 1)],
        ),
        (
            {"parts": 3},
            [pictures(3, 0), pictures(1, 2)],
            [([[3, 0], [1, 2], [3, 0]], 4)],
        ),
        (
            {"parts": 2, "split": True},
            [pictures(3, 0), pictures(1)],
            [([[3], [0]], 0), ([[1], [3]], 1)],
        ),
    ],
)
def test_samples_in_a_list_are_rows(settings: dict[str, Any], read: list[Any], expected: list[Any]):
    steps = Steps(batch_size=2, **settings).divide(iter(read))
    found = [([[len(each) for each in part] for part in step.parts], step.real) for step in steps]
    assert found == expected

import warnings
from typing import Any

import pytest
import torch

from hasten.collectives.gather import gather
from hasten.collectives.pad import CannotPadNestedTensorWarning, pad_across_processes, pad_input_tensors
from tests.collectives.data import Counted, Record, message, start, tree
from tests.ranks import run_ranks


def test_a_process_alone_gets_its_tensors_back():
    x = torch.zeros(2)
    assert pad_across_processes(x) is x
    assert pad_across_processes({"a": [x]})["a"][0] is x
    with pytest.raises(TypeError, match="passed to `pad_across_processes`"):
        pad_across_processes(["text"])


def pad_many_ways() -> list[Any]:
    rank = start().rank
    ones = torch.ones(2 + rank, 2)
    wide = torch.ones(2, 1 + rank)
    flags, whole = torch.ones(1 + rank, dtype=torch.bool), torch.ones(1 + rank, dtype=torch.int64)
    results = [
        pad_across_processes(ones),
        pad_across_processes(wide, dim=1, pad_index=-100),
        pad_across_processes(wide, dim=-1, pad_index=0.5),
        pad_across_processes(whole, pad_index=-1, pad_first=True),
        pad_across_processes(flags),
        pad_across_processes(flags, pad_index=1),
        pad_across_processes(torch.ones(1 + rank, dtype=torch.complex64)),
        pad_across_processes(torch.ones(rank, 0)),
    ]
    return [(each.dtype, each.tolist()) for each in results]


def test_padding_is_at_the_end_or_beginning_and_keeps_the_dtype():
    shorter, longer = run_ranks(pad_many_ways, 2)
    assert [dtype for dtype, _ in shorter] == [dtype for dtype, _ in longer]
    assert shorter == [
        (torch.float32, [[1, 1], [1, 1], [0, 0]]),
        (torch.float32, [[1, -100], [1, -100]]),
        (torch.float32, [[1, 0.5], [1, 0.5]]),
        (torch.int64, [-1, 1]),
        (torch.bool, [True, False]),
        (torch.bool, [True, True]),
        (torch.complex64, [1, 0]),
        (torch.float32, [[]]),
    ]
    assert longer[0][1] == [[1, 1]] * 3
    assert longer[3][1] == [1, 1]


def untouched() -> list[bool]:
    start()
    x, scalar, vector = torch.ones(2, 3), torch.tensor(1.0), torch.ones(2)
    padded = pad_across_processes([x, scalar, vector], dim=1)
    return [
        pad_across_processes(x) is x,
        pad_across_processes(x, dim=2) is x,
        pad_across_processes(x, dim=-3) is x,
        *[one is other for one, other in zip(padded, [x, scalar, vector], strict=True)],
    ]


def test_what_needs_no_padding_is_the_same_object():
    assert run_ranks(untouched, 2) == [[True] * 6] * 2


def pad_nested() -> Any:
    rank = start().rank
    items = {"a": torch.ones(1 + rank), "b": Record([torch.ones(3 - rank, 1 + rank)], ())}
    data = items if rank == 0 else dict(reversed(items.items()))
    padded = pad_across_processes(data, pad_index=7)
    parameter = torch.ones(1 + rank, requires_grad=True)
    pad_across_processes(parameter).sum().backward()
    assert parameter.grad is not None
    chained = gather(pad_across_processes(pad_across_processes(torch.full((1 + rank, 2 - rank), rank), dim=0), dim=1))
    return padded["a"].tolist(), padded["b"].value[0].tolist(), parameter.grad.tolist(), chained.tolist()


def test_structures_with_other_lengths_for_each_tensor():
    assert run_ranks(pad_nested, 2) == [
        ([1, 7], [[1], [1], [1]], [1], [[0, 0], [0, 0], [1, 0], [1, 0]]),
        ([1, 1], [[1, 1], [1, 1], [7, 7]], [1, 1], [[0, 0], [0, 0], [1, 0], [1, 0]]),
    ]


def pad_torch_nested() -> tuple[bool, list[str]]:
    import warnings

    start()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
        result = pad_across_processes([nested])[0]
    return result is nested, [each.category.__name__ for each in caught if "pad_across_processes" in str(each.message)]


def test_nested_tensors_stay_as_they_are_with_a_warning():
    assert run_ranks(pad_torch_nested, 2) == [(True, [CannotPadNestedTensorWarning.__name__])] * 2


def count_collectives() -> list[int]:
    rank = start().rank
    found = []
    for data in (tree(rank, 32 - rank), [torch.zeros(index % 3 + rank) for index in range(3000)], []):
        with Counted() as counted:
            pad_across_processes(data)
        found.append(len(counted.calls))
    return found


def test_number_of_collectives():
    assert run_ranks(count_collectives, 2) == [[1, 2, 1]] * 2


def disagree() -> list[str]:
    rank = start().rank
    found = [
        message(lambda: pad_across_processes(torch.zeros((2,) * (1 + rank)))),
        message(lambda: pad_across_processes({"a": torch.zeros(2, dtype=[torch.int64, torch.float32][rank])})),
        message(lambda: pad_across_processes(torch.zeros(2), dim=-rank)),
        message(lambda: pad_across_processes([torch.zeros(2)] * (1 + rank))),
    ]
    for value in (-100, 0.5):
        try:
            pad_across_processes([torch.ones(1 + rank, dtype=torch.uint8)], pad_index=value)
        except ValueError as error:
            found.append(str(error))
    pad_across_processes([torch.ones(1, dtype=torch.uint8)], pad_index=-100)  # needs no padding
    return found


def test_disagreement_raises_the_same_error_everywhere():
    first, second = run_ranks(disagree, 2)
    assert first == second
    assert "the tensor: float32 1-dimensional on rank 0; float32 2-dimensional on rank 1" in first[0]
    assert "['a']: int64 1-dimensional on rank 0; float32 1-dimensional on rank 1" in first[1]
    assert "rank 0: pad_across_processes(dim=0)" in first[2]
    assert "[1]: nothing on rank 0; float32 1-dimensional on rank 1" in first[3]
    assert first[4].startswith("pad_index=-100 cannot be held by a tensor of torch.uint8")
    assert first[5].startswith("pad_index=0.5 cannot be held by a tensor of torch.uint8")


# ---- a dimension that a tensor does not have ----


def pad_missing_dimension() -> list[Any]:
    rank = start().rank
    found: list[Any] = []
    same = {"x": torch.zeros(2), "y": torch.zeros(()), "z": torch.ones(2, 1 + rank)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        padded = pad_across_processes(same, dim=1)
    assert padded["x"] is same["x"]
    assert padded["y"] is same["y"]
    found.append(padded["z"].shape)
    differing = {"x": torch.zeros(2 + rank), "z": torch.ones(2, 1 + rank)}
    with pytest.warns(UserWarning, match="leaves") as caught:
        padded = pad_across_processes(differing, dim=1)
    assert padded["x"] is differing["x"]
    found += [padded["z"].shape, str(caught[0].message)]
    return found


def test_tensors_without_the_dimension_are_left_and_told_if_they_differ():
    text = (
        "`pad_across_processes(dim=1)` leaves ['x'] as it is: it has 1 dimension, and its shapes differ between the processes: "
        "[2] on rank 0; [3] on rank 1. Pad it along a dimension that it has."
    )
    assert run_ranks(pad_missing_dimension, 2) == [[(2, 2), (2, 2), text]] * 2


# ---- batches that are to be divided ----


@pytest.mark.parametrize(
    ("length", "parts", "expected"), [(5, 2, 6), (5, 4, 8), (5, 3, 6), (6, 4, 8), (1, 4, 4), (4, 2, 4)]
)
def test_batches_get_the_next_length_that_can_be_divided(length: int, parts: int, expected: int):
    batch = {"a": torch.arange(1, length + 1), "b": [torch.ones(length, 2, dtype=torch.bool)]}
    padded = pad_input_tensors(batch, length, parts)
    assert padded["a"].tolist() == [*range(1, length + 1), *[0] * (expected - length)]
    assert padded["b"][0].dtype is torch.bool
    assert padded["b"][0].sum(0).tolist() == [length, length]
    assert padded["b"][0].shape == (expected, 2)


def test_batches_can_be_padded_along_any_dimension():
    assert pad_input_tensors(torch.ones(2, 5), 5, 3, dim=1).tolist() == [[1] * 5 + [0]] * 2
    assert pad_input_tensors(torch.ones(2, 5), 5, 3, dim=-1).shape == (2, 6)
    for given in (torch.ones(6), torch.tensor(1)):
        with pytest.raises(ValueError, match="all tensors of the batch must be 2 long along that dimension"):
            pad_input_tensors(given, 2, 4)
    with pytest.raises(TypeError, match="Unsupported types"):
        pad_input_tensors(["text"], 2, 4)

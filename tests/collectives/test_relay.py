from typing import Any

import pytest
import torch

from hasten.collectives.relay import (
    TENSOR_INT_TO_DTYPE,
    TENSOR_TYPE_TO_INT,
    copy_tensor_to_devices,
    gather_tensor_shape,
)
from tests.collectives.data import assert_same, message, start
from tests.collectives.test_gather import DTYPES, values
from tests.ranks import run_ranks


def test_the_numbers_of_dtypes():
    assert TENSOR_TYPE_TO_INT[torch.bfloat16] == 4
    assert {TENSOR_INT_TO_DTYPE[number]: number for number in range(1, 11)} == TENSOR_TYPE_TO_INT


def test_alone():
    tensor = torch.ones(2, 3)
    assert copy_tensor_to_devices(tensor) is tensor
    shape, number = gather_tensor_shape(tensor)
    assert_same(shape, torch.tensor([[2], [3]], dtype=torch.int32))
    assert number == 1
    assert gather_tensor_shape(torch.tensor(True))[0].shape == (0, 1)
    with pytest.raises(ValueError, match="must give a tensor, but gave <class 'NoneType'>"):
        copy_tensor_to_devices()
    with pytest.raises(ValueError, match="no process has given a tensor"):
        gather_tensor_shape(None)
    with pytest.raises(ValueError, match="complex64 has no number"):
        gather_tensor_shape(torch.zeros(1, dtype=torch.complex64))


def relay(size: int) -> list[Any]:
    world = start()
    for shape in [(), (0, 2), (2, 3), (600, 512)]:
        for dtype in DTYPES:
            wanted = values(5, shape, dtype)
            result = copy_tensor_to_devices(wanted if world.is_last else None)
            assert_same(result, wanted)
            assert result.is_contiguous()
    turned = torch.arange(6.0, requires_grad=True).view(2, 3).t()
    assert copy_tensor_to_devices(turned if world.is_last else torch.zeros(7)).tolist() == [[0, 3], [1, 4], [2, 5]]
    shape, number = gather_tensor_shape(torch.ones(4, 5, dtype=torch.int8) if world.rank == 1 else None)
    return [shape.tolist(), number]


@pytest.mark.parametrize("size", [2, 3])
def test_everyone_gets_the_tensor_of_the_last_process(size: int):
    assert run_ranks(relay, size, size) == [[[[4], [5]], 6]] * size


def nothing_there() -> list[str]:
    start()
    return [message(copy_tensor_to_devices)]


def test_a_last_process_without_a_tensor_tells_the_others():
    first, last = run_ranks(nothing_there, 2)
    assert first == last
    assert "rank 1: ValueError: copy_tensor_to_devices: the last process must give a tensor" in first[0]

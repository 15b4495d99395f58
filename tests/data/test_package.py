from typing import Any

import numpy
import pytest
import torch

from hasten.data.package import Buffer, Package


def packed(item: Any) -> Any:
    package = Package(item)
    buffer = Buffer(package.nbytes + 7)
    buffer.data.fill_(255)
    package.write(buffer)
    return buffer.unpack(buffer.header())


TENSORS = [
    torch.arange(6.0).view(2, 3),
    torch.arange(6).view(2, 3).t(),
    torch.tensor(True),
    torch.empty(0, 3, dtype=torch.float64),
    torch.tensor([1 + 2j, 3j]).conj(),
    torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
    torch.arange(10, dtype=torch.int8)[::3],
]


@pytest.mark.parametrize("tensor", TENSORS)
def test_tensors_arrive_as_they_were(tensor: torch.Tensor):
    result = packed({"x": [tensor, "text"], "y": tensor})
    for found in (result["x"][0], result["y"]):
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor.resolve_conj())
    assert result["x"][1] == "text"


def test_other_things_arrive_as_they_were():
    item = {"none": None, "words": ["a", "b"], "array": numpy.arange(3), "set": {1}, "bytes": b"\x00"}
    result = packed(item)
    assert result.pop("array").tolist() == [0, 1, 2]
    assert result == {"none": None, "words": ["a", "b"], "set": {1}, "bytes": b"\x00"}


def test_tensors_that_are_more_than_values_are_pickled():
    parameter = torch.nn.Parameter(torch.ones(2))
    sparse = torch.eye(2).to_sparse()
    result = packed([parameter, sparse, torch.ones(2, requires_grad=True)])
    assert type(result[0]) is torch.nn.Parameter
    assert result[1].layout is torch.sparse_coo
    assert result[2].requires_grad


def test_memory_is_lent_as_long_as_a_tensor_in_it_is_alive():
    package = Package({"x": torch.arange(6), "y": torch.zeros(2), "empty": torch.empty(0)})
    buffer = Buffer(package.nbytes)
    package.write(buffer)
    item = buffer.unpack(buffer.header())
    assert buffer.is_lent
    part = item.pop("x")[2:].numpy()[1:]
    item.clear()
    assert buffer.is_lent
    assert part.tolist() == [3, 4, 5]
    del part
    assert not buffer.is_lent


def test_what_has_no_tensors_takes_no_memory():
    package = Package(["text", 1, numpy.arange(3)])
    buffer = Buffer(package.nbytes)
    package.write(buffer)
    item = buffer.unpack(buffer.header())
    assert not buffer.is_lent
    assert item[2].tolist() == [0, 1, 2]


def test_a_buffer_takes_other_forms():
    buffer = Buffer(4096)
    for number in range(300):
        package = Package([torch.full((number,), number), torch.tensor(number)])
        package.write(buffer, note=number)
        assert buffer.header().note == number
        assert [each.tolist() for each in buffer.unpack(buffer.header())] == [[number] * number, number]


def test_a_buffer_serves_inside_inference_mode_and_outside():
    package = Package(torch.arange(3))
    buffer = Buffer(package.nbytes)
    with torch.inference_mode():
        package.write(buffer)
        assert buffer.unpack(buffer.header()).is_inference()
    package.write(buffer)
    assert buffer.unpack(buffer.header()).tolist() == [0, 1, 2]


NUMBERS = [
    "float8_e4m3fn",
    "float16",
    "bfloat16",
    "float64",
    "uint8",
    "uint16",
    "uint64",
    "complex128",
    "bool",
]


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in NUMBERS])
def test_every_kind_of_number(dtype: torch.dtype):
    tensor = torch.tensor([0, 1, 1, 0]).to(dtype)
    found = packed([tensor])[0]
    assert found.dtype == dtype
    assert found.view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()

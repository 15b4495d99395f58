from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.counts import Operations

from hasten.collectives.average import average, average_
from hasten.world import process
from hasten.world.agreement import DistributedOperationException
from tests.ranks import run_ranks
from tests.simulated_device import install

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn]


def average_all(kind: torch.dtype) -> list[Any]:
    process.start()
    rank = dist.get_rank()
    base = torch.arange(6.0).view(2, 3)
    tensors = {
        "matrix": (base + rank).to(kind),
        "turned": (base * (rank + 1)).t().contiguous().t().to(kind, memory_format=torch.preserve_format),
        "number": torch.tensor(float(rank)).to(kind),
        "nothing": torch.empty(0, 3).to(kind),
    }
    kept = {name: (tensor, tensor.data_ptr(), tensor.stride()) for name, tensor in tensors.items()}
    with Operations() as operations:
        average_(tensors, "test")
    assert all(tensors[name] is tensor for name, (tensor, _, _) in kept.items())
    assert all((tensor.data_ptr(), tensor.stride()) == (place, stride) for tensor, place, stride in kept.values())
    return [operations.collectives, *(tensors[name].to(torch.complex64).real.tolist() for name in tensors)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_mean_of_all_processes_in_place(dtype: torch.dtype, world_size: int):
    mean = (world_size - 1) / 2
    base = torch.arange(6.0).view(2, 3)
    # 8 bits hold 4 significant ones
    tolerance = (
        {"rtol": 0.07, "atol": 0.0}
        if dtype.itemsize == 1
        else {"rtol": 1e-2 if dtype.itemsize == 2 else 1e-6, "atol": 0.0}
    )
    for count, matrix, turned, number, nothing in run_ranks(average_all, world_size, dtype):
        assert count == (0 if world_size == 1 else 2)  # the agreement, and the average
        torch.testing.assert_close(torch.tensor(matrix), base + mean, **tolerance)
        torch.testing.assert_close(torch.tensor(turned), base * (mean + 1), **tolerance)
        assert number == pytest.approx(mean)
        assert nothing == []


def mean() -> list[Any]:
    process.start()
    rank = dist.get_rank()
    tensors = {
        "b": torch.full((2,), float(rank)),
        "a": torch.full((), 3.0 + rank),
        "c": torch.tensor([2.0 * rank]).double(),
    }
    means = average(tensors, "test")
    same = [means[name] is tensors[name] for name in tensors]
    return [
        list(means),
        *(each.tolist() for each in means.values()),
        *(each.tolist() for each in tensors.values()),
        same,
    ]


def test_the_means_beside_the_tensors_which_stay_as_they_are():
    names = ["b", "a", "c"]
    for rank, found in enumerate(run_ranks(mean, 2)):
        assert found == [names, [0.5] * 2, 3.5, [1.0], [float(rank)] * 2, 3.0 + rank, [2.0 * rank], [False] * 3]
    assert run_ranks(mean, 1) == [[names, [0.0] * 2, 3.0, [0.0], [0.0] * 2, 3.0, [0.0], [True] * 3]]


def average_many() -> tuple[int, list[float], float]:
    process.start()
    rank = dist.get_rank()
    items = [
        (f"t{i}", torch.full((4,), float(rank + i), dtype=(torch.float32, torch.float64)[i % 2])) for i in range(40)
    ]
    large = torch.full((5,), 60000.0, dtype=torch.float16)  # the sum would overflow
    tensors = {**dict(items if rank else reversed(items)), "large": large}  # the order of the names does not matter
    with Operations() as operations:
        average_(tensors, "test")
    return operations.collectives, [tensors[f"t{i}"][0].item() for i in range(40)], large[0].item()


def test_one_collective_per_dtype_whatever_the_order():
    expected = [i + 0.5 for i in range(40)]
    assert run_ranks(average_many, 2) == [(4, expected, 60000.0)] * 2


def refuse(case: str) -> tuple[str, str, list[float]]:
    process.start()
    rank = dist.get_rank()
    kept = torch.full((2,), float(rank))
    tensors: dict[str, torch.Tensor] = {"kept": kept}
    arguments = {}
    if case == "whole":
        tensors["count"] = torch.ones(2, dtype=torch.int64)
    elif case == "missing" and rank == 0:
        tensors["more"] = torch.ones(2)
    elif case == "arguments":
        arguments["end"] = rank == 0
    try:
        average_(tensors, "LocalSGD", **arguments)
    except Exception as error:
        return type(error).__name__, str(error), kept.tolist()
    raise AssertionError


def test_whole_numbers_have_no_mean():
    for rank, (kind, text, kept) in enumerate(run_ranks(refuse, 2, "whole")):
        assert kind == "TypeError"
        assert "count" in text
        assert "(torch.int64) has no mean" in text
        assert kept == [float(rank)] * 2


@pytest.mark.parametrize(("case", "told"), [("missing", "more"), ("arguments", "LocalSGD(end=True)")])
def test_processes_that_differ_get_the_same_error_and_keep_what_they_have(case: str, told: str):
    (kind, text, first), (_, other, second) = run_ranks(refuse, 2, case)
    assert kind == DistributedOperationException.__name__
    assert told in text
    assert text == other
    assert (first, second) == ([0.0] * 2, [1.0] * 2)


def on_an_accelerator() -> list[Any]:
    memory = install("npu")  # it exists as long as this does
    process.start()
    rank = float(dist.get_rank())
    tensors = {"there": torch.full((2,), rank, device="npu:0"), "here": torch.full((3,), rank)}
    means = average(tensors, "test")
    found = [(str(each.device), each.tolist()) for each in (*means.values(), *tensors.values())]
    average_(tensors, "test")
    del memory
    return [*found, *((str(each.device), each.tolist()) for each in tensors.values())]


def test_tensors_of_an_accelerator_stay_there():
    means = [("npu:0", [0.5] * 2), ("cpu", [0.5] * 3)]
    for rank, found in enumerate(run_ranks(on_an_accelerator, 2, fresh=True)):
        assert found == [*means, ("npu:0", [float(rank)] * 2), ("cpu", [float(rank)] * 3), *means]

from typing import Any

import pytest
import torch

from hasten.collectives.reduce import reduce
from tests.collectives.data import Counted, Pair, assert_same, leaves, message, start, tree
from tests.ranks import run_ranks

NAMED = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin}


# ---- alone ----


def test_a_process_alone_gets_a_copy_times_the_scale():
    x = torch.tensor([1.0, 2.0])
    for reduction in ("mean", "sum", "max", "min", "none"):
        result = reduce([x], reduction)[0]
        assert result is not x
        assert result.tolist() == [1, 2]
        assert reduce(x, reduction, scale=0.5).tolist() == [0.5, 1]
    assert reduce(torch.tensor([1, 2])).dtype is torch.int64
    with pytest.raises(TypeError, match="passed to `reduce`"):
        reduce(["text"])


def test_unknown_reductions_name_the_known_ones():
    with pytest.raises(ValueError, match="reduction='avg' is unknown; it can be 'mean', 'sum', 'max', 'min', 'none'"):
        reduce(torch.zeros(1), "avg")


# ---- values ----


def own(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    whole = torch.randint(0, 5, shape, generator=generator)
    return whole.to(dtype) if dtype is torch.bool else (whole - (0 if dtype.is_signed is False else 2)).to(dtype)


def reduce_everything(size: int) -> None:
    """Small whole numbers: exact in every dtype, whatever the order of the sums."""
    world = start()
    floating = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64]
    whole = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32]
    for shape in [(), (0, 2), (3, 2), (9000, 2), (1100, 1000)]:
        for dtype in [*floating, *whole, torch.uint64]:
            wide = torch.complex128 if dtype.is_complex else torch.float64
            stacked = torch.stack([own(rank, shape, dtype).to(wide) for rank in range(size)])
            for reduction, combine in NAMED.items():
                ordered = reduction in ("max", "min")
                if (reduction == "mean" and dtype not in floating) or (ordered and dtype.is_complex):
                    continue
                result = reduce(own(world.rank, shape, dtype), reduction)
                assert_same(result, combine(stacked, dim=0).to(dtype).contiguous())
            if shape == (1100, 1000) and dtype is torch.float32:
                break


@pytest.mark.parametrize("size", [2, 4])
def test_every_dtype_shape_and_reduction(size: int):
    run_ranks(reduce_everything, size, size)


def reduce_trees(rows: int) -> bool:
    world = start()
    trees = [leaves(tree(rank, rows)) for rank in range(world.size)]
    result = reduce(tree(world.rank, rows), "mean")
    assert list(result) == list(tree(0))
    expected = [torch.stack(each).mean(0) for each in zip(*trees, strict=True)]
    return all(torch.allclose(one, other, atol=1e-6) for one, other in zip(leaves(result), expected, strict=True))


@pytest.mark.parametrize("rows", [32, 320])
def test_twenty_tensors(rows: int):
    assert all(run_ranks(reduce_trees, 3, rows))


def scales_and_types() -> Any:
    rank = start().rank
    integers = torch.tensor([1 + rank])
    data = Pair(torch.tensor(1.0 + rank), {"x": integers})
    return [
        reduce(data, "sum", scale=2.0),
        reduce(data, "sum"),
        reduce(integers, "sum", scale=0.5),
        reduce(integers, "none"),
        reduce(torch.tensor([200 + rank], dtype=torch.uint8), "sum"),
        reduce(torch.tensor([rank == 0, False]), "sum"),
        reduce([]),
    ]


def test_scale_multiplies_and_dtypes_are_kept():
    for rank, (scaled, plain, half, none, wrapped, flags, empty) in enumerate(run_ranks(scales_and_types, 2)):
        assert (float(scaled.left), scaled.right["x"].tolist()) == (6.0, [6.0])
        assert (plain.left.shape, plain.right["x"].dtype, plain.right["x"].tolist()) == ((), torch.int64, [3])
        assert half.tolist() == [1.5]
        assert none.tolist() == [1 + rank]
        assert (wrapped.dtype, wrapped.tolist()) == (torch.uint8, [145])
        assert (flags.dtype, flags.tolist()) == (torch.bool, [True, False])
        assert empty == []


def halves() -> list[Any]:
    start()
    found = []
    for length in (2, 20_000):
        large = torch.full((length,), 60_000.0, dtype=torch.float16)
        found.append((reduce(large, "mean")[0].item(), reduce(large, "sum")[0].item()))
    return found


def test_the_mean_of_halves_does_not_overflow():
    assert run_ranks(halves, 2) == [[(60_000, float("inf"))] * 2] * 2


def results_are_apart() -> list[Any]:
    rank = start().rank
    x = torch.tensor([1.0 + rank])
    first = reduce([x, x])
    second = reduce([x + 1, x + 1])
    first[0].add_(100)
    return [x.tolist(), [each.tolist() for each in first], [each.tolist() for each in second]]


def test_results_share_memory_with_nothing():
    assert run_ranks(results_are_apart, 2) == [
        [[1.0], [[101.5], [1.5]], [[2.5], [2.5]]],
        [[2.0], [[101.5], [1.5]], [[2.5], [2.5]]],
    ]


def gradients() -> list[Any]:
    rank = start().rank
    found = []
    for reduction, scale in (("mean", 1.0), ("sum", 1.0), ("mean", 3.0)):
        x = torch.tensor([1.0 + rank, 2.0], requires_grad=True)
        y = torch.tensor([1.0])
        result, other = reduce([x * 2, y], reduction, scale)
        result.sum().backward()
        found.append((result.tolist(), x.grad.tolist(), other.requires_grad))
    with torch.no_grad():
        found.append(reduce(x).requires_grad)
    return found


def test_gradients_flow_into_the_own_share():
    assert (
        run_ranks(gradients, 2)
        == [[([3.0, 4.0], [1.0, 1.0], False), ([6.0, 8.0], [2.0, 2.0], False), ([9.0, 12.0], [3.0, 3.0], False), False]]
        * 2
    )


# ---- collectives ----


def count_collectives() -> list[Any]:
    rank = start().rank
    mixed = [torch.zeros(5000), torch.zeros(5000, dtype=torch.float64), torch.zeros(2**18), torch.zeros(3)]
    found = []
    for data in (tree(rank), tree(rank, rows=320), torch.zeros(2**18), mixed):
        with Counted() as counted:
            reduce(data)
        found.append(counted.calls)
    return found


def test_number_of_collectives():
    check = run_ranks(count_collectives, 2)[0][0]
    assert len(check) == 1
    assert (
        run_ranks(count_collectives, 2)
        == [
            [
                check,
                [*check, "all_reduce"],
                [*check, "all_to_all_single"],
                [*check, "all_reduce", "all_reduce", "all_to_all_single"],
            ]
        ]
        * 2
    )


# ---- disagreement ----


def disagree() -> list[str]:
    rank = start().rank
    return [
        message(lambda: reduce(torch.zeros(2 + rank))),
        message(lambda: reduce(torch.zeros(2), "sum" if rank else "mean")),
    ]


def test_disagreement_raises_the_same_error_everywhere():
    first, second = run_ranks(disagree, 2)
    assert first == second
    assert "`reduce` needs the same structure, dtypes and shapes" in first[0]
    assert "rank 0: reduce(reduction='mean')" in first[1]
    assert "rank 1: reduce(reduction='sum')" in first[1]


def refused() -> list[str]:
    start()
    found = []
    for data, reduction in (
        ({"n": torch.tensor([1])}, "mean"),
        (torch.tensor([True]), "mean"),
        (torch.tensor([1j]), "max"),
    ):
        try:
            reduce(data, reduction)
        except ValueError as error:
            found.append(str(error))
    return found


def test_what_has_no_mean_or_order_is_refused_with_the_fix():
    first, second = run_ranks(refused, 2)
    assert first == second
    assert "of ['n'] (torch.int64): the mean of whole numbers" in first[0]
    assert "tensor.float()" in first[0]
    assert "torch.bool" in first[1]
    assert "complex numbers have no order" in first[2]


# ---- large tensors ----


def reduce_large(size: int) -> None:
    rank = start().rank
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.bool,
        torch.int16,
        torch.int64,
        torch.complex64,
    ):
        wide = {torch.bool: torch.int64, torch.float8_e4m3fn: torch.float32}.get(dtype, dtype)
        everyone = [torch.arange(2**20).remainder(5).add(each).view(1024, -1).t().to(dtype) for each in range(size)]
        stacked = torch.stack(everyone).to(wide)
        expected = {"sum": stacked.sum(0)}
        if not dtype.is_complex:
            expected |= {"max": stacked.amax(0), "min": stacked.amin(0)}
        if dtype.is_floating_point or dtype.is_complex:
            expected["mean"] = (stacked.float() if dtype is torch.bfloat16 else stacked).sum(0) / size
        for reduction, values in expected.items():
            given = everyone[rank].clone()
            result = reduce([given], reduction)[0]
            assert result.dtype is dtype
            exact = dtype not in (torch.bfloat16, torch.float8_e4m3fn)
            torch.testing.assert_close(result.to(wide), values.to(dtype).to(wide), rtol=0 if exact else 0.02, atol=0)
            assert torch.equal(given.to(wide), everyone[rank].to(wide))


@pytest.mark.parametrize("size", [2, 3])
def test_large_tensors_of_every_kind(size: int):
    run_ranks(reduce_large, size, size)

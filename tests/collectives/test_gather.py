from collections import OrderedDict, UserDict, defaultdict
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hasten.collectives.gather import gather
from hasten.collectives.wire import wire_of
from tests.collectives.data import Counted, Frozen, Pair, Record, assert_same, leaves, message, start, tree
from tests.ranks import run_ranks

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.uint16,
    torch.uint64,
    torch.complex64,
    torch.complex128,
]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    bits = torch.randint(0, 120, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    if dtype is torch.bool:
        return (bits % 2).view(dtype).view(shape)
    return bits.view(dtype).view(shape)


def joined(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([values(rank, shape, dtype).view(shape or (1,)) for rank in range(size)])


# ---- alone ----


def test_a_process_alone_gets_its_argument_back():
    for data in (torch.tensor(1.0), [torch.tensor(1.0)], {"a": "text"}, None):
        assert gather(data) is data


# ---- values and types ----


def gather_everything(size: int) -> None:
    world = start()
    for shape in [(), (0,), (0, 2), (3,), (2, 3), (70, 70), (600, 512)]:
        for dtype in DTYPES:
            own = values(world.rank, shape, dtype)
            result = gather(own, world=world)
            assert result.is_contiguous()
            assert result.untyped_storage().nbytes() == result.numel() * result.element_size()
            assert_same(result, joined(size, shape, dtype))


@pytest.mark.parametrize("size", [2, 3])
def test_every_dtype_and_shape_arrives_to_the_bit(size: int):
    run_ranks(gather_everything, size, size)


def gather_mixed() -> Any:
    rank = start().rank
    data = {
        "pair": Pair(torch.tensor([rank]), [torch.tensor(1.0 + rank)]),
        "ordered": OrderedDict(b=torch.tensor([rank == 0]), a=torch.tensor([rank + 10])),
        "default": defaultdict(list, x=torch.tensor([float(rank)], dtype=torch.float64)),
        "user": UserDict(x=(torch.tensor([rank]),)),
        "record": Record(torch.tensor([rank]), ()),
        "frozen": Frozen(torch.full((2000,), rank)),
        "empty": [],
    }
    return gather(data), gather([]), gather(data["record"].value.t())


def test_structures_keep_their_types_and_come_back_in_rank_order():
    for data, empty, _ in run_ranks(gather_mixed, 2):
        assert empty == []
        assert [type(item).__name__ for item in data.values()] == [
            "Pair",
            "OrderedDict",
            "defaultdict",
            "UserDict",
            "Record",
            "Frozen",
            "list",
        ]
        assert data["pair"].left.tolist() == [0, 1]
        assert data["pair"].right[0].tolist() == [1.0, 2.0]
        assert list(data["ordered"]) == ["b", "a"]
        assert data["ordered"]["b"].tolist() == [True, False]
        assert data["default"].default_factory is list
        assert data["user"]["x"][0].tolist() == [0, 1]
        assert data["record"].value.tolist() == [0, 1]
        assert data["frozen"].value.tolist() == [0] * 2000 + [1] * 2000


def gather_views() -> Any:
    rank = start().rank
    grid = torch.arange(6).view(2, 3) + 10 * rank
    parameter = torch.nn.Parameter(torch.tensor([1.0 + rank]))
    conjugate = torch.tensor([1 + 1j * rank]).conj()
    large = torch.arange(600_000.0).view(600, 1000).t()
    spread = torch.tensor([rank]).expand(3)
    with torch.inference_mode():
        inside = gather(torch.tensor([rank]))
    results = gather([grid.t(), grid[:, 1], parameter, conjugate, spread, large, large.to(torch.complex64).conj()])
    return [inside.clone(), *results[:5]], results[5].equal(torch.cat([large, large])), results[2].requires_grad


def test_views_parameters_and_conjugates_are_gathered_by_value():
    for results, large, wants_gradient in run_ranks(gather_views, 2):
        assert [result.tolist() for result in results] == [
            [0, 1],
            [[0, 3], [1, 4], [2, 5], [10, 13], [11, 14], [12, 15]],
            [1, 4, 11, 14],
            [1.0, 2.0],
            [1 - 0j, 1 - 1j],
            [0, 0, 0, 1, 1, 1],
        ]
        assert large
        assert not wants_gradient


def gather_in_another_order() -> Any:
    rank = start().rank
    items = {"a": torch.tensor([rank]), "b": torch.tensor([10 + rank]), "c": torch.full((2**18,), float(rank))}
    return gather(items if rank == 0 else dict(reversed(items.items())))


def test_dictionaries_are_matched_by_key_not_by_order():
    for result in run_ranks(gather_in_another_order, 2):
        assert (result["a"].tolist(), result["b"].tolist()) == ([0, 1], [10, 11])
        assert result["c"].sum() == 2**18


def gather_after_change() -> list[list[float]]:
    rank = start().rank
    x = torch.zeros(2)
    first = gather([x])[0]
    x.fill_(rank + 1)
    second = gather([x])[0]
    return [first.tolist(), second.tolist()]


def test_results_do_not_share_memory_with_the_next_call():
    assert run_ranks(gather_after_change, 2) == [[[0, 0, 0, 0], [1, 1, 2, 2]]] * 2


Spec = Any


def specs() -> st.SearchStrategy[Spec]:
    names = st.sampled_from([str(dtype).removeprefix("torch.") for dtype in DTYPES])
    leaf = st.tuples(st.just("leaf"), names, st.lists(st.integers(0, 4), max_size=3))
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.tuples(st.just("list"), st.lists(inner, max_size=3)),
            st.tuples(st.just("tuple"), st.lists(inner, max_size=3)),
            st.tuples(st.just("dict"), st.lists(inner, max_size=3)),
        ),
        max_leaves=6,
    )


def build(spec: Spec, make: Any) -> Any:
    kind, *rest = spec
    if kind == "leaf":
        return make(tuple(rest[1]), getattr(torch, rest[0]))
    items = [build(item, make) for item in rest[0]]
    return dict(enumerate(items)) if kind == "dict" else tuple(items) if kind == "tuple" else items


def gather_specs(given_specs: list[Spec], size: int) -> None:
    world = start()
    for spec in given_specs:
        own = build(spec, lambda shape, dtype: values(world.rank, shape, dtype))
        assert_same(gather(own), build(spec, lambda shape, dtype: joined(size, shape, dtype)))


@settings(max_examples=6, deadline=None, phases=[Phase.generate])
@given(st.lists(specs(), min_size=5, max_size=20))
def test_any_structure(given_specs: list[Spec]):
    run_ranks(gather_specs, 2, given_specs, 2)


# ---- collectives ----


def count_collectives() -> list[Any]:
    rank = start().rank
    small, middle = tree(rank), tree(rank, rows=320)
    large = {"a": torch.zeros(2**18), "b": torch.zeros(2**18), "c": torch.zeros(10)}
    found = []
    for data in (small, middle, torch.zeros(2**18), large, torch.tensor(1.0), []):
        with Counted() as counted:
            gather(data)
        found.append((len(counted.calls), sum(counted.bytes)))
    return found


def test_number_of_collectives_and_bytes():
    frame = 16 << 10
    assert (
        run_ranks(count_collectives, 2)
        == [
            [
                (1, frame),
                (2, frame + 20 * 320 * 16),
                (2, frame + 2**20),
                (4, frame + 2 * 2**20 + 40),
                (1, frame),
                (1, frame),
            ]
        ]
        * 2
    )


def gather_whole_tree() -> tuple[Any, bool]:
    world = start()
    result = gather(tree(world.rank))
    expected = [torch.cat(pair) for pair in zip(*(leaves(tree(rank)) for rank in range(world.size)), strict=True)]
    return None, all(torch.equal(one, other) for one, other in zip(leaves(result), expected, strict=True))


@pytest.mark.parametrize("size", [2, 4])
def test_twenty_tensors(size: int):
    assert all(equal for _, equal in run_ranks(gather_whole_tree, size))


def plans_hold_no_data() -> int:
    wire = wire_of(start())
    assert wire is not None
    for length in range(200):
        gather([torch.zeros(length), torch.zeros(1)])
    return len(wire._plans)


def test_what_is_remembered_is_bounded():
    assert run_ranks(plans_hold_no_data, 2) == [64, 64]


def gather_in_parts() -> list[int]:
    world = start()
    part = world.part([0, 1] if world.rank < 2 else [2, 3])
    return gather(torch.tensor([world.rank]), world=part).tolist()


def test_a_part_of_the_world_gathers_on_its_own():
    assert run_ranks(gather_in_parts, 4) == [[0, 1], [0, 1], [2, 3], [2, 3]]


# ---- disagreement ----


def disagree() -> list[str]:
    rank = start().rank
    found = [
        message(lambda: gather({"x": torch.zeros(2 + rank, 3), "y": torch.zeros(1)})),
        message(lambda: gather([torch.zeros(2, dtype=torch.float32 if rank else torch.float64)])),
        message(lambda: gather({"xyz"[rank]: torch.zeros(2)})),
        message(lambda: gather(torch.zeros(3) if rank < 2 else [torch.zeros(3)])),
        message(lambda: gather(torch.zeros(3) if rank else "text")),
        message(lambda: gather([torch.zeros(2**19 + rank)])),
    ]
    assert gather(torch.tensor([rank])).tolist() == [0, 1, 2]  # the ranks can still talk
    return found


def test_disagreement_raises_the_same_error_everywhere():
    first, *others = run_ranks(disagree, 3)
    assert others == [first, first]
    shapes, dtypes, keys, nesting, failed, large = first
    assert "`gather` needs the same structure, dtypes and shapes on all 3 processes" in shapes
    assert "['x']: float32 [2, 3] on rank 0; float32 [3, 3] on rank 1; float32 [4, 3] on rank 2" in shapes
    assert "['y']" not in shapes
    assert "pad_across_processes" in shapes
    assert "[0]: float64 [2] on rank 0; float32 [2] on ranks 1-2" in dtypes
    assert "tensor.to(torch.float32)" in dtypes
    assert "['x']: float32 [2] on rank 0; nothing on ranks 1-2" in keys
    assert "Pass the same keys" in keys
    assert "the tensor: float32 [3] on ranks 0-1; nothing on rank 2" in nesting
    assert "rank 0: TypeError: Unsupported types (<class 'str'>) passed to `gather`" in failed
    assert "[524288] on rank 0; float32 [524289] on rank 1" in large


def wrong_types() -> list[str]:
    start()
    found = []
    for data in ({"a": "text"}, [None], {1, 2}, torch.zeros(2, 2).to_sparse(), torch.zeros(2, device="meta")):
        try:
            gather(data)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_what_cannot_be_gathered_raises_the_same_everywhere():
    first, second = run_ranks(wrong_types, 2)
    assert first == second
    assert first[0].startswith(
        "TypeError: Unsupported types (<class 'str'>) passed to `gather`. Only nested list/tuple/dicts"
    )
    assert first[0].endswith("It is at ['a'].")
    assert [error.partition(":")[0] for error in first] == ["TypeError"] * 3 + ["RuntimeError", "NotImplementedError"]

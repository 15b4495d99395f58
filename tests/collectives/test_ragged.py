from typing import Any

import pytest
import torch

from hasten import Accelerator
from hasten.collectives.gather import gather
from hasten.world import process
from hasten.world.frames import Frames
from tests.collectives.data import Counted, Frozen, Pair, Record, assert_same, message, start
from tests.collectives.test_gather import DTYPES, values
from tests.ranks import run_ranks

SHAPES = [(3,), (2, 5), (), (0, 4), (1, 1, 7)]  # other numbers of dimensions on every rank
LARGE = 2**18 + 3


def shape_of(rank: int, turn: int) -> tuple[int, ...]:
    return SHAPES[(rank + turn) % len(SHAPES)]


# ---- alone ----


def test_a_process_alone_gets_lists_too():
    given = torch.arange(6.0, requires_grad=True).view(2, 3).t()
    result = gather({"a": given, "b": [torch.tensor(1)]}, ragged=True)
    assert_same(result, {"a": [given.detach()], "b": [[torch.tensor(1)]]})
    assert result["a"][0].is_contiguous()
    assert not result["a"][0].requires_grad
    assert result["b"][0][0].shape == ()
    assert Accelerator(cpu=True).gather(torch.ones(2), ragged=True)[0].tolist() == [1, 1]
    with pytest.raises(TypeError, match="Unsupported types"):
        gather(["text"], ragged=True)


# ---- values ----


def gather_everything(size: int) -> None:
    rank = start().rank
    for turn, dtype in enumerate(DTYPES):
        result = gather(values(rank, shape_of(rank, turn), dtype), ragged=True)
        assert_same(result, [values(each, shape_of(each, turn), dtype) for each in range(size)])
        assert all(each.is_contiguous() for each in result)


@pytest.mark.parametrize("size", [2, 3])
def test_every_dtype_in_any_shape(size: int):
    run_ranks(gather_everything, size, size)


def tree_of(rank: int) -> Any:
    return {
        "loss": torch.tensor(float(rank)),
        "pair": Pair(torch.full((rank, 2), rank), Record(torch.ones(1 + rank, dtype=torch.bool))),
        "frozen": (Frozen(torch.complex(torch.ones(rank), torch.ones(rank)).conj()), [torch.zeros(2, 3)]),
    }


def gather_tree(size: int) -> Any:
    rank = start().rank
    own = tree_of(rank)
    own["pair"].right.note = torch.zeros(0)
    result = gather(dict(reversed(own.items())) if rank == 1 else own, ragged=True)
    assert_same(result["loss"], [torch.tensor(float(each)) for each in range(size)])
    assert type(result["pair"]) is Pair
    assert type(result["pair"].right) is Record
    assert type(result["frozen"][0]) is Frozen
    assert_same(result["pair"].left, [torch.full((each, 2), each) for each in range(size)])
    assert_same(result["pair"].right.value, [torch.ones(1 + each, dtype=torch.bool) for each in range(size)])
    assert_same(result["pair"].right.note, [torch.zeros(0)] * size)
    assert [each.tolist() for each in result["frozen"][0].value] == [[1 - 1j] * each for each in range(size)]
    assert_same(result["frozen"][1], [[torch.zeros(2, 3)] * size])
    return own["pair"].left.tolist()  # what was given is as it was


@pytest.mark.parametrize("size", [2, 3])
def test_structures_keep_their_types_and_the_order_of_keys_does_not_count(size: int):
    assert run_ranks(gather_tree, size, size) == [[[rank] * 2] * rank for rank in range(size)]


def uneven(size: int, lengths: list[int], straight: bool) -> list[str]:
    start()
    Frames.fills_rows = property(lambda self: straight)  # type: ignore[method-assign,assignment]
    rank = process.current().rank
    own = {"x": torch.full((lengths[rank],), rank), "y": torch.full((2, rank + 1), 0.5, requires_grad=True).t()}
    with Counted() as counted:
        result = gather(own, ragged=True)
    for each in range(size):
        assert_same(result["x"][each], torch.full((lengths[each],), each))
        assert_same(result["y"][each], torch.full((each + 1, 2), 0.5))
    assert len({piece.untyped_storage().data_ptr() for pieces in result.values() for piece in pieces}) == 2 * size
    return counted.calls


GATHER = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor).__name__
STRAIGHT = "all_to_all_single"


@pytest.mark.parametrize(
    ("lengths", "straight", "after"),
    [
        ([3, 5], False, []),
        ([3, 5, 0], True, []),
        ([2100, 5], False, [GATHER]),
        ([0, 1, 9000], True, [GATHER]),
        ([LARGE, 5], False, [GATHER]),
        ([LARGE, 5], True, [STRAIGHT]),
        ([0, LARGE, 9], True, [STRAIGHT, STRAIGHT]),
        ([5, 4, LARGE], False, [GATHER]),
        ([5, 4, 2**22], False, ["broadcast"] * 3),
    ],
)
def test_small_tensors_travel_with_their_shapes_and_large_ones_after_them(
    lengths: list[int], straight: bool, after: list[str]
):
    size = len(lengths)
    frames = STRAIGHT if size == 2 else GATHER
    assert run_ranks(uneven, size, size, lengths, straight, fresh=True) == [[frames, *after]] * size


def many_shapes() -> list[str]:
    rank = start().rank
    with Counted() as counted:
        result = gather([torch.full((1,) * (rank + each % 3), each) for each in range(2000)], ragged=True)
    assert [[piece.dim() for piece in each] for each in result] == [[each % 3, 1 + each % 3] for each in range(2000)]
    assert [int(each[0]) for each in result] == list(range(2000))
    return counted.calls


def test_more_shapes_than_a_frame_holds():
    assert run_ranks(many_shapes, 2) == [[STRAIGHT, GATHER, GATHER]] * 2


def staged() -> None:
    from hasten.collectives.wire import Wire

    world = start()
    world.attached["frames"] = Wire(world, staged=True)
    for length in (3, 9000):
        result = gather([torch.full((length * world.rank,), world.rank)], ragged=True)
        assert_same(result, [[torch.full((length * rank,), rank) for rank in range(2)]])


def test_header_on_the_host_and_frame_on_the_device():
    run_ranks(staged, 2)


def through_accelerator() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    boxes = torch.ones(accelerator.process_index + 1, 4)
    return [each.shape for each in accelerator.gather(boxes, ragged=True)]


def test_the_accelerator_takes_the_same_argument():
    assert run_ranks(through_accelerator, 2) == [[(1, 4), (2, 4)]] * 2


# ---- disagreement ----


def disagree() -> list[str]:
    rank = start().rank
    found = [
        message(lambda: gather({"x": torch.zeros(2, dtype=torch.float32 if rank else torch.float64)}, ragged=True)),
        message(lambda: gather({"xy"[rank]: torch.zeros(2)}, ragged=True)),
        message(lambda: gather(torch.zeros(2), ragged=rank == 0)),
        message(lambda: gather([torch.zeros(2) if rank else torch.zeros(2, 2).to_sparse()], ragged=True)),
        message(lambda: gather({"x": torch.zeros(2 + rank)})),
    ]
    assert gather(torch.tensor([rank])).tolist() == [0, 1]
    return found


def test_dtypes_and_structures_must_agree():
    first, second = run_ranks(disagree, 2)
    assert first == second
    assert "  ['x']: float64 any on rank 0; float32 any on rank 1\n  called at test_ragged.py:" in first[0]
    assert "  ['x']: float32 any on rank 0; nothing on rank 1\n" in first[1]
    assert "gather(ragged=True) at test_ragged.py:" in first[2]
    assert "`gather` could not run, so no process took part in it.\n  rank 0: " in first[3]
    assert "  ['x']: float32 [2] on rank 0; float32 [3] on rank 1\n  called at test_ragged.py:" in first[4]
    assert "`gather(tensor, ragged=True)` lists each process's own tensor" in first[4]

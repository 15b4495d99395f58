"""Every kind of leaf through every collective, on 1 to 3 ranks: values, dtypes and numbers of dimensions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hasten.collectives.broadcast import broadcast
from hasten.collectives.gather import gather
from hasten.collectives.objects import broadcast_object_list, gather_object
from hasten.collectives.pad import pad_across_processes
from hasten.collectives.reduce import reduce
from tests.collectives.data import Frozen, Pair, Record, assert_same, start
from tests.ranks import run_ranks

# For each kind, the tensor of a rank.
KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    "without dimension": lambda rank: torch.tensor(1.5 + rank),
    "empty": lambda rank: torch.zeros(0),
    "empty in one dimension": lambda rank: torch.zeros(2, 0, 3),
    "bool": lambda rank: torch.tensor([True, False, rank == 1]),
    "complex": lambda rank: torch.tensor([1j * rank, 2.0]),
    "conjugated": lambda rank: torch.tensor([1j * rank, 2.0]).conj(),
    "negative bit": lambda rank: torch.tensor([1j * rank, 2.0]).conj().imag,
    "float8": lambda rank: torch.tensor([1.0, 2.0 * rank]).to(torch.float8_e4m3fn),
    "half": lambda rank: torch.tensor([1.0, 2.0 * rank], dtype=torch.bfloat16),
    "int16": lambda rank: torch.tensor([3, rank], dtype=torch.int16),
    "transposed": lambda rank: torch.arange(6.0).view(2, 3).t() + rank,
    "every second": lambda rank: (torch.arange(12.0) + rank)[::2],
    "expanded": lambda rank: torch.tensor([1.0 + rank]).expand(3),
    "with gradient": lambda rank: torch.full((2, 2), 1.0 + rank, requires_grad=True) * 2,
    "large and transposed": lambda rank: (torch.arange(600.0 * 512).view(600, 512) + rank).t(),
}
WIDE = {torch.bool: torch.uint8, torch.float8_e4m3fn: torch.float32}


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def summed(tensors: list[torch.Tensor]) -> torch.Tensor:
    dtype = tensors[0].dtype
    total = torch.stack([plain(each).to(WIDE.get(dtype, dtype)) for each in tensors]).sum(0)
    return total.to(dtype)


def every_kind(size: int) -> None:
    world = start()
    for name, make in KINDS.items():
        tensors = [make(rank) for rank in range(size)]
        own = tensors[world.rank]

        gathered = gather({"x": own})["x"]
        if size == 1:
            assert gathered is own, name
        else:
            pieces = [plain(each) for each in tensors]
            assert_same(gathered, torch.cat([piece.view(1) if piece.dim() == 0 else piece for piece in pieces]))
            assert gathered.is_contiguous()
            assert not gathered.requires_grad

        assert_same(gather([own], ragged=True), [[plain(each) for each in tensors]])

        reduced = reduce(Frozen(own), "sum").value
        assert (reduced.dtype, reduced.shape) == (own.dtype, own.shape)
        wide = WIDE.get(own.dtype, own.dtype)
        assert torch.equal(plain(reduced).to(wide), summed(tensors).to(wide))  # but for the sign of a zero
        assert reduced.requires_grad == own.requires_grad
        assert reduced.data_ptr() != own.data_ptr() or own.numel() == 0

        target = plain(own).clone()
        assert broadcast(target, size - 1) is target
        assert_same(target, plain(tensors[-1]))

        assert pad_across_processes(Pair(own, own), dim=0).left is own


@pytest.mark.parametrize("size", [2, 3])
def test_every_kind_of_tensor(size: int):
    run_ranks(every_kind, size, size)


def test_every_kind_of_tensor_alone():
    every_kind(1)


def objects(size: int) -> None:
    rank = start().rank
    for make in (
        lambda rank: "text" * rank,
        lambda rank: Record("note", [rank]),
        lambda rank: Frozen({"rank": rank}),
        lambda rank: b"bytes",
        lambda rank: None,
        lambda rank: {"rank": rank},
    ):
        everyone = [make(each) for each in range(size)]
        assert gather_object([make(rank)]) == everyone
        assert broadcast_object_list([make(rank)], size - 1) == everyone[-1:]
    for given in ("text", Record("text"), [Frozen(1)]):
        if size > 1:
            with pytest.raises(TypeError, match="Unsupported types"):
                gather(given)
        else:
            assert gather(given) is given


@pytest.mark.parametrize("size", [2, 3])
def test_texts_and_dataclasses_travel_as_objects(size: int):
    run_ranks(objects, size, size)


def test_texts_and_dataclasses_alone():
    objects(1)


def spread() -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    world = start()
    spread = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (world.size,)), [Replicate()])
    found = []
    for call in (lambda: gather([spread], ragged=True), lambda: reduce(spread), lambda: gather({"x": spread})):
        with pytest.raises(TypeError, match="DTensor, which is spread over the processes already") as caught:
            call()
        found.append(str(caught.value))
    return [*found, gather(spread.full_tensor(), ragged=True)[-1].tolist()]


@pytest.mark.parametrize("size", [2, 3])
def test_tensors_that_are_spread_already_are_refused(size: int):
    first, *others = run_ranks(spread, size)
    assert others == [first] * (size - 1)
    assert first[-1] == [1, 1]

"""Data that the tests of the collectives share."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hasten.world import process
from hasten.world.agreement import DistributedOperationException
from hasten.world.process import World


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Record:
    value: Any
    note: Any = None


@dataclass(frozen=True)
class Frozen:
    value: Any


def start() -> World:
    return process.start(cpu=True)


def tree(rank: int, rows: int = 32) -> Any:
    """5 dictionaries of 4 tensors, other values on every rank."""
    generator = torch.Generator().manual_seed(rank)
    return {f"part{i}": {f"leaf{j}": torch.randn(rows, 4, generator=generator) for j in range(4)} for i in range(5)}


def leaves(data: Any) -> list[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        return [data]
    items = data.values() if isinstance(data, dict) else data
    return [leaf for item in items for leaf in leaves(item)]


def assert_same(one: Any, other: Any) -> None:
    """That two structures have the same types and tensors, to the bit."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype is other.dtype
        assert one.shape == other.shape
        if one.numel():
            assert torch.equal(
                one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
            )
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    else:
        assert len(one) == len(other)
        for mine, yours in zip(one, other, strict=True):
            assert_same(mine, yours)


class Counted:
    """Counts the collectives of torch.distributed, and the bytes that each sends, while it is entered."""

    NAMES = (
        "all_gather_single",
        "all_gather_into_tensor",
        "all_reduce",
        "broadcast",
        "all_gather",
        "all_to_all_single",
    )

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.bytes: list[int] = []

    def __enter__(self) -> "Counted":
        self._originals = {name: getattr(dist, name) for name in self.NAMES if hasattr(dist, name)}
        for name, original in self._originals.items():
            setattr(dist, name, self._counting(name, original))
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)

    def _counting(self, name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            sent = args[0] if name in ("all_reduce", "broadcast") else args[1]
            self.bytes.append(sent.numel() * sent.element_size())
            return original(*args, **kwargs)

        return call


def message(call: Any) -> str:
    """The text of the disagreement that `call` must end in."""
    try:
        call()
    except DistributedOperationException as error:
        return str(error)
    raise AssertionError("no disagreement was raised")

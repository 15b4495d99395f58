from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from hasten.data.dispatch import DataLoaderDispatcher
from hasten.data.loader import prepare_data_loader
from hasten.world.process import start
from tests.data.scenarios import FORK, Numbers, SizedStream, Stream
from tests.ranks import RankError, run_ranks


def dispatched(loader: DataLoader[Any], **settings: Any) -> Any:
    start(cpu=True)
    return prepare_data_loader(loader, put_on_device=True, dispatch_batches=True, **settings)


# ---- which loaders are dispatched ----


def test_streams_whose_batches_are_moved_are_dispatched():
    def kind(loader: DataLoader[Any], **settings: Any) -> str:
        return type(prepare_data_loader(loader, **settings)).__name__

    stream, numbers = DataLoader(Stream()), DataLoader(Numbers())
    assert kind(stream, put_on_device=True) == "DataLoaderDispatcher"
    assert kind(stream) == kind(numbers, put_on_device=True) == "DataLoaderShard"
    assert kind(stream, put_on_device=True, dispatch_batches=False) == "DataLoaderShard"


# ---- what arrives ----


@dataclass
class Record:
    number: torch.Tensor
    text: str


class Words(IterableDataset[Any]):
    """Complete batches with everything that is no plain tensor, of other lengths each."""

    def __iter__(self) -> Iterator[Any]:
        for length in (3, 5, 4, 7):
            record = Record(torch.full((length,), length), "r" * length)
            yield {"x": torch.ones(length, 2), "names": ["n"] * length, "flag": True, "none": None, "record": record}


def words() -> list[Any]:
    loader = dispatched(DataLoader(Words(), batch_size=None))
    return [
        (
            len(batch["x"]),
            batch["names"],
            batch["flag"],
            batch["none"],
            batch["record"].text,
            len(batch["record"].number),
        )
        for batch in loader
    ]


def test_anything_arrives_whole():
    def batch(length: int) -> tuple[Any, ...]:
        return length, ["n"] * length, True, None, "r" * length, length

    assert run_ranks(words, 2) == [[batch(3), batch(4)], [batch(5), batch(7)]]
    assert words() == [batch(3), batch(5), batch(4), batch(7)]


def collate(samples: list[int]) -> dict[str, Any]:
    return {"x": torch.tensor(samples), "name": [str(sample) for sample in samples], "scale": torch.tensor(2.0)}


def named(size: int) -> list[Any]:
    loader = dispatched(DataLoader(Stream(size), batch_size=2, collate_fn=collate))
    seen = [(batch["x"].tolist(), batch["name"], batch["scale"].item(), loader.end_of_dataloader) for batch in loader]
    return [*seen, loader.remainder]


def test_strings_are_divided_and_completed_like_tensors():
    assert run_ranks(named, 2, 7) == [
        [([0, 1], ["0", "1"], 2.0, False), ([4, 5], ["4", "5"], 2.0, True), 3],
        [([2, 3], ["2", "3"], 2.0, False), ([6, 0], ["6", "0"], 2.0, True), 3],
    ]


@pytest.mark.parametrize(("size", "remainder"), [(1, 1), (3, 3), (4, 0), (5, 1), (6, 0), (7, 3), (12, 0)])
def test_fewer_samples_than_a_step_needs(size: int, remainder: int):
    results = run_ranks(named, 2, size)
    assert [result[-1] for result in results] == [remainder] * 2
    steps = [first[0] + second[0] for first, second in zip(results[0][:-1], results[1][:-1], strict=True)]
    last = steps.pop()
    kept = last[:remainder] if remainder else last
    assert [index for step in steps for index in step] + kept == list(range(size))


def nothing() -> list[Any]:
    return list(dispatched(DataLoader(Stream(0), batch_size=2)))


def test_no_samples_at_all():
    assert run_ranks(nothing, 2) == [[], []]


def only_rank_0_reads() -> int:
    class Counting(Stream):
        read = 0

        def __iter__(self) -> Iterator[int]:
            for number in super().__iter__():
                Counting.read += 1
                yield number

    list(dispatched(DataLoader(Counting(9), batch_size=2)))
    return Counting.read


def test_only_rank_0_reads():
    assert run_ranks(only_rank_0_reads, 3) == [9, 0, 0]


def with_workers() -> list[Any]:
    loader = DataLoader(Numbers(10), batch_size=2, num_workers=2, multiprocessing_context=FORK)
    shared = dispatched(loader)
    return [[batch.tolist() for batch in shared] for _ in range(2)]


def test_the_reader_may_have_workers():
    assert run_ranks(with_workers, 2) == [[[[0, 1], [4, 5], [8]]] * 2, [[[2, 3], [6, 7], [9]]] * 2]


class Mesh:
    mesh_dim_names = ("dp_shard", "tp")

    def size(self, dimension: int) -> int:
        return 2


def in_a_mesh() -> list[Any]:
    return [batch.tolist() for batch in dispatched(DataLoader(Stream(8), batch_size=2), torch_device_mesh=Mesh())]


def test_ranks_of_one_model_get_the_same_batch():
    assert run_ranks(in_a_mesh, 4) == [[[0, 1], [4, 5]]] * 2 + [[[2, 3], [6, 7]]] * 2


# ---- errors ----


class Broken(Stream):
    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        raise KeyError("page 6")


class Unopened(Stream):
    def __iter__(self) -> Iterator[int]:
        raise FileNotFoundError("no such data")


class Unsendable:
    def __reduce__(self) -> Any:
        raise TypeError("stays here")


def read_all(kind: str) -> list[Any]:
    loaders = {
        "broken": DataLoader(Broken(), batch_size=2),
        "unopened": DataLoader(Unopened(), batch_size=2),
        "unsendable": DataLoader(Stream(), batch_size=2, collate_fn=lambda samples: Unsendable()),
        "uncut": DataLoader(Stream(), batch_size=3, collate_fn=lambda samples: {"a"}),
    }
    return list(dispatched(loaders[kind], split_batches=kind == "uncut"))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("broken", "KeyError: 'page 6'"),
        ("unopened", "FileNotFoundError: no such data"),
        ("unsendable", "TypeError: stays here"),
        ("uncut", "split_batches=False"),
    ],
)
def test_the_readers_error_is_raised_on_every_rank(kind: str, text: str):
    with pytest.raises(RankError) as caught:
        run_ranks(read_all, 3, kind)
    assert sorted(caught.value.tracebacks) == [0, 1, 2]
    assert all(text in traceback for traceback in caught.value.tracebacks.values())


# ---- sizes ----


def lengths() -> list[Any]:
    def measure(size: int, **settings: Any) -> Any:
        loader = dispatched(
            DataLoader(SizedStream(11), batch_size=size, drop_last=settings.pop("drop", False)), **settings
        )
        return len(loader), len(list(loader)), loader.total_batch_size, loader.total_dataset_length

    return [measure(2), measure(2, drop=True), measure(4, split_batches=True)]


def test_lengths():
    assert run_ranks(lengths, 2) == [[(3, 3, 4, 11), (2, 2, 4, 11), (3, 3, 4, 11)]] * 2


def built_by_hand() -> list[Any]:
    start(cpu=True)
    loader = DataLoaderDispatcher(Stream(8), batch_size=2, skip_batches=1, iteration=2)
    return [[batch.tolist() for batch in loader] for _ in range(2)] + [loader.iteration]


def test_a_dispatcher_can_be_built_by_hand():
    assert run_ranks(built_by_hand, 2) == [[[[4, 5]], [[0, 1], [4, 5]], 4], [[[6, 7]], [[2, 3], [6, 7]], 4]]

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from benchmarks.counts import count_calls
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hasten.data.loader import prepare_data_loader
from hasten.data.sharded import DataLoaderShard
from hasten.world.context import CONTEXT
from tests.data.scenarios import FORK, Numbers, Stream
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def prepared(size: int = 5, **settings: Any) -> Any:
    return prepare_data_loader(DataLoader(Numbers(size), batch_size=2), CPU, **settings)


# ---- the end, and the stack of running loaders ----


def test_the_body_of_the_last_batch_knows_that_it_is_the_last():
    loader = prepared()
    for _ in range(2):
        assert [loader.end_of_dataloader for _ in loader] == [False, False, True]
    assert loader.iteration == 2


def test_a_loader_is_on_the_stack_while_its_loop_runs():
    outer, inner = prepared(), prepared(2)
    seen = []
    for _ in outer:
        for _ in inner:
            seen.append(CONTEXT.loaders.all() == [outer, inner] and inner.end_of_dataloader)
        seen.append(CONTEXT.loaders.current is outer)
    assert seen == [True, True] * 3
    assert CONTEXT.loaders.current is None


def fail_in_the_body(loader: Any) -> None:
    for _ in loader:
        raise KeyError


def test_a_loop_that_is_left_leaves_the_stack_at_once():
    loader = prepared()
    for _ in loader:
        break
    assert CONTEXT.loaders.current is None
    with pytest.raises(KeyError):
        fail_in_the_body(loader)
    assert CONTEXT.loaders.current is None
    assert loader.iteration == 0


def test_an_error_of_the_dataset_leaves_the_stack():
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 4:
                raise KeyError(index)
            return index

    seen: list[Any] = []
    with pytest.raises(KeyError, match="4"):
        seen.extend(batch.tolist() for batch in prepare_data_loader(DataLoader(Broken(5), batch_size=2)))
    assert seen == [[0, 1]]  # the next batch is fetched ahead
    assert CONTEXT.loaders.current is None


def test_loops_over_one_loader_inside_each_other_keep_their_own_ends():
    loader = prepared(4)
    seen = []
    for outer in loader:
        ends = [loader.end_of_dataloader for _ in loader]
        seen.append((outer.tolist(), ends, loader.end_of_dataloader, loader.state_dict()["batches"]))
    assert seen == [([0, 1], [False, True], False, 1), ([2, 3], [False, True], True, 2)]


def test_a_half_iterated_loader_is_collected():
    loader = prepared()
    iterator = iter(loader)
    next(iterator)
    gone = weakref.ref(loader)
    del loader, iterator
    gc.collect()
    assert gone() is None
    assert CONTEXT.loaders.all() == []


def test_an_empty_loader_ends_without_counting():
    loader = prepared(0)
    assert list(loader) == []
    assert loader.iteration == 0


@pytest.mark.parametrize(
    ("size", "settings", "remainder"),
    [
        (5, {}, 1),
        (4, {}, 0),
        (5, {"num_processes": 2, "process_index": 1}, 1),
        (7, {"num_processes": 2, "process_index": 0}, 3),
        (7, {"num_processes": 2, "process_index": 0, "even_batches": False}, 0),
        (8, {"num_processes": 2, "process_index": 0, "split_batches": True}, 0),
        (7, {"num_processes": 2, "process_index": 0, "split_batches": True}, 1),
    ],
)
def test_the_remainder_of_indexed_data(size: int, settings: dict[str, Any], remainder: int):
    loader = prepared(size, **settings)
    assert {loader.remainder for _ in loader} == {remainder}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("size", "remainder"), [(7, 3), (8, 0), (1, 1), (9, 1)])
def test_the_remainder_of_a_stream_is_counted_while_it_is_read(size: int, remainder: int, workers: int):
    stream = DataLoader(
        Stream(size), batch_size=2, num_workers=workers, multiprocessing_context=FORK if workers else None
    )
    loader: Any = prepare_data_loader(stream, num_processes=2, process_index=1)
    assert [loader.remainder for _ in loader][-1] == remainder


def test_a_remainder_that_cannot_be_known():
    def last(loader: Any, **settings: Any) -> int:
        shared: Any = prepare_data_loader(loader, num_processes=2, process_index=0, **settings)
        return [shared.remainder for _ in shared][-1]

    assert last(DataLoader(Numbers(7), batch_size=2, drop_last=True)) == -1
    assert last(DataLoader(Stream(7), batch_size=2, drop_last=True)) == -1
    assert last(DataLoader(Stream(7), batch_size=None)) == -1
    assert last(DataLoader(Stream(8), batch_size=None)) == 0
    workers = DataLoader(Stream(7), batch_size=2, num_workers=2, multiprocessing_context=FORK)
    assert last(workers) == -1


# ---- epochs ----


class Told:
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class ToldSampler(Told):
    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class ToldNumbers(Told, Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_epoch_reaches_samplers_and_dataset(ranks: int):
    sampler, dataset = ToldSampler(), ToldNumbers()
    loader: Any = prepare_data_loader(
        DataLoader(dataset, batch_size=2, sampler=sampler), num_processes=ranks, process_index=0
    )
    list(loader)
    list(loader)
    loader.set_epoch(7)
    list(loader)
    assert loader.iteration == 8
    assert sampler.epochs == dataset.epochs == [0, 1, 7, 7]


def test_a_pass_that_is_left_is_made_again():
    sampler = ToldSampler()
    loader = prepare_data_loader(DataLoader(Numbers(4), batch_size=2, sampler=sampler))
    for _ in loader:
        break
    list(loader)
    assert sampler.epochs == [0, 0]


# ---- batches on their way ----


@dataclass
class Pair:
    first: torch.Tensor
    second: str


def collate_pairs(samples: list[int]) -> Any:
    return {"a": torch.tensor(samples), "pair": Pair(torch.tensor(samples), "text"), "b": [torch.ones(1), None]}


def moved() -> list[Any]:
    from tests.simulated_device import install

    install("npu")
    loader = DataLoader(Numbers(4), batch_size=2, collate_fn=collate_pairs)
    seen: list[Any] = []
    for put in (True, False):
        for batch in prepare_data_loader(loader, torch.device("npu", 0), put_on_device=put):
            devices = {str(batch["a"].device), str(batch["pair"].first.device), str(batch["b"][0].device)}
            seen.append((devices, type(batch["pair"]) is Pair, batch["pair"].second, batch["b"][1]))
    return seen


def test_batches_are_moved_whatever_holds_them():
    (seen,) = run_ranks(moved, 1, fresh=True)
    assert seen == [({"npu:0"}, True, "text", None)] * 2 + [({"cpu"}, True, "text", None)] * 2


def test_what_can_move_itself_is_asked_to_on_the_cpu_too():
    class Lazy:
        device: Any = None

        def to(self, device: Any) -> "Lazy":
            self.device = device
            return self

    loader = DataLoader(Numbers(4), batch_size=2, collate_fn=lambda samples: Lazy())
    assert [batch.device for batch in prepare_data_loader(loader, CPU, put_on_device=True)] == [CPU, CPU]


def calls_per_batch(prepare: Any) -> float:
    """The Python calls of each batch, without those of each pass."""
    counts = []
    for batches in (100, 200):
        loader = prepare(DataLoader(TensorDataset(torch.ones(4 * batches, 3)), batch_size=4))

        def run(loader: Any = loader) -> None:
            for _ in loader:
                pass

        for _ in range(2):  # the first passes look whether fetching draws
            run()
        counts.append(count_calls(run).python / len(loader))
    return 2 * counts[1] - counts[0]


def test_a_batch_costs_few_calls_more():
    plain = calls_per_batch(lambda loader: loader)
    for ranks in (1, 2):
        settings = {"num_processes": ranks, "process_index": 0, "put_on_device": True}
        mine = calls_per_batch(lambda loader, settings=settings: prepare_data_loader(loader, CPU, **settings))
        assert mine - plain <= 2.5


# ---- copies ----


class Labelled(DataLoader[Any]):
    label = "mine"


@pytest.mark.parametrize("kind", [DataLoader, Labelled])
@pytest.mark.parametrize("copied", [lambda loader: pickle.loads(pickle.dumps(loader)), copy.deepcopy, copy.copy])
def test_a_loader_can_be_copied(kind: type[DataLoader[Any]], copied: Any):
    loader: Any = prepare_data_loader(
        kind(Numbers(7), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1)),
        CPU,
        num_processes=2,
        process_index=1,
        put_on_device=True,
    )
    list(loader)
    twin = copied(loader)
    assert isinstance(twin, DataLoaderShard)
    assert isinstance(twin, kind)
    assert twin.iteration == 1
    twin.generator = torch.Generator().manual_seed(4)
    loader.generator = torch.Generator().manual_seed(4)
    assert len(list(twin)) == 2
    assert (loader.iteration, twin.iteration) == (1, 2)


def test_a_loader_can_be_built_by_hand():
    loader = DataLoaderShard(Numbers(5), device=CPU, iteration=3, skip_batches=1, batch_size=2)
    assert [batch.tolist() for batch in loader] == [[2, 3], [4]]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    assert loader.iteration == 5
    assert isinstance(loader, DataLoader)

"""What goes wrong in a loop over prepared loaders, or is unusual: errors, deaths, breaks, loops inside loops, tiny data."""

import os
import pickle
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hasten import Accelerator, DataLoaderConfiguration
from hasten.data.loader import prepare_data_loader
from hasten.world.context import CONTEXT
from tests.data.scenarios import FORK, Numbers, Stream
from tests.data.test_resume import through_a_file
from tests.ranks import run_ranks


def accelerator(**config: Any) -> Accelerator:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))


def workers(number: int) -> dict[str, Any]:
    return {"num_workers": number, "multiprocessing_context": FORK if number else None}


def lists(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


def measured(one: Accelerator, loader: Any) -> list[int]:
    return [index for batch in one.prepare(loader) for index in one.gather_for_metrics(batch).tolist()]


# ---- errors and deaths ----


class Bad(Numbers):
    """Sample 2 can not be read, or kills who reads it."""

    def __init__(self, kills: bool) -> None:
        super().__init__(12)
        self.kills = kills

    def __getitem__(self, index: int) -> int:
        if index == 2 and self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 2:
            raise KeyError("sample 2")
        return index


def outcome(kills: bool, number: int, dispatch: bool) -> Any:
    loader = accelerator(dispatch_batches=dispatch).prepare(DataLoader(Bad(kills), batch_size=2, **workers(number)))
    try:
        return lists(loader)
    except (KeyError, RuntimeError) as error:
        assert CONTEXT.loaders.current is None
        return f"{type(error).__name__}: {str(error)[:30]}"


@pytest.mark.parametrize("number", [0, 2])
def test_an_error_is_that_of_the_rank_which_reads(number: int) -> None:
    """A loader that each rank reads: of one. A loader that rank 0 reads: of all."""
    text = "KeyError: 'sample 2'" if number == 0 else "KeyError: Caught KeyError in DataLoader"
    first, second = run_ranks(outcome, 2, False, number, False)
    assert first == [[0, 1], [4, 5], [8, 9]]
    assert second.startswith(text)
    assert all(each.startswith(text) for each in run_ranks(outcome, 2, False, number, True))


@pytest.mark.skipif(FORK is None, reason="workers are forked here")
def test_a_worker_that_is_killed_is_an_error_and_no_hang() -> None:
    first, second = run_ranks(outcome, 2, True, 2, False)
    assert first == [[0, 1], [4, 5], [8, 9]]
    assert second.startswith("RuntimeError: DataLoader worker")
    assert all(each.startswith("RuntimeError: DataLoader worker") for each in run_ranks(outcome, 2, True, 2, True))


# ---- loops ----


def loops(dispatch: bool) -> dict[str, Any]:
    one = accelerator(dispatch_batches=dispatch)
    long, short = (one.prepare(DataLoader(Numbers(size), batch_size=2)) for size in (12, 4))
    found: dict[str, Any] = {}
    for _ in long:
        break
    found["after a break"] = lists(long)
    found["zipped"] = [(x.tolist(), y.tolist()) for x, y in zip(long, short, strict=False)]
    found["nested"] = [(x.tolist(), lists(short), long.end_of_dataloader) for x in long]
    for _ in long:
        twin = pickle.loads(pickle.dumps(long))
        break
    found["pickled"] = lists(twin)
    found["prepared again"] = one.prepare(long) is long and Accelerator(cpu=True).prepare(long) is long
    found["none left"] = CONTEXT.loaders.all()
    return found


@pytest.mark.parametrize("dispatch", [False, True])
def test_loops_of_every_kind(dispatch: bool) -> None:
    for rank, found in enumerate(run_ranks(loops, 2, dispatch)):
        whole = [[first + 2 * rank, first + 2 * rank + 1] for first in (0, 4, 8)]
        short = [[2 * rank, 2 * rank + 1]]
        assert found == {
            "after a break": whole,
            "zipped": [(whole[0], short[0])],
            "nested": [(batch, short, number == 2) for number, batch in enumerate(whole)],
            "pickled": whole,
            "prepared again": True,
            "none left": [],
        }


class Longer(DataLoader[Any]):
    """Adds a batch of its own."""

    def __iter__(self) -> Any:
        yield from super().__iter__()
        yield torch.tensor([99])

    def __len__(self) -> int:
        return super().__len__() + 1


class Endless:
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


class Claims(Stream):
    """Has another length than it says."""

    def __len__(self) -> int:
        return 40


def unusual() -> dict[str, Any]:
    found: dict[str, Any] = {}
    loader = accelerator().prepare(Longer(Numbers(4), batch_size=2))
    found["own class"] = ([(batch.tolist(), loader.end_of_dataloader) for batch in loader], len(loader))
    for dispatch in (False, True):
        nothing = DataLoader(Numbers(4), batch_size=1, collate_fn=lambda samples: None)
        found[f"nothing, {dispatch}"] = list(accelerator(dispatch_batches=dispatch).prepare(nothing))
        for name, own in (
            ("no length", DataLoader(Numbers(7), batch_size=2, sampler=Endless())),
            ("wrong length", DataLoader(Claims(7), batch_size=2)),
        ):
            one = accelerator(dispatch_batches=dispatch)
            found[f"{name}, {dispatch}"] = measured(one, own)
    kept = DataLoader(Numbers(8), batch_size=2, persistent_workers=True, prefetch_factor=3, **workers(1))
    loader = accelerator().prepare(kept)
    for _ in loader:
        break
    found["persistent"] = [lists(loader), lists(loader)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no accelerator to pin memory for
        found["pinned"] = lists(accelerator().prepare(DataLoader(Numbers(4), batch_size=2, pin_memory=True)))
    return found


def test_loaders_of_every_kind() -> None:
    first, second = run_ranks(unusual, 2)
    for found in (first, second):
        for dispatch in (False, True):
            assert found[f"nothing, {dispatch}"] == [None, None]
            assert found[f"no length, {dispatch}"] == found[f"wrong length, {dispatch}"] == list(range(7))
    assert first["own class"] == ([([0, 1], False), ([99], True)], 2)
    assert second["own class"] == ([([2, 3], False), ([99], True)], 2)
    assert first["persistent"] == [[[0, 1], [4, 5]]] * 2
    assert (first["pinned"], second["pinned"]) == ([[0, 1]], [[2, 3]])


# ---- streams that several workers read ----


class Split(IterableDataset[int]):
    """Each worker reads a part of its own; the first one reads more than the others."""

    def __init__(self, size: int, all_to_first: bool = False) -> None:
        self.size, self.all_to_first = size, all_to_first

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, number = (0, 1) if info is None else (info.id, info.num_workers)
        if self.all_to_first:
            return iter(range(self.size if worker == 0 else 0))
        middle = self.size if number == 1 else self.size * 2 // 3
        return iter(range(middle) if worker == 0 else range(middle, self.size))


def dispatched_by_workers() -> list[list[int]]:
    found = []
    for size in (18, 19, 20, 23):
        one = accelerator()
        found.append(sorted(measured(one, DataLoader(Split(size), batch_size=2, **workers(2)))))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_short_batches_in_the_middle_are_counted_once(ranks: int) -> None:
    """Each worker ends with a shorter batch: then the ranks' batches have different lengths."""
    assert run_ranks(dispatched_by_workers, ranks) == [[list(range(size)) for size in (18, 19, 20, 23)]] * ranks


@pytest.mark.parametrize(
    ("size", "all_to_first", "remainder"), [(7, True, 3), (8, True, 0), (12, False, 0), (13, False, -1)]
)
def test_the_remainder_if_one_worker_has_everything(size: int, all_to_first: bool, remainder: int) -> None:
    stream = DataLoader(Split(size, all_to_first), batch_size=2, **workers(2))
    loader: Any = prepare_data_loader(stream, num_processes=2, process_index=1)
    assert [loader.remainder for _ in loader][-1] == remainder


class Epochs(IterableDataset[int]):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch * 10, self.epoch * 10 + 4))


class Drawn(IterableDataset[int]):
    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(40, generator=self.generator).tolist())


def test_workers_that_are_kept_hear_of_the_epoch() -> None:
    def passes(data: Any, kept: bool) -> list[Any]:
        stream = DataLoader(data, batch_size=2, persistent_workers=kept, **workers(1))
        loader: Any = prepare_data_loader(stream, num_processes=2, process_index=1)
        return [lists(loader) for _ in range(3)]

    assert passes(Epochs(), kept=True) == [[[2, 3]], [[12, 13]], [[22, 23]]]
    drawn = passes(Drawn(), kept=True)
    assert drawn == passes(Drawn(), kept=False)
    assert drawn[0] != drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("ranks", "batch", "number", "ranks_then", "batch_then", "number_then"),
    [(2, 2, 2, 3, 2, 2), (2, 2, 0, 2, 2, 2), (2, 2, 2, 2, 2, 0), (2, 2, 2, 2, 3, 2), (1, 2, 2, 1, 4, 2)],
)
def test_places_of_several_workers_are_not_those_of_others(
    ranks: int, batch: int, number: int, ranks_then: int, batch_then: int, number_then: int
) -> None:
    def build(ranks: int, batch: int, number: int) -> Any:
        stream = DataLoader(Split(60), batch_size=batch, **workers(number))
        return prepare_data_loader(stream, num_processes=ranks, process_index=0, resume="position")

    loader = build(ranks, batch, number)
    for step, _ in enumerate(loader):
        if step == 2:
            state = through_a_file(loader.state_dict())
            break
    other = build(ranks_then, batch_then, number_then)
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="each has a place of its own"):
        next(iter(other))
    by_order: Any = prepare_data_loader(
        DataLoader(Split(60), batch_size=batch_then, **workers(number_then)), num_processes=ranks_then, process_index=0
    )
    with pytest.warns(UserWarning, match="each has a place of its own"):
        by_order.load_state_dict(state)
    same = build(ranks, batch, number)
    same.load_state_dict(state)
    assert lists(same)[:-1] == lists(build(ranks, batch, number))[3:-1]


# ---- data that have changed ----


def position(build: Any, steps: int) -> Any:
    loader: Any = prepare_data_loader(build(), resume="position")
    for step, _ in enumerate(loader, start=1):
        if step == steps:
            return through_a_file(loader.state_dict())
    return through_a_file(loader.state_dict())


def test_a_dataset_of_another_length_is_said() -> None:
    state = position(lambda: DataLoader(Numbers(10), batch_size=2), 2)
    other: Any = prepare_data_loader(DataLoader(Numbers(12), batch_size=2), resume="position")
    with pytest.warns(UserWarning, match="had 10 samples when the position was saved, and has 12"):
        other.load_state_dict(state)
    between = position(lambda: DataLoader(Numbers(10), batch_size=2), 99)
    other.load_state_dict(between)
    assert len(lists(other)) == 6


class Batched:
    """A batch sampler of the user's own with a fixed size."""

    def __init__(self, size: int) -> None:
        self.batch_size = size

    def __iter__(self) -> Iterator[list[int]]:
        return (list(range(first, min(24, first + self.batch_size))) for first in range(0, 24, self.batch_size))

    def __len__(self) -> int:
        return -(-24 // self.batch_size)


def test_batches_of_another_size_go_on_at_the_same_sample_or_not_at_all() -> None:
    state = position(lambda: DataLoader(Numbers(24), batch_sampler=Batched(2)), 3)
    for size, first in ((2, 6), (3, 6)):
        other: Any = prepare_data_loader(DataLoader(Numbers(24), batch_sampler=Batched(size)), resume="position")
        other.load_state_dict(state)
        assert next(iter(other)).tolist()[0] == first
    other = prepare_data_loader(DataLoader(Numbers(24), batch_sampler=Batched(4)), resume="position")
    other.load_state_dict(state)
    with pytest.raises(NotImplementedError, match="after 3 batches of 2, can not be found by counting batches of 4"):
        next(iter(other))

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from hasten.data.skippable import IndexSource, SkippableLoader
from tests.data.scenarios import FORK, Numbers, Stream


def lists(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


def test_an_index_source_begins_where_it_is_told():
    source = IndexSource(BatchSampler(SequentialSampler(range(6)), 2, False))
    assert list(source) == [[0, 1], [2, 3], [4, 5]]
    source.start = 2
    assert list(source) == [[4, 5]]
    assert len(source) == 3


def test_an_index_source_draws_before_it_is_asked():
    drawn = []

    def draw() -> Any:
        for number in range(4):
            drawn.append(number)
            yield [number]

    class Lazy:
        def __iter__(self) -> Any:
            return draw()

    source = IndexSource(Lazy())
    source.holds = True
    indices = iter(source)
    assert drawn == []
    assert source.draw(2, otherwise=drawn.clear)
    assert drawn == [0, 1]
    assert list(indices) == [[0], [1], [2], [3]]
    assert not source.holds


def test_a_pass_that_asks_late_says_when_it_has_drawn():
    events: list[str] = []
    source = IndexSource([[0], [1]])
    source.holds = True
    assert not source.draw(2, otherwise=lambda: events.append("drawn"))
    indices = iter(source)
    assert events == []
    assert next(indices) == [0]
    assert events == ["drawn"]
    assert list(indices) == [[1]]
    assert list(source) == [[0], [1]]
    assert events == ["drawn"]


def test_an_index_source_notes_the_first_batch():
    source = IndexSource([[0], [1], [2]])
    source.notes_first = True
    assert list(source) == [[0], [1], [2]]
    assert source.first is None
    source.start = 2
    assert list(source) == [[2]]
    assert source.first == [0]


def test_only_the_first_pass_is_shorter():
    loader = SkippableLoader(Numbers(5), skip_batches=1, batch_size=2)
    assert len(loader) == 2
    assert lists(loader) == [[2, 3], [4]]
    assert len(loader) == 3
    assert lists(loader) == [[0, 1], [2, 3], [4]]


def test_a_pass_that_is_left_was_the_first():
    loader = SkippableLoader(Stream(5), skip_batches=1, batch_size=2)
    for batch in loader:
        assert batch.tolist() == [2, 3]
        break
    assert lists(loader) == [[0, 1], [2, 3], [4]]


def test_nothing_that_is_skipped_is_loaded():
    class Fetched(Numbers):
        def __init__(self) -> None:
            super().__init__(100)
            self.fetched: list[int] = []

        def __getitem__(self, index: int) -> int:
            self.fetched.append(index)
            return index

    dataset = Fetched()
    lists(SkippableLoader(dataset, skip_batches=48, batch_size=2))
    assert dataset.fetched == [96, 97, 98, 99]


def test_more_than_everything_is_skipped():
    loader = SkippableLoader(Numbers(5), skip_batches=9, batch_size=2)
    assert len(loader) == 0
    assert lists(loader) == []


@pytest.mark.parametrize("persistent", [False, True])
def test_skipping_with_workers(persistent: bool):
    loader = SkippableLoader(
        Numbers(5),
        skip_batches=1,
        batch_size=2,
        num_workers=1,
        persistent_workers=persistent,
        multiprocessing_context=FORK,
    )
    assert [lists(loader), lists(loader)] == [[[2, 3], [4]], [[0, 1], [2, 3], [4]]]


def test_an_adopted_loader_reads_on_its_own():
    plain = DataLoader(Numbers(4), batch_size=2, num_workers=1, persistent_workers=True, multiprocessing_context=FORK)
    iterator = iter(plain)
    adopted = SkippableLoader.adopt(plain, {}, skip_batches=0)
    assert lists(adopted) == [[0, 1], [2, 3]] == lists(iterator)
    assert type(adopted) is SkippableLoader


def test_replaced_attributes():
    plain = DataLoader(Numbers(4), batch_size=2)
    adopted = SkippableLoader.adopt(plain, {"batch_sampler": [[3]], "generator": torch.Generator()}, skip_batches=0)
    assert lists(adopted) == [[3]]
    assert lists(plain) == [[0, 1], [2, 3]]
    assert plain.generator is None

"""A pass that is interrupted again and again, and goes on each time with another number of ranks or another batch size."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from hasten.data.loader import prepare_data_loader
from tests.data.scenarios import Numbers, generator
from tests.data.test_resume import through_a_file


class Stream(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.size, generator=generator(self.size)).tolist()


class Ragged:
    """A batch sampler whose batches have 1, 2, 3, 1, 2, 3, ... samples."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        first = 0
        for number in range(self.size):
            if first >= self.size:
                return
            yield list(range(first, min(first + 1 + number % 3, self.size)))
            first += 1 + number % 3


def sequential(size: int, batch: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(size), batch_size=batch, **options)


def shuffled(size: int, batch: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(size), batch_size=batch, shuffle=size > 0, **options)


def with_generator(size: int, batch: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(size), batch_size=batch, shuffle=size > 0, generator=generator(4), **options)


def weighted(size: int, batch: int, **options: Any) -> DataLoader[Any]:
    sampler = WeightedRandomSampler([1.0] * size, size, replacement=False) if size else None
    return DataLoader(Numbers(size), batch_size=batch, sampler=sampler, **options)


def stream(size: int, batch: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Stream(size), batch_size=batch, **options)


def ragged(size: int, batch: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(size), batch_sampler=Ragged(size))


def unbatched(size: int, batch: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(size), batch_size=None, shuffle=size > 0)


KINDS = [sequential, shuffled, with_generator, weighted, stream, ragged, unbatched]


def ranks_of(build: Any, size: int, batch: int, ranks: int, states: Any, seed: int, **config: Any) -> list[Any]:
    loaders = []
    for rank in range(ranks):
        torch.manual_seed(seed)  # a sampler's generator gets its seed from here
        loader: Any = prepare_data_loader(
            build(size, batch, **{key: config.pop(key) for key in ("drop_last",) if key in config}),
            num_processes=ranks,
            process_index=rank,
            rng_types=["generator"],
            use_stateful_dataloader=True,
            **config,
        )
        if states:
            loader.load_state_dict(states[rank] if rank < len(states) else states[0])
        loaders.append(loader)
    return loaders


def go_on(loaders: list[Any], steps: int, seed: int) -> tuple[list[int], list[Any], bool]:
    """The real samples of some steps of all ranks, the positions after them, and whether the pass is over."""
    seen: list[int] = []
    states: list[Any] = [None] * len(loaders)
    torch.manual_seed(seed)
    draws = torch.get_rng_state()
    passes = []
    for loader in loaders:
        torch.set_rng_state(draws)  # ranks have generators of their own
        passes.append(iter(loader))
    done = 0
    while steps is None or done < steps:
        torch.set_rng_state(draws)
        batches = []
        for number, each in enumerate(passes):
            torch.set_rng_state(draws)
            batches.append(next(each, None))
            if batches[-1] is not None:
                states[number] = through_a_file(loaders[number].state_dict())
        if all(batch is None for batch in batches):
            return seen, states, True
        rows = [
            index for batch in batches if batch is not None for index in torch.as_tensor(batch).reshape(-1).tolist()
        ]
        cut = loaders[0].end_of_dataloader and loaders[0].remainder > 0
        seen += rows[: loaders[0].remainder] if cut else rows
        done += 1
    for each in passes:
        each.close()
    return seen, states, False


@pytest.mark.parametrize("build", KINDS)
@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(0, 40),
    plan=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=5),
    same_batch=st.booleans(),
    seedable=st.booleans(),
)
def test_every_sample_once_in_one_order(build, size, plan, same_batch, seedable):
    config = {"use_seedable_sampler": True, "data_seed": 3} if seedable else {}
    seen: list[int] = []
    states: Any = None
    for ranks, batch, steps in [*plan, (1 + size % 3, 1, None)]:
        batch = 2 if same_batch or build is stream else batch
        loaders = ranks_of(build, size, batch, ranks, states, 7, **config)
        part, states, over = go_on(loaders, steps, 7)
        seen += part
        if over or states[0] is None or states[0]["status"] == "ending":
            break
    assert sorted(seen) == list(range(size))
    alone, _, _ = go_on(ranks_of(build, size, 2, 1, None, 7, **config), None, 7)
    if build is not ragged and plan[0][0] == 1:
        assert seen == alone


def in_last_batch(build: Any, batch: int = 4, **options: Any) -> list[Any]:
    """The positions of two ranks in the second step of three, in which the last one has its last batch."""
    states = []
    for loader in ranks_of(build, 18, batch, 2, None, 7, even_batches=False, **options):
        passing = iter(loader)
        for _ in range(2):
            next(passing)
        states.append(through_a_file(loader.state_dict()))
        passing.close()
    return states


@pytest.mark.parametrize(
    ("now", "expected"),
    [((2, 4), [[[16, 17]], []]), ((3, 4), [[[16, 17]], [], []]), ((2, 1), [[[16]], [[17]]]), ((1, 1), [[[16], [17]]])],
)
def test_ranks_that_end_one_step_earlier_go_on_in_the_same_pass(now: tuple[int, int], expected: list[Any]):
    states = in_last_batch(sequential)
    assert [state["status"] for state in states] == ["running", "running"]
    loaders = ranks_of(sequential, 18, now[1], now[0], states, 7, even_batches=False)
    assert [loader.iteration for loader in loaders] == [0] * now[0]
    assert [[batch.tolist() for batch in loader] for loader in loaders] == expected
    assert [loader.iteration for loader in loaders] == [1] * now[0]


@pytest.mark.parametrize(("size", "status"), [(8, "running"), (10, "ending")])  # five batches, and six
def test_whole_batches_of_a_sampler_that_end_one_step_earlier(size: int, status: str):
    batches = list(Ragged(size))
    options = {"num_processes": 2, "process_index": 1, "even_batches": False, "use_stateful_dataloader": True}
    loader: Any = prepare_data_loader(DataLoader(Numbers(size), batch_sampler=batches), **options)
    assert [loader.state_dict()["status"] for _ in loader][-1] == status

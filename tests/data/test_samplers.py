from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from hasten.data.samplers import (
    SeedableRandomSampler,
    SkipBatchSampler,
    batches_from,
    draw_order,
    get_sampler,
    samples_from,
    set_sampler,
)
from hasten.data.shard import BatchSamplerShard


def permutation(seed: int, size: int = 10) -> list[int]:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()


# ---- the seedable sampler ----


def test_the_order_is_that_of_seed_plus_epoch():
    sampler = SeedableRandomSampler(range(10), data_seed=7)
    assert [list(sampler), list(sampler)] == [permutation(7), permutation(8)]
    assert sampler.epoch == 2
    sampler.set_epoch(0)
    assert list(sampler) == permutation(7)


def test_the_seed_is_torchs_when_the_sampler_is_made():
    torch.manual_seed(100)
    sampler = SeedableRandomSampler(range(10))
    torch.manual_seed(5)
    assert sampler.initial_seed == 100
    assert list(sampler) == permutation(100)


def test_a_pass_that_is_left_does_not_count():
    sampler = SeedableRandomSampler(range(10), data_seed=1)
    next(iter(sampler))
    assert sampler.epoch == 0
    assert list(sampler) == permutation(1)


def test_its_generator_is_seeded_anew():
    own = torch.Generator().manual_seed(4)
    sampler = SeedableRandomSampler(range(10), generator=own, data_seed=1)
    assert list(sampler) == permutation(1)
    assert sampler.generator is own


def test_torchs_generator_is_not_drawn_from():
    before = torch.get_rng_state()
    list(SeedableRandomSampler(range(10), data_seed=1))
    assert torch.equal(torch.get_rng_state(), before)


# ---- drawing and skipping ----


def samplers(own: torch.Generator | None) -> list[Any]:
    return [
        SequentialSampler(range(10)),
        RandomSampler(range(10), generator=own),
        RandomSampler(range(10), num_samples=25, generator=own),
        RandomSampler(range(10), replacement=True, generator=own),
        WeightedRandomSampler([1.0] * 10, 12, generator=own),
        SeedableRandomSampler(range(10), data_seed=3),
        range(10),
    ]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("start", [0, 3, 10, 40])
@pytest.mark.parametrize("index", range(7))
def test_samples_from_a_place_are_those_of_iterating_with_the_same_draws(index: int, start: int, shared: bool):
    """The contract with torch on which `draw_order` stands: the same samples, and the same state of every generator."""
    found = []
    for from_start in (False, True):
        torch.manual_seed(2)
        own = torch.Generator().manual_seed(3) if shared else None
        sampler = samplers(own)[index]
        samples = list(sampler)[start:] if from_start else list(samples_from(sampler, start))
        state = torch.get_rng_state()
        found.append((samples, state.tolist(), own and own.get_state().tolist(), getattr(sampler, "epoch", None)))
    assert found[0] == found[1]


@pytest.mark.parametrize("index", range(7))
def test_nothing_is_drawn_before_the_first_sample(index: int):
    own = torch.Generator().manual_seed(3)
    before = own.get_state()
    samples_from(samplers(own)[index], 2)
    assert torch.equal(own.get_state(), before)


def test_only_whole_permutations_of_torchs_own_samplers_are_drawn_at_once():
    class Own(RandomSampler):
        pass

    for sampler in (
        range(4),
        Own(range(4)),
        RandomSampler(range(4), replacement=True),
        RandomSampler(range(4), num_samples=2),
    ):
        assert draw_order(sampler) is None


def test_the_place_does_not_matter_for_the_time():
    class Long:
        def __len__(self) -> int:
            return 10**12

    assert next(samples_from(SequentialSampler(Long()), 10**12 - 3)) == 10**12 - 3
    batches = BatchSampler(SequentialSampler(Long()), 8, False)
    assert next(batches_from(batches, 10**10)) == list(range(8 * 10**10, 8 * 10**10 + 8))
    shard = BatchSamplerShard(batches, 2, 1)
    assert next(batches_from(shard, 10**10)) == list(range(16 * 10**10 + 8, 16 * 10**10 + 16))


class Own(BatchSampler):
    pass


@given(
    size=st.integers(0, 20),
    batch=st.integers(1, 5),
    start=st.integers(0, 12),
    drop=st.booleans(),
    kind=st.sampled_from([BatchSampler, Own]),
)
def test_batches_from_a_place_are_the_rest(size: int, batch: int, start: int, drop: bool, kind: type[BatchSampler]):
    batches = kind(SequentialSampler(range(size)), batch, drop)
    assert list(batches_from(batches, start)) == list(batches)[start:]
    skipping = SkipBatchSampler(batches, start)
    assert list(skipping) == list(batches)[start:] == list(skipping)
    assert len(skipping) == len(list(skipping))
    assert skipping.total_length == len(batches)


# ---- finding the sampler ----


def test_the_sampler_is_found_wherever_it_is():
    sampler = SequentialSampler(range(4))
    batches = BatchSampler(sampler, 2, False)
    assert get_sampler(DataLoader(range(4), sampler=sampler)) is sampler  # type: ignore[arg-type]
    assert get_sampler(DataLoader(range(4), batch_sampler=batches)) is sampler  # type: ignore[arg-type]
    assert get_sampler(DataLoader(range(4), sampler=batches, batch_size=None)) is sampler  # type: ignore[arg-type]
    assert get_sampler(DataLoader(range(4), sampler=sampler, batch_size=None)) is sampler  # type: ignore[arg-type]
    nested = SkipBatchSampler(BatchSamplerShard(batches, 2, 0), 1)
    assert get_sampler(DataLoader(range(4), batch_sampler=nested)) is sampler  # type: ignore[arg-type]
    assert get_sampler(DataLoader(range(4), batch_sampler=[[0, 1], [2]])) is None  # type: ignore[arg-type]


def test_the_sampler_is_replaced_wherever_it_is():
    class Down:
        def __iter__(self) -> Iterator[int]:
            return iter((3, 2, 1, 0))

        def __len__(self) -> int:
            return 4

    down = Down()
    for loader in (
        DataLoader(range(4)),  # type: ignore[arg-type]
        DataLoader(range(4), batch_size=None),  # type: ignore[arg-type]
        DataLoader(range(4), sampler=BatchSampler(range(4), 1, False), batch_size=None),  # type: ignore[arg-type]
        DataLoader(range(4), batch_sampler=SkipBatchSampler(BatchSampler(range(4), 1, False), 0)),  # type: ignore[arg-type]
    ):
        set_sampler(loader, down)
        assert get_sampler(loader) is down
    assert [int(sample) for sample in DataLoader(range(4), sampler=down)] == [3, 2, 1, 0]  # type: ignore[arg-type]

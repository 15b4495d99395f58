from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from hasten.data.order import Order
from hasten.data.randomness import ALL, TORCH
from hasten.data.samplers import SeedableRandomSampler
from hasten.data.shard import IterableDatasetShard
from tests.data.scenarios import FORK, Batches, Drawing, Numbers, Stream, generator


def test_each_generator_is_found_once():
    one, other = generator(1), generator(2)
    sampler = RandomSampler(Numbers(), generator=other)
    batches: Any = Batches([])
    batches.generator = one
    numbers: Any = Numbers()
    numbers.generator = generator(3)
    assert Order(DataLoader(Numbers())).generators() == []
    assert Order(DataLoader(Numbers(), shuffle=True, generator=one)).generators() == [one]
    assert Order(DataLoader(Numbers(), sampler=sampler, generator=one)).generators() == [one, other]
    assert Order(DataLoader(Numbers(), batch_sampler=BatchSampler(sampler, 2, False))).generators() == [other]
    assert Order(DataLoader(Numbers(), batch_sampler=batches)).generators() == [one]
    assert Order(DataLoader(numbers)).generators() == []
    assert Order(DataLoader(IterableDatasetShard(Stream(generator=one)))).generators() == [one]
    seedable = SeedableRandomSampler(Numbers(), generator=one)
    assert Order(DataLoader(Numbers(), sampler=seedable)).generators() == []


def test_what_the_order_may_be_drawn_from():
    assert Order(DataLoader(Numbers(), shuffle=True)).kinds == TORCH
    assert Order(DataLoader(Numbers(), sampler=Drawing())).kinds == ALL  # type: ignore[arg-type]
    assert Order(DataLoader(Numbers(), batch_sampler=Batches([]))).kinds == ALL
    assert Order(DataLoader(Stream())).kinds == ALL
    assert Order(DataLoader(Stream(), num_workers=1, multiprocessing_context=FORK)).kinds == TORCH


def test_everything_that_has_epochs_is_told_once():
    told: list[Any] = []

    class Told(Batches):
        def set_epoch(self, epoch: int) -> None:
            told.append((self, epoch))

    batches = Told([])
    Order(DataLoader(Numbers(), sampler=batches, batch_size=None)).set_epoch(4)  # type: ignore[arg-type]
    assert told == [(batches, 4)]
    torch.manual_seed(1)

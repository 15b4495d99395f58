from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from hasten.data.loader import prepare_data_loader
from hasten.data.sharded import DataLoaderShard
from tests.data.scenarios import Batches, Numbers, Stream


def shared(loader: DataLoader[Any], ranks: int = 2, **settings: Any) -> Any:
    return prepare_data_loader(loader, num_processes=ranks, process_index=0, **settings)


@pytest.mark.parametrize(
    ("loader", "settings", "size"),
    [
        (DataLoader(Numbers(), batch_size=3), {}, 6),
        (DataLoader(Numbers(), batch_size=6), {"split_batches": True}, 6),
        (DataLoader(Numbers(), batch_size=None), {}, 2),
        (DataLoader(Numbers(), batch_sampler=BatchSampler(range(4), 3, False)), {}, 6),
        (DataLoader(Numbers(), batch_sampler=Batches([[0]])), {}, None),
        (DataLoader(Stream(), batch_size=3), {}, 6),
        (DataLoader(Stream(), batch_size=6), {"split_batches": True}, 6),
        (DataLoader(Stream(), batch_size=None), {}, None),
    ],
)
def test_samples_of_a_step(loader: DataLoader[Any], settings: dict[str, Any], size: int | None):
    assert shared(loader, **settings).total_batch_size == size


@pytest.mark.parametrize(("size", "drop_last", "remainder"), [(8, False, 0), (7, False, -1), (7, True, 0)])
def test_the_remainder_of_a_distributed_sampler(size: int, drop_last: bool, remainder: int):
    sampler = DistributedSampler(Numbers(size), 2, 0, drop_last=drop_last)
    loader = shared(DataLoader(Numbers(size), batch_size=2, sampler=sampler))
    assert [loader.remainder for _ in loader][-1] == remainder
    assert loader.state_dict()["samples"] == 0


def test_batches_of_any_size_tell_their_remainder_at_the_end():
    loader = shared(DataLoader(Numbers(), batch_sampler=Batches([[0, 1], [2], [3, 4, 5]])))
    assert [loader.remainder for _ in loader] == [-1, 3]
    even = shared(DataLoader(Numbers(), batch_sampler=Batches([[0, 1], [2]])))
    assert [even.remainder for _ in even] == [0]


def test_positional_arguments_are_those_of_the_reference():
    own = torch.Generator()
    loader = DataLoaderShard(Numbers(), torch.device("cpu"), ["torch"], own, 1, True, True, True, None, 4, batch_size=2)
    assert loader.device == torch.device("cpu")
    assert (loader.rng_types, loader.synchronized_generator, loader.skip_batches) == (["torch"], own, 1)
    assert (loader.by_position, loader._drop_last, loader._non_blocking, loader.iteration) == (True, True, True, 4)

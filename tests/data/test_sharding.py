from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from hasten import Accelerator, DataLoaderConfiguration
from hasten.data.loader import prepare_data_loader
from hasten.data.sharding import ALREADY, REPLICATE, SHARD, choose_sharding
from tests.data.scenarios import Numbers
from tests.ranks import run_ranks


class Split(IterableDataset[int]):
    """Looks like a stream that `split_dataset_by_node` has split."""

    def __init__(self, rank: int, size: int) -> None:
        self._distributed = SimpleNamespace(rank=rank, world_size=size)
        self.samples = range(rank, 12, size)

    def __iter__(self) -> Any:
        return iter(self.samples)


def distributed(size: int, ranks: int, rank: int, batch: int = 2) -> DataLoader[Any]:
    data = Numbers(size)
    return DataLoader(data, batch_size=batch, sampler=DistributedSampler(data, ranks, rank, shuffle=False))


def marked(where: str, value: str) -> DataLoader[Any]:
    loader = DataLoader(Numbers(8), batch_size=2)
    (loader if where == "loader" else loader.dataset).sharding = value  # type: ignore[attr-defined]
    return loader


@pytest.mark.parametrize(
    ("loader", "wanted", "how"),
    [
        (DataLoader(Numbers(8)), "auto", SHARD),
        (distributed(8, 2, 0), "auto", ALREADY),
        (distributed(8, 2, 0), "shard", SHARD),
        (DataLoader(Split(0, 2)), "auto", ALREADY),
        (marked("loader", "already"), "auto", ALREADY),
        (marked("dataset", "replicate"), "auto", REPLICATE),
        (marked("dataset", "replicate"), "shard", SHARD),
        (marked("dataset", "something else"), "auto", SHARD),
    ],
)
def test_the_choice(loader, wanted, how):
    assert choose_sharding(loader, wanted, 2) == how


def test_another_number_of_parts_is_an_error():
    for loader, by in (
        (distributed(8, 2, 0), "its DistributedSampler"),
        (DataLoader(Split(0, 2)), "split_dataset_by_node"),
    ):
        with pytest.raises(ValueError, match=f"divided into 2 parts by {by}, but the ranks need 4 different parts"):
            choose_sharding(loader, "auto", 4)
        assert choose_sharding(loader, "already", 4) == ALREADY


def test_unknown_choices_are_an_error():
    with pytest.raises(ValueError, match="sharding='all': it must be one of 'auto', 'shard', 'already', 'replicate'"):
        choose_sharding(DataLoader(Numbers(8)), "all", 2)


def samples(loader: Any) -> list[int]:
    return [index for batch in loader for index in batch.tolist()]


def test_what_each_rank_gets():
    def get(sharding: str, loader: DataLoader[Any], **options: Any) -> list[int]:
        return samples(prepare_data_loader(loader, num_processes=2, process_index=1, sharding=sharding, **options))

    plain = DataLoader(Numbers(8), batch_size=2)
    assert get("auto", plain) == [2, 3, 6, 7]
    assert get("already", plain) == list(range(8)) == get("replicate", plain)
    assert get("auto", distributed(8, 2, 1)) == [1, 3, 5, 7]
    assert get("shard", distributed(8, 2, 1)) == [5, 7]
    assert get("auto", DataLoader(Split(1, 2), batch_size=2), put_on_device=True) == [1, 3, 5, 7, 9, 11]


def test_dispatch_contradicts_what_each_rank_has():
    for sharding in ("already", "replicate"):
        with pytest.raises(ValueError, match=f"`dispatch_batches=True` and sharding='{sharding}'"):
            prepare_data_loader(
                DataLoader(Numbers(8)), num_processes=2, process_index=0, sharding=sharding, dispatch_batches=True,
                put_on_device=True,
            )  # fmt: skip


def measured(kind: str, size: int) -> list[Any]:
    accelerator = Accelerator(cpu=True)
    ranks, rank = accelerator.num_processes, accelerator.process_index
    if kind == "distributed":
        loader: Any = distributed(size, ranks, rank)
    elif kind == "already":
        data = torch.utils.data.Subset(Numbers(size), range(rank * size // ranks, (rank + 1) * size // ranks))
        loader = DataLoader(data, batch_size=2)
    else:
        loader = DataLoader(Numbers(size), batch_size=2)
    if kind != "distributed":
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(sharding=kind))
    loader = accelerator.prepare(loader)
    found: list[list[Any]] = [[], [], []]
    for batch in loader:
        found[0] += accelerator.gather_for_metrics({"x": (batch,)})["x"][0].tolist()
        found[1] += accelerator.gather_for_metrics([f"s{index}" for index in batch.tolist()])
        found[2] += accelerator.gather_for_metrics({"y": batch, "z": batch.tolist()}, use_gather_object=True)["z"]
    return found


@pytest.mark.parametrize("size", [1, 7, 8, 12, 13])
@pytest.mark.parametrize("ranks", [2, 3])
def test_metrics_count_every_sample_once(ranks, size):
    for kind in ("distributed", "replicate"):
        for tensors, words, numbers in run_ranks(measured, ranks, kind, size):
            assert sorted(tensors) == sorted(numbers) == list(range(size)), kind
            assert words == [f"s{index}" for index in tensors]
            assert kind == "distributed" or tensors == list(range(size))


def test_metrics_of_parts_of_ones_own():
    for tensors, _, numbers in run_ranks(measured, 2, "already", 10):
        assert sorted(tensors) == sorted(numbers) == list(range(10))

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from hasten import Accelerator, DataLoaderConfiguration
from hasten.data.contract import describe
from hasten.data.loader import prepare_data_loader
from tests.data.scenarios import Numbers
from tests.data.test_other_ranks import Ragged
from tests.ranks import run_ranks


class Stream(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Any:
        return iter(range(self.size))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(7))


def distributed(size: int, batch: int, ranks: int, rank: int, drop: bool) -> DataLoader[Any]:
    data = Numbers(size)
    sampler = DistributedSampler(data, ranks, rank, shuffle=False, drop_last=drop)
    return DataLoader(data, batch_size=batch, sampler=sampler)


def build(kind: str, size: int, batch: int, drop: bool, ranks: int, rank: int) -> DataLoader[Any]:
    if kind == "distributed":
        return distributed(size, batch, ranks, rank, drop)
    if kind == "ragged":
        return DataLoader(Numbers(size), batch_sampler=[*Ragged(size)])  # type: ignore[arg-type]
    data: Any = Stream(size) if kind == "stream" else Numbers(size)
    return DataLoader(data, batch_size=batch, drop_last=drop)


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(["index", "stream", "distributed", "ragged"]),
    size=st.integers(1, 40),
    batch=st.integers(1, 5),
    ranks=st.integers(1, 4),
    drop=st.booleans(),
    even=st.booleans(),
    split=st.booleans(),
)
def test_the_contract_is_what_happens(kind, size, batch, ranks, drop, even, split):
    split = split and kind in ("index", "stream")
    batch = batch * ranks if split else batch
    if kind == "distributed" and size < ranks:
        return
    found, loaders = [], []
    for rank in range(ranks):
        loader: Any = prepare_data_loader(
            build(kind, size, batch, drop, ranks, rank),
            num_processes=ranks,
            process_index=rank,
            even_batches=even,
            split_batches=split,
        )
        found.append([each.tolist() for each in loader])
        loaders.append(loader)
    contract = describe(loaders[0])
    assert contract.parts == ranks
    assert contract.share.steps == tuple(map(len, found))
    if contract.share.samples is None:
        assert kind == "ragged"
        return
    numbers = tuple(sum(map(len, each)) for each in found)
    seen = [index for each in found for batch_ in each for index in batch_]
    assert contract.samples == size
    assert contract.share.samples == numbers
    assert contract.share.repeated == len(seen) - len(set(seen))
    assert contract.share.dropped == size - len(set(seen))
    if not drop or kind == "ragged":
        assert found[0] == [] or len(found[0][0]) <= (contract.batch_size or 0)


def dispatched(size: int, drop: bool, split: bool) -> tuple[Any, ...]:
    config = DataLoaderConfiguration(dispatch_batches=True, split_batches=split)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(Numbers(size), batch_size=6 if split else 2, drop_last=drop))
    found = [batch.tolist() for batch in loader]
    return accelerator.explain(loader).share, len(found), [index for batch in found for index in batch]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("size", "drop"), [(12, False), (13, False), (16, True), (1, False)])
def test_dispatched_data(size, drop, split):
    results = run_ranks(dispatched, 3, size, drop, split)
    share = results[0][0]
    seen = [index for result in results for index in result[2]]
    assert share.steps == tuple(result[1] for result in results)
    assert share.samples == tuple(len(result[2]) for result in results)
    assert share.repeated == len(seen) - len(set(seen))
    assert share.dropped == size - len(set(seen))


def test_it_prints_as_a_table():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(resume="position"))
    loader = accelerator.prepare(DataLoader(Numbers(7), batch_size=2, shuffle=True))
    assert str(accelerator.explain(loader)).splitlines() == [
        "dataset           Numbers, 7 samples",
        "division          one process",
        "batch size        2 per rank",
        "samples per rank  7",
        "steps per rank    4",
        "repeated          0",
        "dropped           0",
        "order             shuffled by torch's generator",
        "resume            the position: the next pass goes on by itself",
    ]


def test_what_is_not_known_is_not_said():
    loader: Any = prepare_data_loader(DataLoader(Endless(), batch_size=2), num_processes=2, process_index=0)
    contract = describe(loader)
    assert (contract.samples, contract.share.samples, contract.share.steps) == (None, None, None)
    assert "Endless, an unknown number of samples" in str(contract)
    assert "Each rank reads the whole stream and keeps its part" in str(contract)
    own: Any = prepare_data_loader(DataLoader(Numbers(4)), num_processes=2, process_index=0, sharding="already")
    assert describe(own).share.samples is None


def test_uneven_steps_are_noted():
    loader: Any = prepare_data_loader(
        DataLoader(Numbers(5), batch_size=2), num_processes=2, process_index=0, even_batches=False
    )
    assert describe(loader).share.steps == (2, 1)
    assert "The ranks have different numbers of steps" in str(describe(loader))


def test_only_what_was_prepared_has_a_contract():
    with pytest.raises(ValueError, match="has not prepared that object as a model or a data loader"):
        Accelerator(cpu=True).explain(DataLoader(Numbers(4)))

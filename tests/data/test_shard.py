import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from hasten.data.shard import BatchSamplerShard, IterableDatasetShard, SamplerShard, data_part
from tests.data.scenarios import Batches, SizedStream, Stream


class Own(BatchSampler):
    """Not torch's own class, so that its batches are dealt out and not computed."""


@st.composite
def sharings(draw: Any) -> dict[str, Any]:
    ranks = draw(st.integers(1, 5))
    split = draw(st.booleans())
    batch = draw(st.integers(1, 4)) * (ranks if split else 1)
    return {
        "size": draw(st.integers(0, 40)),
        "batch": batch,
        "ranks": ranks,
        "split": split,
        "even": draw(st.booleans()),
        "drop": draw(st.booleans()),
    }


def expected(size: int, batch: int, ranks: int, split: bool, even: bool, drop: bool, rank: int) -> list[list[int]]:
    """The documented order, in the plainest way: rounds of consecutive samples, the last one completed from the start."""
    own = batch // ranks if split else batch
    length = own * ranks
    found = []
    for start in range(0, size, length):
        samples = range(start, start + length) if even else range(start, min(start + length, size))
        if start + length > size and drop:
            break
        part = [index % size for index in samples][rank * own : (rank + 1) * own]
        if part:
            found.append(part)
    return found


@given(sharings(), st.integers(0, 8), st.sampled_from([BatchSampler, Own]))
def test_batches_are_shared_in_the_documented_order(case: dict[str, Any], start: int, kind: type[BatchSampler]):
    size, batch, ranks = case["size"], case["batch"], case["ranks"]
    for rank in range(ranks):
        batches = kind(SequentialSampler(range(size)), batch, case["drop"])
        shard = BatchSamplerShard(batches, ranks, rank, case["split"], case["even"])
        wanted = expected(**case, rank=rank)
        assert list(shard) == wanted
        assert len(shard) == len(wanted)
        assert list(shard.batches_from(start)) == wanted[start:]


@given(sharings(), st.sampled_from([BatchSampler, Own]))
def test_every_sample_is_there_and_what_is_repeated_is_known(case: dict[str, Any], kind: type[BatchSampler]):
    case = {**case, "drop": False}
    size, ranks = case["size"], case["ranks"]
    batches = kind(RandomSampler(range(size)) if size else range(0), case["batch"], False)
    shards = []
    parts = []
    for rank in range(ranks):
        torch.manual_seed(1)
        shards.append(BatchSamplerShard(batches, ranks, rank, case["split"], case["even"]))
        parts.append(list(shards[-1]))
    samples = [index for part in parts for batch in part for index in batch]
    assert set(samples) == set(range(size))
    length = case["batch"] if case["split"] else case["batch"] * ranks
    if case["even"]:
        assert len({len(part) for part in parts}) == 1
        assert {len(batch) for part in parts for batch in part} <= {length // ranks}
        assert len(samples) == math.ceil(size / length) * length
        assert {shard.real for shard in shards} == {size % length}
    else:
        assert len(samples) == size
        assert {shard.real for shard in shards} == {0}


def test_tiny_data_is_repeated_as_often_as_needed():
    shards = [BatchSamplerShard(BatchSampler(range(2), 3, False), 2, rank) for rank in (0, 1)]
    assert [list(shard) for shard in shards] == [[[0, 1, 0]], [[1, 0, 1]]]


DYNAMIC = [[0, 1], [2], [3, 4, 5], [6], [7, 8]]


@pytest.mark.parametrize(
    ("batches", "ranks", "even", "parts", "real"),
    [
        (DYNAMIC, 2, True, [[[0, 1], [3, 4, 5], [7, 8]], [[2], [6], [0, 1]]], 2),
        (DYNAMIC, 3, True, [[[0, 1], [6]], [[2], [7, 8]], [[3, 4, 5], [0, 1]]], 3),
        (DYNAMIC[:4], 3, True, [[[0, 1], [6]], [[2], [0, 1]], [[3, 4, 5], [2]]], 1),
        (DYNAMIC[:4], 2, True, [[[0, 1], [3, 4, 5]], [[2], [6]]], 0),
        (DYNAMIC[:1], 3, True, [[[0, 1]], [[0, 1]], [[0, 1]]], 2),
        (DYNAMIC, 3, False, [[[0, 1], [6]], [[2], [7, 8]], [[3, 4, 5]]], 0),
        ([], 2, True, [[], []], 0),
    ],
)
def test_batches_of_any_size_are_dealt_out_whole(
    batches: list[list[int]], ranks: int, even: bool, parts: list[Any], real: int
):
    for rank in range(ranks):
        shard = BatchSamplerShard(Batches(batches), ranks, rank, even_batches=even)
        assert list(shard) == parts[rank]
        assert len(shard) == len(parts[rank])
        assert shard.real == real
        assert list(shard.batches_from(1)) == parts[rank][1:]


def test_incomplete_rounds_are_dropped_if_the_batch_sampler_drops():
    dropping = Batches(DYNAMIC)
    dropping.drop_last = True  # type: ignore[attr-defined]
    assert [list(BatchSamplerShard(dropping, 2, rank)) for rank in (0, 1)] == [[[0, 1], [3, 4, 5]], [[2], [6]]]
    assert len(BatchSamplerShard(dropping, 2, 1)) == 2


def test_a_short_batch_in_the_middle_loses_nothing():
    odd = Batches([[0, 1], [2], [3, 4], [5]])
    odd.batch_size = 2  # type: ignore[attr-defined]
    assert [list(BatchSamplerShard(odd, 2, rank)) for rank in (0, 1)] == [[[0, 1], [3, 4]], [[2], [5, 0]]]


def test_the_users_lists_are_not_changed():
    batches = [[0, 1], [2]]
    odd = Batches(batches)
    odd.batch_size = 2  # type: ignore[attr-defined]
    assert list(BatchSamplerShard(odd, 2, 1)) == [[2, 0]]
    assert list(BatchSamplerShard(odd, 2, 1, split_batches=True)) == [[1], [0]]
    assert batches == [[0, 1], [2]]


@pytest.mark.parametrize(("size", "text"), [(4, "next are 3 and 6"), (None, "unknown size"), (2, "next are 3 and 3")])
def test_batches_that_cannot_be_split(size: int | None, text: str):
    batches = Batches([[0]])
    batches.batch_size = size  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=text):
        BatchSamplerShard(batches, 3, 0, split_batches=True)


def test_single_samples():
    shards = [SamplerShard(range(5), 2, rank) for rank in (0, 1)]
    assert [list(shard) for shard in shards] == [[0, 2, 4], [1, 3, 0]]
    assert [len(shard) for shard in shards] == [3, 3]
    assert list(shards[0].batches_from(1)) == [2, 4]
    assert list(SamplerShard(range(5), 2, 1, even_batches=False)) == [1, 3]


# ---- streams ----


@given(sharings())
def test_streams_are_shared_in_the_documented_order(case: dict[str, Any]):
    for rank in range(case["ranks"]):
        shard = IterableDatasetShard(
            SizedStream(case["size"]), case["batch"], case["drop"], case["ranks"], rank, case["split"]
        )
        wanted = [index for batch in expected(**{**case, "even": True}, rank=rank) for index in batch]
        assert list(shard) == wanted
        assert len(shard) == len(wanted)
        length = case["batch"] * (1 if case["split"] else case["ranks"])
        assert shard.real == (0 if case["drop"] else case["size"] % length)


class Epochs(Stream):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_the_epoch_reaches_the_dataset():
    shard = IterableDatasetShard(Epochs())
    shard.set_epoch(3)
    assert (shard.epoch, shard.dataset.epoch) == (3, 3)  # type: ignore[attr-defined]


def test_a_generator_is_seeded_with_the_epoch_also_if_none_was_set():
    shard = IterableDatasetShard(Stream(6, torch.Generator()))
    orders = [list(shard)]
    shard.set_epoch(1)
    orders.append(list(shard))
    assert orders == [torch.randperm(6, generator=torch.Generator().manual_seed(epoch)).tolist() for epoch in (0, 1)]


def test_a_dataset_with_epochs_seeds_its_generator_itself():
    own = torch.Generator().manual_seed(5)
    dataset = Epochs(6, own)
    list(IterableDatasetShard(dataset))
    assert torch.equal(own.get_state(), _after_permutation(5, 6))


def _after_permutation(seed: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    torch.randperm(size, generator=generator)
    return generator.get_state()


def test_streams_that_cannot_be_split():
    with pytest.raises(ValueError, match=r"batch size \(3\)"):
        IterableDatasetShard(Stream(), 3, num_processes=2, split_batches=True)


def test_a_stream_is_read_no_further_than_needed():
    class Counting(IterableDataset[int]):
        read = 0

        def __iter__(self) -> Iterator[int]:
            while True:
                self.read += 1
                yield self.read

    dataset = Counting()
    samples = iter(IterableDatasetShard(dataset, 2, num_processes=3, process_index=1))
    assert [next(samples), next(samples)] == [3, 4]
    assert dataset.read == 6


# ---- meshes ----


class Mesh:
    def __init__(self, **sizes: int) -> None:
        self.mesh_dim_names = tuple(sizes)
        self.sizes = tuple(sizes.values())

    def size(self, dimension: int) -> int:
        return self.sizes[dimension]


@pytest.mark.parametrize(
    ("mesh", "parts"),
    [
        (None, [(rank, 4) for rank in range(4)]),
        (Mesh(dp_replicate=2, dp_shard=2), [(rank, 4) for rank in range(4)]),
        (Mesh(dp_shard=2, tp=2), [(0, 2), (0, 2), (1, 2), (1, 2)]),
        (Mesh(cp=2, tp=2), [(0, 1)] * 4),
    ],
)
def test_ranks_of_one_model_have_one_part(mesh: Mesh | None, parts: list[tuple[int, int]]):
    assert [data_part(rank, 4, mesh) for rank in range(4)] == parts


@pytest.mark.parametrize("sizes", [[4, 2, 3], [6, 3], [4, 4, 5]])
def test_batches_of_other_sizes_can_not_be_split(sizes: list[int]):
    class Sampler:
        batch_size = 4

        def __len__(self) -> int:
            return len(sizes)

        def __iter__(self) -> Any:
            return iter([list(range(size)) for size in sizes])

    shard = BatchSamplerShard(Sampler(), 2, 0, split_batches=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"batch number \d of Sampler has \d. Give all batches but the last the size"):
        list(shard)

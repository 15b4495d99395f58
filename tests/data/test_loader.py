import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from hasten.data.loader import prepare_data_loader
from hasten.data.samplers import SeedableRandomSampler
from hasten.data.shard import BatchSamplerShard, IterableDatasetShard
from hasten.data.sharded import DataLoaderShard
from hasten.world.process import World, start
from tests.data.scenarios import FORK, SCENARIOS, SIZE, Batches, Numbers, Stream, play
from tests.ranks import run_ranks

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())
CPU = torch.device("cpu")


def play_all() -> dict[str, Any]:
    world = start(cpu=True)
    return {name: play(name, world.rank, prepare_data_loader) for name in SCENARIOS}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_orders_draws_and_ends_are_those_of_the_reference(ranks: int):
    results = [play_all()] if ranks == 1 else run_ranks(play_all, ranks, timeout=60)
    for name, expected in RECORDED[str(ranks)].items():
        assert [result[name] for result in results] == expected, name


def prepared(loader: DataLoader[Any], **settings: Any) -> Any:
    return prepare_data_loader(loader, CPU, **settings)


# ---- what is kept ----


class Own(DataLoader[Any]):
    def __init__(self, data: Any, *, label: str) -> None:
        super().__init__(data, batch_size=2)
        self.label = label

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield self.label, batch

    def shout(self) -> str:
        return self.label.upper()


def test_a_loader_class_of_the_user_stays_what_it_is():
    loader = prepared(Own(Numbers(5), label="mine"), num_processes=2, process_index=1)
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, Own)
    assert isinstance(loader, DataLoaderShard)
    assert loader.shout() == "MINE"
    assert [(label, batch.tolist()) for label, batch in loader] == [("mine", [2, 3]), ("mine", [1, 2])]


def collate(samples: list[int]) -> torch.Tensor:
    return torch.tensor(samples) * 10


def initialise(worker: int) -> None:
    pass


@pytest.mark.parametrize("dispatch", [False, True])
def test_every_setting_of_the_loader_is_kept(dispatch: bool):
    loader = DataLoader(
        Numbers(),
        batch_size=3,
        num_workers=1,
        collate_fn=collate,
        timeout=40,
        worker_init_fn=initialise,
        multiprocessing_context=FORK,
        prefetch_factor=5,
        persistent_workers=True,
        in_order=False,
    )
    result = prepared(loader, dispatch_batches=dispatch, put_on_device=True)
    for name in ("batch_size", "num_workers", "collate_fn", "timeout", "worker_init_fn", "prefetch_factor"):
        assert getattr(result, name) == getattr(loader, name), name
    for name in ("persistent_workers", "in_order", "pin_memory", "multiprocessing_context", "dataset", "drop_last"):
        assert getattr(result, name) is getattr(loader, name), name
    assert next(iter(result)).tolist() == [0, 10, 20]


def test_a_generator_is_kept():
    own = torch.Generator()
    assert prepared(DataLoader(Numbers(), shuffle=True, generator=own)).generator is own


def test_the_given_loader_stays_as_it_is():
    loader = DataLoader(Numbers(), batch_size=2, shuffle=True)
    before = dict(loader.__dict__)
    prepared(loader, num_processes=2, process_index=0, use_seedable_sampler=True)
    assert loader.__dict__ == before
    assert type(loader.batch_sampler.sampler) is RandomSampler  # type: ignore[union-attr]


def test_what_other_libraries_reach_for():
    loader = prepared(DataLoader(Numbers(), batch_size=2), num_processes=2, process_index=0)
    assert type(loader.batch_sampler.batch_sampler) is BatchSampler
    loader.batch_sampler.process_index = 1
    assert next(iter(loader)).tolist() == [2, 3]
    loader.batch_sampler.num_processes = 3
    assert loader.total_batch_size == 6
    assert loader.get_sampler() is loader.batch_sampler.batch_sampler.sampler
    loader.set_sampler(range(4))
    assert loader.get_sampler() == range(4)


def test_a_seedable_sampler_takes_the_place_of_a_random_one():
    loader = prepared(DataLoader(Numbers(), batch_size=2, shuffle=True), use_seedable_sampler=True, data_seed=3)
    sampler = loader.get_sampler()
    assert isinstance(sampler, SeedableRandomSampler)
    assert loader.sampler is sampler
    assert (sampler.initial_seed, sampler.num_samples, sampler.replacement) == (3, SIZE, False)
    unbatched = prepared(DataLoader(Numbers(), batch_size=None, shuffle=True), use_seedable_sampler=True, data_seed=3)
    assert list(unbatched) == [number for batch in loader for number in batch.tolist()]
    for other in (DataLoader(Numbers()), DataLoader(Stream())):
        assert not isinstance(prepared(other, use_seedable_sampler=True).get_sampler(), SeedableRandomSampler)


# ---- sizes ----


@pytest.mark.parametrize(
    ("options", "settings", "ranks", "batches", "total"),
    [
        ({"batch_size": 2}, {}, 1, 6, 2),
        ({"batch_size": 2}, {}, 2, 3, 4),
        ({"batch_size": 2, "drop_last": True}, {}, 2, 2, 4),
        ({"batch_size": 2, "drop_last": True}, {}, 3, 1, 6),
        ({"batch_size": 6}, {"split_batches": True}, 3, 2, 6),
        ({"batch_size": 2}, {"even_batches": False}, 4, 1, 8),
        ({"batch_size": None}, {}, 2, 6, 2),
    ],
)
def test_lengths(options: dict[str, Any], settings: dict[str, Any], ranks: int, batches: int, total: int):
    loader = prepared(DataLoader(Numbers(), **options), num_processes=ranks, process_index=ranks - 1, **settings)
    assert len(loader) == batches == len(list(loader))
    assert loader.total_batch_size == total
    assert loader.total_dataset_length == SIZE


def test_lengths_of_streams():
    from tests.data.scenarios import SizedStream

    loader = prepared(DataLoader(SizedStream(), batch_size=2), num_processes=2, process_index=1)
    assert len(loader) == 3 == len(list(loader))
    assert loader.total_batch_size == 4
    assert loader.total_dataset_length == SIZE
    split = prepared(DataLoader(SizedStream(), batch_size=6), num_processes=2, process_index=1, split_batches=True)
    assert (len(split), split.total_batch_size, split.batch_size) == (2, 6, 3)
    endless = prepared(DataLoader(Stream(), batch_size=2))
    with pytest.raises(TypeError, match="no len"):
        len(endless)
    with pytest.raises(TypeError, match="no len"):
        _ = endless.total_dataset_length


# ---- data that is not batched, or shared out already ----


def test_samples_that_are_not_batched_are_dealt_one_by_one():
    loaders = [
        prepared(DataLoader(Numbers(5), batch_size=None), num_processes=2, process_index=rank) for rank in (0, 1)
    ]
    assert [list(loader) for loader in loaders] == [[0, 2, 4], [1, 3, 0]]
    assert [loader.remainder for loader in loaders] == [1, 1]


def test_a_batch_sampler_given_as_sampler_is_dealt_in_batches():
    class Rows(Numbers):
        def __getitem__(self, index: Any) -> Any:
            return torch.tensor(index)

    loader = DataLoader(Rows(5), sampler=BatchSampler(SequentialSampler(range(5)), 2, False), batch_size=None)
    result = prepared(loader, num_processes=2, process_index=1)
    assert [batch.tolist() for batch in result] == [[2, 3], [1, 2]]
    assert result.get_sampler() is loader.sampler.sampler  # type: ignore[attr-defined]
    assert [batch.tolist() for batch in prepared(loader)] == [[0, 1], [2, 3], [4]]


def test_a_batch_sampler_without_a_sampler_is_accepted():
    loader = DataLoader(Numbers(6), batch_sampler=Batches([[0, 1], [2], [3, 4, 5]]))
    assert [batch.tolist() for batch in prepared(loader, num_processes=2, process_index=1)] == [[2], [0, 1]]
    assert prepared(loader).get_sampler() is None
    with pytest.raises(ValueError, match="without a sampler"):
        prepared(loader).set_sampler(range(3))


def test_a_distributed_sampler_is_left_alone():
    seen = []
    for rank in (0, 1):
        sampler = DistributedSampler(Numbers(5), num_replicas=2, rank=rank, shuffle=False)
        loader = prepared(DataLoader(Numbers(5), batch_size=2, sampler=sampler), num_processes=2, process_index=rank)
        seen.append([batch.tolist() for batch in loader])
        assert loader.total_batch_size == 4
        assert loader.remainder == -1
    assert seen == [[[0, 2], [4]], [[1, 3], [0]]]


def test_streams_that_shard_themselves_are_asked_to():
    class Shards(Stream):
        n_shards = 3

        def shard(self, num_shards: int, index: int) -> Any:
            return ("part", num_shards, index)

    loader = prepared(DataLoader(Shards(), batch_size=2), num_processes=2, process_index=1)
    assert loader.dataset == ("part", 2, 1)
    few = prepared(DataLoader(Shards(), batch_size=2), num_processes=4, process_index=1)
    assert isinstance(few.dataset, IterableDatasetShard)


def test_the_number_of_sources_by_both_names():
    class Sources(Stream):
        def shard(self, num_shards: int, index: int) -> Any:
            return ("part", num_shards, index)

    for names, asked in (
        ({"num_shards": 4}, True),
        ({"n_shards": None}, False),
        ({"n_shards": 1, "num_shards": 4}, False),
    ):
        data = Sources()
        data.__dict__.update(names)
        loader = prepared(DataLoader(data, batch_size=2), num_processes=2, process_index=0)
        assert (loader.dataset == ("part", 2, 0)) == asked


# ---- one model on several ranks ----


class Mesh:
    mesh_dim_names = ("dp_shard", "cp", "tp")

    def size(self, dimension: int) -> int:
        return (2, 3, 2)[dimension]


def test_ranks_of_one_model_get_the_same_batches():
    parts = []
    for rank in range(12):
        loader = prepared(
            DataLoader(Numbers(4), batch_size=2), num_processes=12, process_index=rank, torch_device_mesh=Mesh()
        )
        assert isinstance(loader.batch_sampler, BatchSamplerShard)
        parts.append([batch.tolist() for batch in loader])
    assert parts == [[[0, 1]]] * 6 + [[[2, 3]]] * 6


# ---- bad input ----


@pytest.mark.parametrize(
    ("loader", "settings", "text"),
    [
        (DataLoader(Numbers(), batch_size=4), {"split_batches": True}, r"batch size \(4\).*processes \(3\).* 3 and 6"),
        (DataLoader(Numbers(), batch_size=2), {"split_batches": True}, r"batch size \(2\).* 3 and 3"),
        (DataLoader(Numbers(), batch_size=None), {"split_batches": True}, "unknown size"),
        (DataLoader(Numbers(), batch_sampler=Batches([[0]])), {"split_batches": True}, "unknown size"),
        (DataLoader(Stream(), batch_size=None), {"split_batches": True}, "unknown size"),
        (DataLoader(Stream(), batch_size=4), {"split_batches": True}, r"batch size \(4\)"),
        (DataLoader(Numbers()), {"dispatch_batches": True}, "put_on_device=True"),
        ([1, 2], {}, "torch DataLoader is needed, this is a list"),
    ],
)
def test_bad_settings(loader: Any, settings: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        prepared(loader, num_processes=3, process_index=0, **settings)


def test_a_process_that_is_none_of_the_processes():
    with pytest.raises(ValueError, match="process_index=2: with num_processes=2 it must be one of 0 to 1"):
        prepared(DataLoader(Numbers()), num_processes=2, process_index=2)


def test_splitting_uses_the_size_of_a_batch_sampler():
    loader = DataLoader(Numbers(8), batch_sampler=BatchSampler(range(8), 4, False))
    result = prepared(loader, num_processes=2, process_index=1, split_batches=True)
    assert [batch.tolist() for batch in result] == [[2, 3], [6, 7]]


# ---- seeds ----


def seedable_orders(shared: bool) -> list[Any]:
    world = start(cpu=True)
    torch.manual_seed(world.rank)
    loader = prepare_data_loader(
        DataLoader(Numbers(), batch_size=2, shuffle=True),
        use_seedable_sampler=True,
        rng_types=["generator"] if shared else None,
        world=world,
    )
    return [batch.tolist() for batch in loader]


def test_a_seedable_sampler_has_one_seed_on_all_ranks():
    samples = [number for batches in run_ranks(seedable_orders, 2, True) for batch in batches for number in batch]
    assert sorted(set(samples)) == list(range(SIZE))
    assert len(samples) == 12


def test_a_world_of_one_exchanges_nothing():
    loader = prepare_data_loader(
        DataLoader(Numbers(), batch_size=2, shuffle=True), rng_types=["torch", "generator"], world=World()
    )
    assert loader.rng_types == ["torch"]  # type: ignore[attr-defined]
    assert len(list(loader)) == 6

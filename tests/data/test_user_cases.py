"""What users met, each as one small program: what the whole of `Accelerator` makes of a loader."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler

from hasten import Accelerator, DataLoaderConfiguration
from tests.data.scenarios import Numbers, SizedStream, Stream
from tests.ranks import RankError, run_ranks


def accelerator(**config: Any) -> Accelerator:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))


def lists(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


# ---- batches that hold more than tensors ----


def collate(samples: list[int]) -> dict[str, Any]:
    return {"x": torch.tensor(samples), "name": "a", "ok": True, "tags": [f"t{index}" for index in samples]}


def mixed(stream: bool, dispatch: bool) -> list[Any]:
    data: Any = Stream(8) if stream else Numbers(8)
    loader = accelerator(dispatch_batches=dispatch).prepare(DataLoader(data, batch_size=2, collate_fn=collate))
    return [{**batch, "x": batch["x"].tolist()} for batch in loader]


@pytest.mark.parametrize("ranks", [1, 2])
def test_objects_in_a_batch_arrive_as_on_the_map_style_path(ranks: int) -> None:
    indexed = run_ranks(mixed, ranks, False, False)
    assert run_ranks(mixed, ranks, True, True) == indexed
    assert run_ranks(mixed, ranks, False, True) == indexed
    assert indexed[-1][-1] == {"x": [6, 7], "name": "a", "ok": True, "tags": ["t6", "t7"]}


# ---- batch samplers ----


class Pairs:
    """No sampler, no batch size: only what the protocol asks for."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3], [4, 5], [6, 7]])

    def __len__(self) -> int:
        return 4


def batch_samplers() -> list[Any]:
    own = DataLoader(Numbers(8), batch_sampler=Pairs())
    four = DataLoader(Numbers(8), batch_sampler=BatchSampler(SequentialSampler(Numbers(8)), 4, False))
    given = DataLoader(torch.arange(8), sampler=BatchSampler(SequentialSampler(Numbers(8)), 2, False), batch_size=None)
    return [
        lists(accelerator().prepare(own)),
        lists(accelerator(split_batches=True).prepare(four)),
        lists(accelerator().prepare(given)),
    ]


def test_batch_samplers_of_every_kind_are_accepted() -> None:
    first, second = run_ranks(batch_samplers, 2)
    assert first == [[[0, 1], [4, 5]]] * 3
    assert second == [[[2, 3], [6, 7]]] * 3


def sizes() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, split, dispatch in (("whole", False, False), ("split", True, False), ("sent", False, True)):
        loader = accelerator(split_batches=split, dispatch_batches=dispatch).prepare(
            DataLoader(Stream(64), batch_size=16)
        )
        found[name] = [len(batch) for batch in loader]
    by_argument = Accelerator(cpu=True, split_batches=True).prepare(DataLoader(Numbers(64), batch_size=16))
    found["split by an argument"] = [len(batch) for batch in by_argument]
    return found


def test_the_batch_size_is_divided_once_or_not_at_all() -> None:
    wanted = {"whole": [16, 16], "split": [8] * 4, "sent": [16, 16], "split by an argument": [8] * 4}
    assert run_ranks(sizes, 2) == [wanted] * 2


# ---- loaders that are shared out already ----


class Marked(IterableDataset[int]):
    """Each rank's own part, and says so."""

    sharding = "already"

    def __init__(self, rank: int, ranks: int) -> None:
        self.part = range(rank, 20, ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.part)


class Unmarked(Marked):
    sharding = None  # type: ignore[assignment]


def parts() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, config, kind in (("marked", {}, Marked), ("told", {"sharding": "already"}, Unmarked)):
        one = accelerator(**config)
        loader = one.prepare(DataLoader(kind(one.process_index, one.num_processes), batch_size=2))
        own, seen = [], []
        for batch in loader:
            own += batch.tolist()
            seen += one.gather_for_metrics(batch).tolist()
        found[name] = (own, sorted(seen))
    one = accelerator()
    data = Numbers(20)
    sampler: Any = DistributedSampler(data, one.num_processes, one.process_index, shuffle=False)
    own, seen = [], []
    for batch in one.prepare(DataLoader(data, batch_size=2, sampler=sampler)):
        own += batch.tolist()
        seen += one.gather_for_metrics(batch).tolist()
    found["sampler"] = (own, sorted(seen))
    return found


def test_what_is_divided_is_not_divided_again() -> None:
    results = run_ranks(parts, 2)
    for name in ("marked", "told", "sampler"):
        own = [set(result[name][0]) for result in results]
        assert set.union(*own) == set(range(20)), name
        assert all(result[name][1] == list(range(20)) for result in results), name
        assert name == "sampler" or sum(map(len, own)) == 20, name


def test_parts_with_different_numbers_of_steps_are_an_error_and_no_hang() -> None:
    """7, 7 and 6 samples in batches of 2."""
    with pytest.raises(RankError, match=r"rank 2: gather_for_metrics\(of='tensors of the last batch'\)"):
        run_ranks(parts, 3)


class Sources(IterableDataset[int]):
    """A stream in four sources that counts what is read from it."""

    n_shards = 4
    read = 0

    def __init__(self, shards: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        self.shards = shards

    def shard(self, num_shards: int, index: int) -> "Sources":
        return Sources(self.shards[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        for shard in self.shards:
            for index in range(shard * 6, shard * 6 + 6):
                self.read += 1
                yield index


def read_by_each() -> tuple[list[int], int]:
    loader = accelerator(dispatch_batches=False).prepare(DataLoader(Sources(), batch_size=3))
    return flat(lists(loader)), loader.dataset.read


def test_a_stream_of_sources_is_read_once_over_all_ranks() -> None:
    results = run_ranks(read_by_each, 2)
    assert sorted(results[0][0] + results[1][0]) == list(range(24))
    assert [read for _, read in results] == [12, 12]


def whole_by_each() -> list[list[int]]:
    one = accelerator(sharding="replicate")
    loader = one.prepare(DataLoader(Numbers(5), batch_size=2))
    own, seen = [], []
    for batch in loader:
        own += batch.tolist()
        seen += one.gather_for_metrics(batch).tolist()
    return [own, seen]


def test_replicated_data_count_once() -> None:
    assert run_ranks(whole_by_each, 2) == [[list(range(5))] * 2] * 2


# ---- leaving out the first batches ----


def left_out(dispatch: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for drop_last in (False, True):
        one = accelerator(dispatch_batches=dispatch)
        loader = one.prepare(DataLoader(Numbers(10), batch_size=2, drop_last=drop_last))
        rest = one.skip_first_batches(loader, 1)
        passes = [flat([one.gather_for_metrics(batch).tolist() for batch in each]) for each in (rest, rest)]
        found[f"{drop_last=}"] = passes
    return found


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_skip_keeps_the_settings_and_is_over_after_one_pass(dispatch: bool) -> None:
    wanted = {
        "drop_last=False": [list(range(4, 10)), list(range(10))],
        "drop_last=True": [list(range(4, 8)), list(range(8))],
    }
    assert run_ranks(left_out, 2, dispatch) == [wanted] * 2


# ---- continuing ----


def interrupted(folder: str, at: int, position: bool) -> tuple[list[int], list[int], list[int]]:
    """What was seen before, what should have been seen, and what is seen after a checkpoint; with draws in the loop."""
    one = accelerator(resume="position" if position else "order")
    torch.manual_seed(3)
    loader = one.prepare(DataLoader(Numbers(64), batch_size=4, shuffle=True))
    seen: list[int] = []
    before = 0
    for step, batch in enumerate(loader):
        torch.rand(7)
        seen += batch.tolist()
        if (step + 1) * 4 == at:
            one.save_state(folder)
            before = len(seen)
    other = accelerator(resume="position" if position else "order")
    torch.manual_seed(99)
    again = other.prepare(DataLoader(Numbers(64), batch_size=4, shuffle=True))
    other.load_state(folder)
    rest = again if position else other.skip_first_batches(again, at // 4)
    return seen[:before], seen[before:], flat(lists(rest))


@pytest.mark.parametrize("position", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_epoch_has_the_samples_that_were_not_seen(tmp_path: Path, ranks: int, position: bool) -> None:
    for _, wanted, rest in run_ranks(interrupted, ranks, str(tmp_path / "ck"), 20, position):
        assert rest == wanted
        assert len(rest) == 64 // ranks - 20


def stream_saved(folder: str) -> list[list[int]]:
    one = accelerator(dispatch_batches=False)
    loader = one.prepare(DataLoader(SizedStream(12), batch_size=2))
    for step, _ in enumerate(loader):
        if step == 0:
            one.save_state(folder)
    one.load_state(folder)
    return lists(one.skip_first_batches(loader, 1))


def test_a_stream_without_dispatch_can_be_saved(tmp_path: Path) -> None:
    assert run_ranks(stream_saved, 2, str(tmp_path / "ck")) == [[[4, 5], [8, 9]], [[6, 7], [10, 11]]]


# ---- shuffling ----


def two_epochs(seedable: bool) -> list[list[int]]:
    torch.manual_seed(11)
    loader = accelerator(use_seedable_sampler=seedable).prepare(DataLoader(Numbers(16), batch_size=2, shuffle=True))
    return [flat(lists(loader)) for _ in range(2)]


@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_two_epochs_have_two_orders_and_the_seed_gives_them_again(ranks: int, seedable: bool) -> None:
    results, again = run_ranks(two_epochs, ranks, seedable), run_ranks(two_epochs, ranks, seedable)
    assert results == again
    orders = [flat([list(row) for row in zip(*each, strict=True)]) for each in zip(*results, strict=True)]
    assert orders[0] != orders[1]
    assert all(set(order) == set(range(16)) for order in orders)


# ---- metrics ----


class Boxes(Dataset[Any]):
    """Another number of boxes in each picture."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        return torch.full((index % 4, 4), index)


def boxes(dispatch: bool) -> list[Any]:
    one = accelerator(dispatch_batches=dispatch)
    found: list[list[Any]] = [[], [], []]
    for batch in one.prepare(DataLoader(Boxes(), batch_size=2, collate_fn=list)):
        found[0] += [tuple(each.shape) for each in one.gather_for_metrics(batch, use_gather_object=True)]
        found[1] += one.gather_for_metrics([{"boxes": len(each)} for each in batch])
        found[2] += one.gather_for_metrics({"n": [len(each) for each in batch]})["n"]
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_results_of_other_lengths_and_objects_count_once(ranks: int) -> None:
    """The results are the same for every number of processes, in kind and in number."""
    counts = [index % 4 for index in range(9)]
    wanted = [[(count, 4) for count in counts], [{"boxes": count} for count in counts], counts]
    for dispatch in (False, True):
        assert run_ranks(boxes, ranks, dispatch) == [wanted] * ranks

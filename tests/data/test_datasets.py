"""Hugging Face datasets, the real package: indexed and streamed, on several ranks, with and without workers."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hasten import Accelerator, DataLoaderConfiguration
from hasten.data.loader import prepare_data_loader
from hasten.data.skip import skip_first_batches
from tests.data.scenarios import FORK
from tests.data.test_resume import through_a_file
from tests.ranks import run_ranks

# Read when the packages are imported: nothing is asked of a hub, and memory is taken from malloc, which forked workers may use.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
datasets = pytest.importorskip("datasets")

SIZE = 23


def columns(size: int = SIZE) -> dict[str, list[Any]]:
    return {
        "x": list(range(size)),
        "text": [f"text {index}" for index in range(size)],
        "tokens": [[index] * (index % 4) for index in range(size)],
        "label": [None if index % 3 else index for index in range(size)],
        "meta": [{"id": index, "tags": ["a"] * (index % 2)} for index in range(size)],
    }


def sources(shards: list[range], log: str) -> Iterator[dict[str, int]]:
    """Each range is a source of its own, as a file is; notes each sample that is read."""
    for shard in shards:
        for index in shard:
            with open(log, "a") as file:
                file.write(f"{index} ")
            yield {"x": index}


def stream(number: int, log: str = os.devnull, size: int = SIZE) -> Any:
    """The numbers up to a size in so many sources."""
    shards = [range(first * size // number, (first + 1) * size // number) for first in range(number)]
    made = datasets.IterableDataset.from_generator(sources, gen_kwargs={"shards": shards, "log": log})
    return made.with_format("torch")


def table(size: int = SIZE) -> Any:
    return datasets.Dataset.from_dict({"x": list(range(size))}).with_format("torch")


def settings(workers: int) -> dict[str, Any]:
    return {"num_workers": workers, "multiprocessing_context": FORK if workers else None}


def accelerator(**config: Any) -> Accelerator:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))


def numbers(loader: Any) -> list[list[int]]:
    return [batch["x"].tolist() for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


# ---- indexed ----


def indexed() -> list[Any]:
    found = []
    for workers in (0, 2):
        data = datasets.Dataset.from_dict(columns(10)).select_columns(["x", "text"]).with_format("torch")
        loader = accelerator().prepare(DataLoader(data, batch_size=2, **settings(workers)))
        found.append([(batch["x"].tolist(), batch["text"]) for batch in loader])
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_table_is_shared_like_any_indexed_data(ranks: int) -> None:
    for rank, (alone, with_workers) in enumerate(run_ranks(indexed, ranks)):
        starts = [2 * (step * ranks + rank) for step in range(-(-10 // (2 * ranks)))]
        wanted = [[index % 10 for index in (start, start + 1)] for start in starts]
        assert alone == [(indices, [f"text {index}" for index in indices]) for indices in wanted]
        assert with_workers == alone


# ---- streams: who reads what ----


def reading(number: int, folder: str, dispatch: bool) -> list[Any]:
    """For 0 and 2 workers: the batches of this rank, what metrics see, and how much this rank has read, in one pass."""
    found = []
    for workers in (0, 2):
        one = accelerator(dispatch_batches=dispatch)
        log = f"{folder}/{one.process_index}-{workers}"
        loader = one.prepare(DataLoader(stream(number, log, 24), batch_size=2, **settings(workers)))
        own, seen = [], []
        for batch in loader:
            own.append(batch["x"].tolist())
            seen += one.gather_for_metrics(batch["x"]).tolist()
        found.append((own, seen, len(Path(log).read_text().split()) if Path(log).exists() else 0))
    return found


@pytest.mark.parametrize(("ranks", "number"), [(1, 3), (2, 6), (3, 3), (3, 1)])
def test_each_rank_reads_its_own_sources(tmp_path: Path, ranks: int, number: int) -> None:
    """Fewer sources than ranks: each rank reads everything and keeps its part."""
    for results in zip(*run_ranks(reading, ranks, number, str(tmp_path), False), strict=True):
        assert sorted(index for own, _, _ in results for index in flat(own)) == list(range(24))
        assert [sorted(seen) for _, seen, _ in results] == [list(range(24))] * ranks
        assert [read for _, _, read in results] == [24 // ranks if number >= ranks else 24] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_dispatched_stream_is_read_by_the_first_rank_alone(tmp_path: Path, ranks: int) -> None:
    """Whose workers end with short batches, so that some steps have batches of different lengths."""
    for results in zip(*run_ranks(reading, ranks, 5, str(tmp_path), True), strict=True):
        assert [sorted(seen) for _, seen, _ in results] == [list(range(24))] * ranks
        assert [read for _, _, read in results] == [24] + [0] * (ranks - 1)


# ---- streams: epochs ----

EPOCHS = {
    "shuffled": lambda number: stream(number).shuffle(seed=3, buffer_size=5),
    "shuffled table": lambda number: table().to_iterable_dataset(num_shards=number).shuffle(seed=3, buffer_size=5),
    "taken": lambda number: stream(number).take(20).skip(2),
    "shuffled, then taken": lambda number: stream(number).shuffle(seed=3, buffer_size=5).take(20),
}


def epochs(number: int, workers: int) -> dict[str, Any]:
    """Two passes, and the second one again; for each what metrics see. With workers, of one kind: each pass forks."""
    found: dict[str, Any] = {}
    for kind in ["shuffled"] if workers else EPOCHS:
        build = EPOCHS[kind]
        for dispatch in (False, True):
            one = accelerator(dispatch_batches=dispatch)
            loader = one.prepare(DataLoader(build(number), batch_size=2, **settings(workers)))
            passes = []
            for again in (None, None, 1):
                if again is not None:
                    loader.set_epoch(again)
                passes.append([index for batch in loader for index in one.gather_for_metrics(batch)["x"].tolist()])
            found[f"{kind}, {dispatch=}"] = passes
    return found


@pytest.mark.parametrize(("ranks", "number", "workers"), [(2, 1, 2), (3, 2, 0), (2, 4, 0)])
def test_epochs(ranks: int, number: int, workers: int) -> None:
    results = run_ranks(epochs, ranks, number, workers)
    assert results == [results[0]] * ranks
    for kind, (first, second, again) in results[0].items():
        wanted = set(range(2, 20)) if kind.startswith("taken") else set(range(SIZE))
        assert second == again, kind
        assert (first == second) == kind.startswith("taken"), kind  # `take` without `shuffle` says: no other order
        assert len(set(first)) == len(first), kind
        # By sources of their own the ranks take from each of them, which is another choice; see the note of `explain`.
        if "taken" not in kind or number < ranks or "dispatch=True" in kind:
            assert set(first) <= wanted, kind
            assert len(first) == (18 if kind.startswith("taken") else 20 if "taken" in kind else SIZE), kind


def test_what_explain_says_of_taking_from_sources() -> None:
    from hasten.data.contract import describe

    loader: Any = prepare_data_loader(DataLoader(stream(4).take(9)), num_processes=2, process_index=0)
    whole: Any = prepare_data_loader(DataLoader(stream(4)), num_processes=2, process_index=0)
    # The numbers of a world of one are asked; the parts are those of the loader's own sources.
    loader.world = whole.world = type("Two", (), {"size": 2})()
    assert [note[:15] for note in describe(loader).notes] == ["Each rank reads", "`take` and `ski"]
    assert [note[:15] for note in describe(whole).notes] == ["Each rank reads"]


# ---- streams that are divided already ----


def divided(number: int, workers: int) -> list[Any]:
    from datasets.distributed import split_dataset_by_node

    found = []
    for dispatch in (None, False):
        one = accelerator(dispatch_batches=dispatch)
        data = split_dataset_by_node(stream(number), rank=one.process_index, world_size=one.num_processes)
        loader = one.prepare(DataLoader(data, batch_size=2, **settings(workers)))
        found.append(flat(numbers(loader)))
    return found


@pytest.mark.parametrize(("ranks", "number", "workers"), [(2, 4, 2), (3, 2, 0)])
def test_what_a_node_has_is_not_shared_again(ranks: int, number: int, workers: int) -> None:
    for parts in zip(*run_ranks(divided, ranks, number, workers), strict=True):
        assert sorted(flat(list(parts))) == list(range(SIZE))


def uneven_parts() -> list[int]:
    from datasets.distributed import split_dataset_by_node

    one = accelerator()
    data = split_dataset_by_node(stream(1), rank=one.process_index, world_size=2)
    seen: list[int] = []
    for batch in one.prepare(DataLoader(data, batch_size=2)):
        seen += one.gather_for_metrics(batch)["x"].tolist()
    return seen


def test_metrics_of_parts_that_end_with_different_lengths() -> None:
    assert [sorted(seen) for seen in run_ranks(uneven_parts, 2)] == [list(range(SIZE))] * 2


# ---- continuing ----

STREAMS = {
    "plain": stream,
    "table": lambda number: table().to_iterable_dataset(num_shards=number),
    "shuffled": lambda number: stream(number).shuffle(seed=3, buffer_size=5),
    "shuffled table": lambda number: table().to_iterable_dataset(num_shards=number).shuffle(seed=3, buffer_size=5),
    "mapped": lambda number: stream(number).map(lambda row: {"x": row["x"]}).filter(lambda row: row["x"] % 5 > 0),
    "taken": lambda number: stream(number).take(20).skip(2),
    "mixed": lambda number: datasets.interleave_datasets(
        [stream(number), stream(number)], probabilities=[0.5, 0.5], seed=1
    ),
    "mixed with shuffled": lambda number: datasets.concatenate_datasets(
        [stream(number), stream(number).shuffle(seed=1, buffer_size=4)]
    ),
}


def one_rank(kind: str, number: int, ranks: int, resume: str, workers: int = 0) -> Any:
    loader = DataLoader(STREAMS[kind](number), batch_size=2, **settings(workers))
    return prepare_data_loader(loader, num_processes=ranks, process_index=ranks - 1, resume=resume)


def rests(
    kind: str, number: int, ranks: int, resume: str, workers: int = 0, every: int = 1
) -> Iterator[tuple[Any, Any]]:
    """In the second epoch: what comes after a position in another process, and what came."""
    loader = one_rank(kind, number, ranks, resume, workers)
    numbers(loader)
    batches, states = [], []
    for batch in loader:
        batches.append(batch["x"].tolist())
        states.append(through_a_file(loader.state_dict()))
    for step, state in enumerate(states[:-1:every], start=0):
        step *= every
        again = one_rank(kind, number, ranks, resume, workers)
        again.load_state_dict(state)
        rest = numbers(again if resume == "position" else skip_first_batches(again, step + 1))
        if ranks > 1 and number < ranks and resume == "position":
            rest.pop()  # completed with the first samples after the interruption
            yield rest, batches[step + 1 : -1]
        else:
            yield rest, batches[step + 1 :]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("resume", ["position", "order"])
@pytest.mark.parametrize("kind", STREAMS)
def test_the_rest_of_an_epoch(kind: str, resume: str) -> None:
    for number, ranks in ((1, 1), (4, 1), (1, 2), (4, 2)):
        for rest, wanted in rests(kind, number, ranks, resume):
            assert rest == wanted, (number, ranks)


@pytest.mark.parametrize("resume", ["position", "order"])
def test_the_rest_of_an_epoch_with_workers(resume: str) -> None:
    for kind in ("plain", "shuffled table"):
        for rest, wanted in rests(kind, 4, 2, resume, workers=2, every=3):
            assert rest == wanted, kind


def left(loader: Any, steps: int) -> Any:
    """The position after a loop over it was left."""
    passing = iter(loader)
    for _ in range(steps):
        next(passing)
    passing.close()
    return through_a_file(loader.state_dict())


def test_a_loop_that_was_left_after_it_went_on_begins_anew() -> None:
    again = one_rank("plain", 2, 1, "position")
    again.load_state_dict(left(one_rank("plain", 2, 1, "position"), 4))
    assert next(iter(again))["x"].tolist() == [8, 9]
    assert again.iteration == 0
    assert flat(numbers(again)) == list(range(SIZE))


def test_a_stream_that_was_left_at_its_end_goes_to_the_next_epoch() -> None:
    state = left(one_rank("plain", 1, 3, "position"), 4)  # of 24 places for 23 samples
    again = one_rank("plain", 1, 5, "position")  # no whole number of its steps has been done
    again.load_state_dict(state)
    assert (numbers(again), again.iteration) == ([], 1)
    assert (len(numbers(again)), again.iteration) == (3, 2)


def test_nothing_is_read_twice_but_what_a_buffer_holds(tmp_path: Path) -> None:
    def read_after(shuffles: bool) -> int:
        log = tmp_path / str(shuffles)
        data = stream(4, str(log), 200)
        data = data.shuffle(seed=1, buffer_size=8) if shuffles else data
        build = lambda: prepare_data_loader(DataLoader(data, batch_size=4), resume="position")  # noqa: E731
        loader: Any = build()
        for step, _ in enumerate(loader):
            if step == 29:
                state = loader.state_dict()
                break
        again: Any = build()
        again.load_state_dict(state)
        log.unlink()
        assert len(numbers(again)) == 20
        return len(log.read_text().split())  # a source is read from its start

    assert read_after(shuffles=False) == 100
    assert read_after(shuffles=True) == 200


def saved_and_loaded(folder: str, resume: str, dispatch: bool, workers: int) -> list[Any]:
    """The rest of an epoch after a checkpoint, what it should be, and the next epoch."""
    runs = []
    for interrupted in (False, True):
        one = accelerator(dispatch_batches=dispatch, resume=resume)
        data = stream(4).shuffle(seed=3, buffer_size=5)
        loader = one.prepare(DataLoader(data, batch_size=2, **settings(workers)))
        if interrupted:
            one.load_state(folder)
            first = loader if resume == "position" else one.skip_first_batches(loader, 2)
            runs.append(numbers(first) + numbers(loader))
            continue
        numbers(loader)
        for step, _ in enumerate(loader):
            if step == 1:
                one.save_state(folder)
        loader.set_epoch(1)
        runs.append(numbers(loader)[2:] + numbers(loader))
    return runs


@pytest.mark.parametrize(
    ("ranks", "dispatch", "workers", "resume"),
    [(1, False, 0, "position"), (2, False, 2, "position"), (3, True, 2, "position"), (2, True, 0, "order")],
)
def test_a_checkpoint(tmp_path: Path, ranks: int, dispatch: bool, workers: int, resume: str) -> None:
    for run, resumed in run_ranks(saved_and_loaded, ranks, str(tmp_path / "ck"), resume, dispatch, workers):
        assert resumed == run
        assert len(run) >= 5


# ---- what is in a row ----


def listed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch of rows that are not tensors of one size."""
    return {
        key: torch.tensor([row[key] for row in rows]) if key == "x" else [row[key] for row in rows] for key in rows[0]
    }


def rows(dispatch: bool, workers: int) -> tuple[list[Any], list[Any]]:
    one = accelerator(dispatch_batches=dispatch)
    data = datasets.Dataset.from_dict(columns(12)).to_iterable_dataset(num_shards=6)
    batches, gathered = [], []
    for batch in one.prepare(DataLoader(data, batch_size=2, collate_fn=listed, **settings(workers))):
        gathered += one.gather_for_metrics({key: batch[key] for key in ("x", "text", "label")})["text"]
        batches.append({**batch, "x": batch["x"].tolist()})
    return batches, gathered


@pytest.mark.parametrize(("ranks", "dispatch", "workers"), [(1, True, 0), (2, False, 0), (3, True, 2)])
def test_every_type_of_column_arrives(ranks: int, dispatch: bool, workers: int) -> None:
    seen: dict[int, Any] = {}
    for batches, gathered in run_ranks(rows, ranks, dispatch, workers):
        assert sorted(gathered) == sorted(columns(12)["text"])
        for batch in batches:
            for row in zip(*batch.values(), strict=True):
                seen[row[0]] = dict(zip(batch, row, strict=True))
    wanted = columns(12)
    assert [seen[index] for index in range(12)] == [{key: wanted[key][index] for key in wanted} for index in range(12)]

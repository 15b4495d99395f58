import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hasten import Accelerator, DataLoaderConfiguration
from hasten.data.dispatch import DataLoaderDispatcher
from hasten.data.loader import prepare_data_loader
from hasten.world.process import start
from tests.data.scenarios import FORK, Numbers, SizedStream, Stream
from tests.ranks import RankError, run_ranks


def dispatched(loader: DataLoader[Any], **settings: Any) -> Any:
    start(cpu=True)
    return prepare_data_loader(loader, put_on_device=True, dispatch_batches=True, **settings)


# ---- which loaders are dispatched ----


def test_streams_whose_batches_are_moved_are_dispatched():
    def kind(loader: DataLoader[Any], **settings: Any) -> str:
        return type(prepare_data_loader(loader, **settings)).__name__

    stream, numbers = DataLoader(Stream()), DataLoader(Numbers())
    assert kind(stream, put_on_device=True) == "DataLoaderDispatcher"
    assert kind(stream) == kind(numbers, put_on_device=True) == "DataLoaderShard"
    assert kind(stream, put_on_device=True, dispatch_batches=False) == "DataLoaderShard"


# ---- what arrives ----


@dataclass
class Record:
    number: torch.Tensor
    text: str


class Words(IterableDataset[Any]):
    """Complete batches with everything that is no plain tensor, of other lengths each."""

    def __iter__(self) -> Iterator[Any]:
        for length in (3, 5, 4, 7):
            record = Record(torch.full((length,), length), "r" * length)
            yield {"x": torch.ones(length, 2), "names": ["n"] * length, "flag": True, "none": None, "record": record}


def words() -> list[Any]:
    loader = dispatched(DataLoader(Words(), batch_size=None))
    return [
        (
            len(batch["x"]),
            batch["names"],
            batch["flag"],
            batch["none"],
            batch["record"].text,
            len(batch["record"].number),
        )
        for batch in loader
    ]


def test_anything_arrives_whole():
    def batch(length: int) -> tuple[Any, ...]:
        return length, ["n"] * length, True, None, "r" * length, length

    assert run_ranks(words, 2) == [[batch(3), batch(4)], [batch(5), batch(7)]]
    assert words() == [batch(3), batch(5), batch(4), batch(7)]


class Point(NamedTuple):
    x: torch.Tensor
    labels: list[str]


def thing(number: int) -> dict[Any, Any]:
    """A batch of any structure; its sizes depend on its number."""
    length = (number * 7) % 5
    return {
        "number": number,
        3: torch.full((length, 2), number, dtype=torch.int16),
        "point": Point(torch.tensor(number + 1j), ["a"] * length),
        "record": Record(torch.zeros(length), f"text {number}"),
        "ragged": [torch.arange(i + length) for i in range(3)],
        "array": numpy.full((length, 3), number, dtype=numpy.float16),
        "nested": ((None, b"\x00", {"set": {number}}), [True, 1.5, ...]),
        "bits": torch.arange(length) % 2 == 0,
        "half": torch.full((1,), number, dtype=torch.bfloat16),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "large": torch.full((20_000 * (number % 3),), number),
    }


class Things(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return map(thing, range(self.size))


def as_it_is(batch: Any) -> Any:
    return batch


def described(value: Any) -> Any:
    """A structure with plain values in the place of arrays."""
    if isinstance(value, (torch.Tensor, numpy.ndarray)):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: described(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [described(each) for each in value]
    if isinstance(value, Record):
        return described(value.number), value.text
    return value


def things(size: int, read_ahead: bool) -> list[Any]:
    loader = dispatched(DataLoader(Things(size), batch_size=None, collate_fn=as_it_is), read_ahead=read_ahead)
    one_by_one = [described(batch) for batch in loader]  # their memory is used again
    together = list(loader)
    return [one_by_one, [described(batch) for batch in together]]


@pytest.mark.parametrize("read_ahead", [False, True])
@pytest.mark.parametrize(("ranks", "steps"), [(2, 12), (3, 8)])
def test_any_structure_and_any_sizes(ranks: int, steps: int, read_ahead: bool):
    for rank, found in enumerate(run_ranks(things, ranks, ranks * steps, read_ahead)):
        assert found == [[described(thing(step * ranks + rank)) for step in range(steps)]] * 2


def leftovers(size: int) -> list[Any]:
    loader = dispatched(DataLoader(Things(size), batch_size=None, collate_fn=as_it_is))
    return [[batch["number"] for batch in loader], loader.remainder]


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, [[0], [0], [0]]), (2, [[0], [1], [0]]), (5, [[0, 3], [1, 4], [2, 0]]), (6, [[0, 3], [1, 4], [2, 5]])],
)
def test_whole_batches_fewer_than_ranks_are_completed_with_the_first(size: int, expected: list[Any]):
    found = run_ranks(leftovers, 3, size)
    assert [numbers for numbers, _ in found] == expected


def collate(samples: list[int]) -> dict[str, Any]:
    return {"x": torch.tensor(samples), "name": [str(sample) for sample in samples], "scale": torch.tensor(2.0)}


def named(size: int) -> list[Any]:
    loader = dispatched(DataLoader(Stream(size), batch_size=2, collate_fn=collate))
    seen = [(batch["x"].tolist(), batch["name"], batch["scale"].item(), loader.end_of_dataloader) for batch in loader]
    return [*seen, loader.remainder]


def test_strings_are_divided_and_completed_like_tensors():
    assert run_ranks(named, 2, 7) == [
        [([0, 1], ["0", "1"], 2.0, False), ([4, 5], ["4", "5"], 2.0, True), 3],
        [([2, 3], ["2", "3"], 2.0, False), ([6, 0], ["6", "0"], 2.0, True), 3],
    ]


@pytest.mark.parametrize(("size", "remainder"), [(1, 1), (3, 3), (4, 0), (5, 1), (6, 0), (7, 3), (12, 0)])
def test_fewer_samples_than_a_step_needs(size: int, remainder: int):
    results = run_ranks(named, 2, size)
    assert [result[-1] for result in results] == [remainder] * 2
    steps = [first[0] + second[0] for first, second in zip(results[0][:-1], results[1][:-1], strict=True)]
    last = steps.pop()
    kept = last[:remainder] if remainder else last
    assert [index for step in steps for index in step] + kept == list(range(size))


@pytest.mark.parametrize("size", range(1, 9))
def test_fewer_samples_than_ranks(size: int):
    results = run_ranks(named, 3, size)
    *steps, last = zip(*(result[:-1] for result in results), strict=True)
    (remainder,) = {result[-1] for result in results}
    rows = [[index for part in step for index in part[0]] for step in (*steps, last)]
    assert len({len(part[0]) for part in last}) == 1
    samples = [index for row in rows for index in row]
    assert samples[:size] == list(range(size))
    assert samples[size:] == [index % min(size, 2) for index in range(len(samples) - size)]  # those of the first batch
    assert remainder == (0 if len(samples) == size else len(rows[-1]) - len(samples[size:]))


def nothing() -> list[Any]:
    return list(dispatched(DataLoader(Stream(0), batch_size=2)))


def test_no_samples_at_all():
    assert run_ranks(nothing, 2) == [[], []]


def only_rank_0_reads() -> int:
    class Counting(Stream):
        read = 0

        def __iter__(self) -> Iterator[int]:
            for number in super().__iter__():
                Counting.read += 1
                yield number

    list(dispatched(DataLoader(Counting(9), batch_size=2)))
    return Counting.read


def test_only_rank_0_reads():
    assert run_ranks(only_rank_0_reads, 3) == [9, 0, 0]


def with_workers() -> list[Any]:
    loader = DataLoader(Numbers(10), batch_size=2, num_workers=2, multiprocessing_context=FORK)
    shared = dispatched(loader)
    return [[batch.tolist() for batch in shared] for _ in range(2)]


def test_the_reader_may_have_workers():
    assert run_ranks(with_workers, 2) == [[[[0, 1], [4, 5], [8]]] * 2, [[[2, 3], [6, 7], [9]]] * 2]


class Mesh:
    mesh_dim_names = ("dp_shard", "tp")

    def size(self, dimension: int) -> int:
        return 2


def in_a_mesh() -> list[Any]:
    return [batch.tolist() for batch in dispatched(DataLoader(Stream(8), batch_size=2), torch_device_mesh=Mesh())]


def test_ranks_of_one_model_get_the_same_batch():
    assert run_ranks(in_a_mesh, 4) == [[[0, 1], [4, 5]]] * 2 + [[[2, 3], [6, 7]]] * 2


# ---- errors ----


class Broken(Stream):
    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        raise KeyError("page 6")


class Unopened(Stream):
    def __iter__(self) -> Iterator[int]:
        raise FileNotFoundError("no such data")


class Unsendable:
    def __reduce__(self) -> Any:
        raise TypeError("stays here")


def read_all(kind: str) -> list[Any]:
    loaders = {
        "broken": DataLoader(Broken(), batch_size=2),
        "unopened": DataLoader(Unopened(), batch_size=2),
        "unsendable": DataLoader(Stream(), batch_size=2, collate_fn=lambda samples: Unsendable()),
        "uncut": DataLoader(Stream(), batch_size=3, collate_fn=lambda samples: {"a"}),
    }
    return list(dispatched(loaders[kind], split_batches=kind == "uncut"))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("broken", "KeyError: 'page 6'"),
        ("unopened", "FileNotFoundError: no such data"),
        ("unsendable", "TypeError: stays here"),
        ("uncut", "split_batches=False"),
    ],
)
def test_the_readers_error_is_raised_on_every_rank(kind: str, text: str):
    with pytest.raises(RankError) as caught:
        run_ranks(read_all, 3, kind)
    assert sorted(caught.value.tracebacks) == [0, 1, 2]
    assert all(text in traceback for traceback in caught.value.tracebacks.values())


# ---- sizes ----


def lengths() -> list[Any]:
    def measure(size: int, **settings: Any) -> Any:
        loader = dispatched(
            DataLoader(SizedStream(11), batch_size=size, drop_last=settings.pop("drop", False)), **settings
        )
        return len(loader), len(list(loader)), loader.total_batch_size, loader.total_dataset_length

    return [measure(2), measure(2, drop=True), measure(4, split_batches=True)]


def test_lengths():
    assert run_ranks(lengths, 2) == [[(3, 3, 4, 11), (2, 2, 4, 11), (3, 3, 4, 11)]] * 2


def built_by_hand() -> list[Any]:
    start(cpu=True)
    loader = DataLoaderDispatcher(Stream(8), batch_size=2, skip_batches=1, iteration=2)
    return [[batch.tolist() for batch in loader] for _ in range(2)] + [loader.iteration]


def test_a_dispatcher_can_be_built_by_hand():
    assert run_ranks(built_by_hand, 2) == [[[[4, 5]], [[0, 1], [4, 5]], 4], [[[6, 7]], [[2, 3], [6, 7]], 4]]


def on_other_ranks(folder: str, steps: int | None) -> list[int]:
    """Some steps of a pass, from where the run before has ended, and where this one ends."""
    config = DataLoaderConfiguration(dispatch_batches=True, resume="position")
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    seen: list[int] = []
    loader = accelerator.prepare(DataLoader(range(23), batch_size=2, shuffle=True))
    if Path(folder, "state.bin").exists():
        loader.load_state_dict(torch.load(Path(folder, "state.bin")))
    torch.manual_seed(5)
    for number, batch in enumerate(loader, 1):
        seen += accelerator.gather_for_metrics(batch).tolist()
        if number == steps:
            if accelerator.is_main_process:
                torch.save(loader.state_dict(), Path(folder, "state.bin"))
            break
    accelerator.wait_for_everyone()
    return seen


def test_a_pass_goes_on_with_another_number_of_ranks(tmp_path: Path):
    seen: list[int] = []
    for ranks, steps in ((2, 2), (3, 1), (2, None)):
        seen += run_ranks(on_other_ranks, ranks, str(tmp_path), steps)[0]
    assert sorted(seen) == list(range(23))


class ByLists(Dataset[int]):
    """Gives whole batches only."""

    def __len__(self) -> int:
        return 7

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def on_after_two_steps(kind: str) -> list[Any]:
    config = DataLoaderConfiguration(dispatch_batches=True, resume="position")
    loaders = []
    for _ in range(2):
        source = DataLoader(range(7), batch_size=None) if kind == "single" else DataLoader(ByLists(), batch_size=1)
        loaders.append(Accelerator(cpu=True, dataloader_config=config).prepare(source))
    for number, _ in enumerate(loaders[0], 1):
        if number == 2:
            loaders[1].load_state_dict(loaders[0].state_dict())
    return [torch.as_tensor(batch).reshape(-1).tolist() for batch in loaders[1]]


@pytest.mark.parametrize("kind", ["single", "by lists"])
def test_the_first_batch_is_loaded_again_as_the_loader_does_it(kind: str):
    assert run_ranks(on_after_two_steps, 2, kind) == [[[4], [6]], [[5], [0]]]


# ---- samples that are no rows of an array ----


class Pictures(Numbers):
    """Another number of boxes in each."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((index % 5, 4), index), index


LISTED: dict[str, tuple[Any, Any]] = {
    "records": (
        lambda samples: [{"boxes": boxes, "n": number} for boxes, number in samples],
        lambda batch: [(item["boxes"], item["n"]) for item in batch],
    ),
    "pairs": (list, lambda batch: batch),
    "zipped": (lambda samples: tuple(zip(*samples, strict=True)), lambda batch: list(zip(*batch, strict=True))),
    "mapping": (
        lambda samples: {"boxes": [each[0] for each in samples], "n": torch.tensor([each[1] for each in samples])},
        lambda batch: list(zip(batch["boxes"], batch["n"].tolist(), strict=True)),
    ),
}


def listed() -> list[Any]:
    """What went wrong, over all combinations."""
    wrong = []
    for kind, (collate, samples_of) in LISTED.items():
        for size, batch_size in itertools.product((1, 2, 5, 7), (1, 2, 3)):
            accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
            loader = accelerator.prepare(DataLoader(Pictures(size), batch_size=batch_size, collate_fn=collate))
            seen: list[int] = []
            for batch in loader:
                samples = samples_of(batch)
                if any(boxes.tolist() != [[number] * 4] * (number % 5) for boxes, number in samples):
                    wrong.append(f"{kind} {size=} {batch_size=}: {samples}")
                seen += accelerator.gather_for_metrics([number for _, number in samples])
            if seen != list(range(size)):
                wrong.append(f"{kind} {size=} {batch_size=}: {seen}")
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_samples_in_lists_stay_whole_and_count_once(ranks: int):
    assert run_ranks(listed, ranks, timeout=60) == [[]] * ranks

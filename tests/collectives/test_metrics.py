import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hasten.collectives.metrics import gather_for_metrics
from tests.collectives.data import Counted, Record, message, start
from tests.ranks import run_ranks


def loader(remainder: int, end: bool = True) -> SimpleNamespace:
    return SimpleNamespace(end_of_dataloader=end, remainder=remainder)


def test_a_process_alone_gets_its_argument_back():
    for data in ([1, 2, 3], torch.arange(3), {"a": ["x", "y", "z"]}):
        assert gather_for_metrics(data, loader(2)) is data


# ---- every sample exactly once ----


def batches(rank: int, size: int, length: int, batch: int, even: bool) -> list[list[int]]:
    """The samples of one rank, in batches: the last global batch is completed from the beginning if `even`."""
    found = []
    for first in range(0, length, size * batch):
        whole = list(range(first, min(first + size * batch, length)))
        if even:
            whole += [index % length for index in range(size * batch - len(whole))]
        found.append(whole[rank * batch : (rank + 1) * batch])
    return found


def evaluate(length: int, batch: int, even: bool) -> list[Any]:
    world = start()
    remainder = length % (world.size * batch)
    own = batches(world.rank, world.size, length, batch, even)
    seen: dict[str, list[Any]] = {"tensor": [], "list": [], "mixed": [], "words": [], "object": []}
    for number, samples in enumerate(own):
        state = loader(remainder, end=number == len(own) - 1)
        words = [f"s{sample}" for sample in samples]
        if even:
            seen["tensor"] += gather_for_metrics({"x": [torch.tensor(samples)]}, state)["x"][0].tolist()
        seen["list"] += gather_for_metrics(words, state)
        mixed = gather_for_metrics({"x": torch.tensor(samples), "inner": {"words": words}}, state)
        seen["mixed"] += mixed["x"].tolist()
        seen["words"] += mixed["inner"]["words"]
        seen["object"] += [int(row) for row in gather_for_metrics(torch.tensor(samples), state, use_gather_object=True)]
    return list(seen.values())


@pytest.mark.parametrize(
    ("length", "batch", "size", "even"),
    [
        (9, 5, 2, True),
        (10, 5, 2, True),
        (11, 2, 3, True),
        (1, 2, 2, True),
        (13, 4, 4, True),
        (9, 5, 2, False),
        (11, 2, 3, False),
        (15, 4, 4, False),
    ],
)
def test_every_sample_counts_once(length: int, batch: int, size: int, even: bool):
    numbers = list(range(length))
    words = [f"s{number}" for number in numbers]
    for tensor, listed, mixed, mixed_words, objects in run_ranks(evaluate, size, length, batch, even):
        assert tensor == (numbers if even else [])
        assert (listed, mixed, mixed_words, objects) == (words, numbers, words, numbers)


# ---- forms ----


def forms() -> list[Any]:
    rank = start().rank
    end = loader(3)
    pair = torch.tensor([2 * rank, 2 * rank + 1])
    found = [
        gather_for_metrics(pair, None),
        gather_for_metrics(pair, loader(3, end=False)),
        gather_for_metrics(pair, loader(0)),
        gather_for_metrics(pair, end),
        gather_for_metrics((pair, [pair]), end)[1][0],
        gather_for_metrics(Record(pair, ()), end).value,
        gather_for_metrics(torch.tensor(rank), end),
    ]
    rest = [
        gather_for_metrics([] if rank else ["x"], end),
        gather_for_metrics([], end),
        gather_for_metrics({"n": rank, "t": torch.tensor([[1.0] * (1 + rank)]), "s": "text"}, None),
        gather_for_metrics([{"boxes": [0] * rank}], end),
    ]
    with Counted() as counted:
        gather_for_metrics(["x"], end)
    return [[each.tolist() for each in found], rest, len(counted.calls)]


def test_forms_of_data():
    for tensors, (ragged, empty, scalars, dicts), calls in run_ranks(forms, 2):
        assert tensors == [[0, 1, 2, 3]] * 3 + [[0, 1, 2]] * 3 + [[0, 1]]
        assert (ragged, empty) == (["x"], [])
        assert (scalars["n"], scalars["s"]) == ([0, 1], ["text", "text"])
        assert [row.tolist() for row in scalars["t"]] == [[1.0], [1.0, 1.0]]
        assert dicts == [{"boxes": []}, {"boxes": [0]}]
        assert calls == 1


def without_length() -> list[Any]:
    rank = start().rank
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.levelname)  # type: ignore[method-assign]
    logger = logging.getLogger("hasten.collectives.metrics")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        return [gather_for_metrics(torch.tensor([rank]), loader(-1)).tolist(), records]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def test_a_loader_without_length_leaves_all_and_says_so():
    assert run_ranks(without_length, 2) == [[[0, 1], ["INFO"]]] * 2


def wrong() -> list[str]:
    rank = start().rank
    found = [
        message(lambda: gather_for_metrics({"ab"[rank]: "x"}, None)),
        message(lambda: gather_for_metrics({"a": "x"} if rank else ["x"], None)),
        message(lambda: gather_for_metrics(torch.zeros(1 + rank), loader(1))),
        message(lambda: gather_for_metrics(torch.zeros(1) if rank else "text", loader(1))),
    ]
    try:
        gather_for_metrics(torch.zeros(1), SimpleNamespace(end_of_dataloader=True))  # type: ignore[arg-type]
    except AttributeError as error:
        found.append(str(error))
    return found


def test_no_error_is_swallowed_and_it_is_the_same_everywhere():
    first, second = run_ranks(wrong, 2)
    assert first == second
    assert "  rank 0: [\"'a'\"]\n  rank 1: [\"'b'\"]\n" in first[0]
    assert "  rank 0: list\n  rank 1: [\"'a'\"]\n" in first[1]
    assert "pad_across_processes" in first[2]
    assert "  rank 0: gather_for_metrics(of='objects') at test_metrics.py:" in first[3]
    assert "  rank 1: gather_for_metrics(of='tensors') at test_metrics.py:" in first[3]
    assert "remainder" in first[4]

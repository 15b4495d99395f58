"""`gather_for_metrics` over a prepared loader is the dataset, in order, whatever the loader and the results are."""

import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from hasten import Accelerator, DataLoaderConfiguration
from hasten.collectives.metrics import gather_for_metrics
from hasten.world.agreement import DistributedOperationException
from hasten.world.process import start
from tests.data.scenarios import Numbers
from tests.ranks import run_ranks


class Stream(IterableDataset[int]):
    def __init__(self, size: int, has_length: bool) -> None:
        self.size = size
        if has_length:
            self.__class__ = SizedStream

    def __iter__(self) -> Any:
        return iter(range(self.size))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.size


class Pair(NamedTuple):
    first: torch.Tensor
    second: list[torch.Tensor]


SIZES, BATCHES = (1, 2, 5, 6, 7, 12, 13), (1, 2, 3)


def results(form: str, batch: torch.Tensor) -> Any:
    words = [f"s{index}" for index in batch.tolist()]
    return {
        "tensor": batch,
        "dict": {"x": batch, "more": (batch[:, None],)},
        "named": Pair(batch, [batch * 2]),
        "objects": words,
        "mapping of both": {"x": batch, "words": words},
    }[form]


def numbers(form: str, found: Any) -> list[int]:
    if form == "tensor":
        return list(found.tolist())
    if form == "dict":
        assert found["more"][0].flatten().tolist() == found["x"].tolist()
        return list(found["x"].tolist())
    if form == "named":
        assert type(found) is Pair
        assert (found.second[0] // 2).tolist() == found.first.tolist()
        return list(found.first.tolist())
    if form == "objects":
        return [int(word[1:]) for word in found]
    assert found["words"] == [f"s{index}" for index in found["x"].tolist()]
    return list(found["x"].tolist())


FORMS = ["tensor", "dict", "named", "objects", "mapping of both"]


def evaluate(kind: str) -> list[str]:
    """What went wrong, over all combinations."""
    wrong = []
    flags = itertools.product((False, True), (False, True), (False, True), SIZES, BATCHES)
    for number, (split, dispatch, drop, size, batch) in enumerate(flags):
        config = DataLoaderConfiguration(split_batches=split, dispatch_batches=dispatch)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        ranks = accelerator.num_processes
        data: Any = Numbers(size) if kind == "index" else Stream(size, has_length=kind == "sized stream")
        per_step = batch * ranks
        loader = accelerator.prepare(DataLoader(data, batch_size=per_step if split else batch, drop_last=drop))
        form = FORMS[number % len(FORMS)]
        seen: list[int] = []
        for each in loader:
            seen += numbers(form, accelerator.gather_for_metrics(results(form, each)))
        wanted = list(range(size // per_step * per_step if drop else size))
        if seen != wanted:
            wrong.append(f"{split=} {dispatch=} {drop=} {size=} {batch=} {form}: {seen}")
    return wrong


def uneven() -> list[Any]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    found = []
    for size, form in itertools.product((12, 23), FORMS):
        loader = accelerator.prepare(DataLoader(Numbers(size), batch_size=4))
        seen: list[int] = []
        try:
            for each in loader:
                seen += numbers(form, accelerator.gather_for_metrics(results(form, each)))
        except DistributedOperationException as error:
            seen = [str(error)]  # type: ignore[list-item]
        found.append(seen)
    return found


def test_ends_of_different_lengths() -> None:
    """With 3 ranks and batches of 4, 23 samples leave 4, 4 and 3 for the last step."""
    first, second, third = run_ranks(uneven, 3, timeout=60)
    assert first[:5] == second[:5] == [list(range(12))] * 5
    assert first[5:] == second[5:] == third[5:] == [list(range(23))] * 5


@pytest.mark.parametrize("kind", ["index", "sized stream", "stream"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_it_is_the_dataset(ranks: int, kind: str) -> None:
    assert run_ranks(evaluate, ranks, kind, timeout=120) == [[]] * ranks


def uneven_on_a_device() -> tuple[str, list[int]]:
    from tests.simulated_device import install

    install("npu")
    loader = SimpleNamespace(end_of_dataloader=True, remainder=0, has_uneven_rows=True)
    rank = start(cpu=True).rank
    found = gather_for_metrics({"x": torch.full((rank + 1,), rank).to("npu")}, loader)
    return str(found["x"].device), found["x"].tolist()


def test_what_has_different_lengths_comes_back_to_the_device() -> None:
    assert run_ranks(uneven_on_a_device, 2, fresh=True) == [("npu:0", [0, 1, 1])] * 2

"""Streams that keep their place themselves are continued without reading what is behind."""

import copy
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from hasten.data.loader import prepare_data_loader
from hasten.world.context import CONTEXT
from tests.data.test_resume import through_a_file
from tests.ranks import run_ranks


class Tape(IterableDataset[int]):
    """Counts what is read from it, and knows its place."""

    def __init__(self, size: int = 40) -> None:
        self.size = size
        self.place: dict[str, list[int]] = {"at": [0]}
        self.read = 0

    def __iter__(self) -> Any:
        for index in range(self.place["at"][0], self.size):
            self.place["at"][0] = index + 1
            self.read += 1
            yield index
        self.place = {"at": [0]}

    def state_dict(self) -> dict[str, Any]:
        return self.place  # the live object, not a copy

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state


class CopyingTape(Tape):
    """What torchdata asks for: it sends the state away later."""

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.place)


def prepared(ranks: int = 1, rank: int = 0, resume: str = "position", **options: Any) -> Any:
    loader = DataLoader(Tape(), batch_size=3, **options)
    return prepare_data_loader(loader, num_processes=ranks, process_index=rank, resume=resume)


def tape(loader: Any) -> Tape:
    found: Tape = getattr(loader.dataset, "dataset", loader.dataset)
    return found


def states_of(loader: Any) -> tuple[list[list[int]], list[Any]]:
    batches, states = [], []
    for batch in loader:
        batches.append(batch.tolist())
        states.append(through_a_file(loader.state_dict()))
    return batches, states


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_rest_is_all_that_is_read(ranks):
    batches, states = states_of(prepared(ranks))
    for number, state in enumerate(states[:-1]):
        again = prepared(ranks)
        again.load_state_dict(copy.deepcopy(state))
        rest = [batch.tolist() for batch in again]
        whole = rest[:-1] == batches[number + 1 : -1] and rest[-1][:1] == batches[-1][:1]
        assert whole, number
        assert tape(again).read == 40 - (number + 1) * 3 * ranks
        assert [batch.tolist() for batch in again] == batches  # the next epoch


def test_on_another_number_of_ranks():
    _, states = states_of(prepared(2))
    for ranks in (1, 3):
        seen: list[int] = []
        loaders = [prepared(ranks, rank) for rank in range(ranks)]
        for loader in loaders:
            loader.load_state_dict(copy.deepcopy(states[2]))
        for batches in zip(*loaders, strict=True):
            seen += [index for batch in batches for index in batch.tolist()]
        assert seen[:22] == list(range(18, 40))
        assert tape(loaders[0]).read == 22


def test_order_is_enough_with_the_same_skip():
    from hasten.data.skip import skip_first_batches

    _, states = states_of(prepared())
    for skip in (4, 5):
        again = prepared(resume="order")
        again.load_state_dict(copy.deepcopy(states[3]))
        assert next(iter(skip_first_batches(again, skip))).tolist()[0] == skip * 3
    again = prepared(resume="order")
    again.load_state_dict(copy.deepcopy(states[3]))
    list(skip_first_batches(again, 4))
    assert tape(again).read == 40 - 12


def test_without_a_state_it_says_that_it_reads(caplog):
    class Plain(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(40))

    CONTEXT.said.discard("a stream is skipped by reading")
    loader: Any = prepare_data_loader(DataLoader(Plain(), batch_size=3), resume="position")
    _, states = states_of(loader)
    for _ in range(2):
        again: Any = prepare_data_loader(DataLoader(Plain(), batch_size=3), resume="position")
        again.load_state_dict(states[3])
        assert next(iter(again)).tolist() == [12, 13, 14]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("4 batches of a stream are read and dropped to go on after them")


def dispatched(folder: str) -> tuple[list[int], int]:
    from hasten import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(resume="position"))
    loader = accelerator.prepare(DataLoader(Tape(), batch_size=3))
    for number, _ in enumerate(loader):
        if number == 2:
            accelerator.save_state(folder)
    again = accelerator.prepare(DataLoader(Tape(), batch_size=3))
    accelerator.free_memory()
    again = accelerator.prepare(DataLoader(Tape(), batch_size=3))
    accelerator.load_state(folder)
    return [index for batch in again for index in batch.tolist()], again.dataset.read


def test_dispatched_streams(tmp_path):
    (first, read), (second, _) = run_ranks(dispatched, 2, str(tmp_path / "ck"))
    assert sorted({*first, *second}) == list(range(18, 40))
    assert read == 22


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_of_the_user(workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def build() -> Any:
        loader = stateful(CopyingTape(), batch_size=3, num_workers=workers)
        return prepare_data_loader(loader, resume="position")

    batches, states = states_of(build())
    for number in (0, 5, len(states) - 4):
        again = build()
        again.load_state_dict(copy.deepcopy(states[number]))
        assert [batch.tolist() for batch in again] == batches[number + 1 :]
        assert [batch.tolist() for batch in again] == batches

import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

from hasten.data.loader import prepare_data_loader
from hasten.data.resume import ENDING, IDLE, LEFT, RUNNING, Progress, Start
from hasten.data.skip import skip_first_batches
from hasten.world.process import start
from tests.data.scenarios import FORK, Numbers, generator
from tests.ranks import run_ranks

SIZE, BATCH, EPOCHS = 10, 3, 3


class Augmented(Numbers):
    """Samples that are drawn from every generator of the process."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, torch.rand(()).item(), random.random(), numpy.random.rand()])


class SometimesAugmented(Numbers):
    """Only the last samples are drawn, and each from another generator."""

    def __getitem__(self, index: int) -> Any:
        draws = {7: lambda: torch.rand(()).item(), 8: random.random, 9: numpy.random.rand}
        return torch.tensor([index, draws.get(index, lambda: 0.0)()])


class Noisy(Numbers):
    """Normal numbers come in pairs: every second sample takes the one in reserve, and draws nothing."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, numpy.random.randn()])


class ShuffledStream(IterableDataset[int]):
    def __init__(self, own: torch.Generator | None = None) -> None:
        self.generator = own

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(SIZE, generator=self.generator).tolist()


class DrawingStream(IterableDataset[Any]):
    """Each sample is drawn from torch's generator when it is read."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(SIZE):
            yield torch.rand(())


class ShuffledBatches:
    """A batch sampler that draws from Python's and numpy's generators."""

    def __len__(self) -> int:
        return -(-SIZE // BATCH)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(SIZE))
        random.shuffle(order)
        numpy.random.shuffle(order)
        return (order[first : first + BATCH] for first in range(0, SIZE, BATCH))


class Lazy(DataLoader[Any]):
    """A loader class that asks for its first indices when its first batch is asked for."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


def indexed(data: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(SIZE) if data is None else data, **{"batch_size": BATCH, **options})


def random_sampler(**options: Any) -> RandomSampler:
    return RandomSampler(range(SIZE), **options)


WORKERS = {"num_workers": 2, "multiprocessing_context": FORK}
SEEDABLE = {"use_seedable_sampler": True, "data_seed": 5}
DISPATCH = {"dispatch_batches": True, "put_on_device": True}

KINDS: dict[str, tuple[Callable[[], DataLoader[Any]], dict[str, Any]]] = {
    "sequential": (lambda: indexed(), {}),
    "shuffle": (lambda: indexed(shuffle=True), {}),
    "shuffle, generator": (lambda: indexed(shuffle=True, generator=generator(1)), {}),
    "sampler's generator": (lambda: indexed(sampler=random_sampler(generator=generator(1))), {}),
    "two permutations": (lambda: indexed(sampler=random_sampler(num_samples=18, generator=generator(1))), {}),
    "weighted": (lambda: indexed(sampler=WeightedRandomSampler([1.0] * SIZE, 14)), {}),
    "seedable": (lambda: indexed(shuffle=True), SEEDABLE),
    "batch sampler": (lambda: DataLoader(Numbers(SIZE), batch_sampler=ShuffledBatches()), {}),
    "augmented": (lambda: indexed(Augmented(SIZE), shuffle=True), {}),
    "sometimes augmented": (lambda: indexed(SometimesAugmented(SIZE)), {}),
    "sometimes augmented, shuffled": (lambda: indexed(SometimesAugmented(SIZE), shuffle=True), {}),
    "noisy": (lambda: indexed(Noisy(SIZE), batch_size=1), {}),
    "own class": (lambda: Lazy(Augmented(SIZE), batch_size=BATCH, shuffle=True), {}),
    "unbatched": (lambda: indexed(batch_size=None, shuffle=True), {}),
    "stream": (lambda: DataLoader(ShuffledStream(), batch_size=BATCH), {}),
    "stream, generator": (lambda: DataLoader(ShuffledStream(generator(1)), batch_size=BATCH), {}),
    "dispatch": (lambda: DataLoader(ShuffledStream(), batch_size=BATCH), DISPATCH),
    "dispatch, shuffle": (lambda: indexed(Augmented(SIZE), shuffle=True), DISPATCH),
}
WITH_WORKERS: dict[str, tuple[Callable[[], DataLoader[Any]], dict[str, Any]]] = {
    "shuffle": (lambda: indexed(shuffle=True, **WORKERS), {}),
    "permutations": (lambda: indexed(sampler=random_sampler(num_samples=18, generator=generator(1)), **WORKERS), {}),
    "persistent": (lambda: indexed(shuffle=True, persistent_workers=True, **WORKERS), {}),
    "stream": (lambda: DataLoader(ShuffledStream(), batch_size=BATCH, **WORKERS), {}),
}


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def random_states() -> Any:
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()


def put_back(states: Any) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])


def body(batch: Any) -> Any:
    """What a training step does: it draws, too."""
    sample = batch.tolist() if isinstance(batch, torch.Tensor) else batch
    return sample, torch.rand(()).item(), random.random(), numpy.random.rand()


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def run_with_checkpoints(build: Callable[[], Any], settings: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """What every step of an uninterrupted run saw, and checkpoints in the body of each step and after each epoch."""
    seed_all(7 + start(cpu=True).rank)
    loader: Any = prepare_data_loader(build(), rng_types=["generator"], **settings)
    log: list[Any] = []
    checkpoints = []

    def save(epoch: int, step: int | None) -> None:
        checkpoints.append((epoch, step, len(log), through_a_file(loader.state_dict()), random_states()))

    for epoch in range(EPOCHS):
        for step, batch in enumerate(loader):
            log.append(body(batch))
            save(epoch, step)
        save(epoch, None)
    return log, checkpoints


def resume(build: Callable[[], Any], settings: dict[str, Any], checkpoint: Any, skip: bool) -> list[Any]:
    """What the steps of another process see that starts from a checkpoint, by `skip_first_batches` or by position."""
    epoch, step, _, state, states = checkpoint
    seed_all(99 + start(cpu=True).rank)
    torch.rand(3)
    loader: Any = prepare_data_loader(build(), rng_types=["generator"], use_stateful_dataloader=not skip, **settings)
    loader.load_state_dict(state)
    put_back(states)
    log = []
    if step is not None and (skip or state["status"] == RUNNING):
        first = skip_first_batches(loader, step + 1) if skip else loader
        log += [body(batch) for batch in first]
    for _ in range(epoch + 1, EPOCHS):
        log += [body(batch) for batch in loader]
    return log


def differences(build: Callable[[], Any], settings: dict[str, Any], every: int = 1) -> list[str]:
    log, checkpoints = run_with_checkpoints(build, settings)
    wrong = []
    for number, checkpoint in enumerate(checkpoints[:: every or 1]):
        for skip in (True, False):
            if resume(build, settings, checkpoint, skip) != log[checkpoint[2] :]:
                wrong.append(f"{number}: epoch {checkpoint[0]}, step {checkpoint[1]}, {'skip' if skip else 'position'}")
    return wrong


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_sees_what_an_uninterrupted_one_sees(kind: str):
    assert differences(*KINDS[kind]) == []


@pytest.mark.parametrize("kind", WITH_WORKERS)
def test_also_with_workers(kind: str):
    assert differences(*WITH_WORKERS[kind], every=4) == []


def all_differences() -> dict[str, list[str]]:
    return {kind: differences(*case, every=3) for kind, case in KINDS.items()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_also_on_several_ranks(ranks: int):
    for result in run_ranks(all_differences, ranks, timeout=80):
        assert {kind: wrong for kind, wrong in result.items() if wrong} == {}


# ---- what a state says ----


def shuffled(**settings: Any) -> Any:
    return prepare_data_loader(indexed(shuffle=True), num_processes=2, process_index=0, **settings)


def test_the_position_is_right_in_the_body_although_the_next_batch_is_there():
    loader = shuffled()
    states = [loader.state_dict()]
    for _ in loader:
        states.append(loader.state_dict())
    states.append(loader.state_dict())
    found = [(state["iteration"], state["status"], state["batches"], state["samples"]) for state in states]
    assert found == [(0, IDLE, 0, 0), (0, RUNNING, 1, 6), (0, ENDING, 2, 10), (1, IDLE, 0, 0)]


def test_a_skipping_loader_moves_the_position_of_its_original():
    loader = shuffled()
    for _ in skip_first_batches(loader, 1):
        assert loader.state_dict()["batches"] == 2
    assert loader.state_dict()["iteration"] == 1


def test_a_loop_that_was_left_begins_anew_unless_it_is_told_to_skip():
    loader = prepare_data_loader(indexed(shuffle=True))
    torch.manual_seed(1)
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 2:
            break
    state, after = loader.state_dict(), torch.get_rng_state()
    assert (state["status"], state["batches"]) == (LEFT, 2)
    uninterrupted = [batch.tolist() for batch in loader]

    again = prepare_data_loader(indexed(shuffle=True))
    again.load_state_dict(state)
    torch.set_rng_state(after)
    assert [batch.tolist() for batch in again] == uninterrupted
    again.load_state_dict(state)
    rest = [batch.tolist() for batch in skip_first_batches(again, 2)]
    assert sorted(index for batch in seen + rest for index in batch) == list(range(SIZE))


def test_a_position_is_forgotten_if_another_epoch_is_chosen():
    loader = prepare_data_loader(indexed(shuffle=True))
    for _ in loader:
        state = loader.state_dict()
        break
    for epoch, drawn in ((0, False), (4, True)):
        again: Any = prepare_data_loader(indexed(shuffle=True))
        again.load_state_dict(state)
        again.set_epoch(epoch)
        before = torch.get_rng_state()
        assert len(list(again)) == 4
        assert torch.equal(before, torch.get_rng_state()) != drawn
        assert again.iteration == epoch + 1


def test_the_end_of_an_epoch_can_be_named_in_two_ways():
    loader = prepare_data_loader(indexed(shuffle=True))
    for _ in loader:
        state = loader.state_dict()
    assert state["status"] == ENDING
    again: Any = prepare_data_loader(indexed(shuffle=True))
    again.load_state_dict(state)
    before = torch.get_rng_state()
    assert list(skip_first_batches(again, 4)) == []  # all of the old epoch
    assert torch.equal(before, torch.get_rng_state())
    assert again.iteration == 1
    again.load_state_dict(state)
    assert len(list(again)) == 4  # the next epoch
    assert again.iteration == 2


def test_seeds_are_restored():
    loader: Any = prepare_data_loader(indexed(shuffle=True), use_seedable_sampler=True, data_seed=11)
    list(loader)
    again: Any = prepare_data_loader(indexed(shuffle=True), use_seedable_sampler=True, data_seed=12)
    again.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in loader]


@pytest.mark.parametrize("state", [{}, {"iteration": 1, "generators": []}, {"generators": [torch.zeros(1)]}])
def test_states_of_something_else(state: dict[str, Any]):
    loader: Any = prepare_data_loader(indexed(shuffle=True, generator=generator(1)))
    with pytest.raises(ValueError, match="not the state of a loader like this one"):
        loader.load_state_dict(state)


def test_a_state_is_not_changed_by_going_on():
    loader = prepare_data_loader(indexed(shuffle=True))
    for number, _ in enumerate(loader):
        if number == 0:
            state = loader.state_dict()
            kept = through_a_file(state)
    assert state["batches"] == kept["batches"] == 1
    assert torch.equal(state["order"]["torch"], kept["order"]["torch"])


@pytest.mark.parametrize("settings", [{}, DISPATCH])
def test_a_stream_that_draws_continues_if_the_loop_does_not_draw(settings: dict[str, Any]):
    def run(state: Any = None, states: Any = None) -> Any:
        torch.manual_seed(3)
        loader: Any = prepare_data_loader(DataLoader(DrawingStream(), batch_size=BATCH), **settings)
        if state is not None:
            loader.load_state_dict(state)
            torch.set_rng_state(states)
        log, saved = [], []
        for batch in loader if state is None else skip_first_batches(loader, state["batches"]):
            log.append(batch.tolist())
            saved.append((loader.state_dict(), torch.get_rng_state()))
        return log, saved

    log, saved = run()
    for number, checkpoint in enumerate(saved, 1):
        assert run(*checkpoint)[0] == log[number:]


@pytest.mark.parametrize("kind", ["shuffle", "own class", "stream"])
def test_later_passes_are_as_fast_as_ever(kind: str):
    build, settings = KINDS[kind]
    loader: Any = prepare_data_loader(build(), **settings)
    for _ in loader:
        state = loader.state_dict()
        break
    loader.load_state_dict({**state, "status": RUNNING})
    assert len(list(loader)) == 4
    assert type(iter(loader.indices)) is type(iter(loader.batch_sampler))


def test_progress_between_epochs():
    progress = Progress(iteration=3)
    other = Progress()
    other.load(progress.save())
    assert (other.iteration, other.pending) == (3, None)
    assert other.take_pending(2, None) == Start(0, 2)

"""Runs that are killed and resumed again and again, each time on another number of ranks: each sample of each epoch counts once."""

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from hasten import Accelerator, DataLoaderConfiguration, ProjectConfiguration
from hasten.world import process
from tests.checkpoint import crash
from tests.data.scenarios import Numbers, generator
from tests.ranks import RankError, run_ranks

SIZE, BATCH, EPOCHS = 61, 2, 4


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(SIZE))


LOADERS = {
    "shuffled": lambda: DataLoader(Numbers(SIZE), batch_size=BATCH, shuffle=True),
    "with a generator": lambda: DataLoader(Numbers(SIZE), batch_size=BATCH, shuffle=True, generator=generator(3)),
    "seedable": lambda: DataLoader(Numbers(SIZE), batch_size=BATCH, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=BATCH),
    "dispatched stream": lambda: DataLoader(Stream(), batch_size=BATCH),
}


class History:
    """The samples of each epoch, as all ranks together have seen them."""

    def __init__(self) -> None:
        self.epochs: list[list[int]] = [[] for _ in range(EPOCHS)]

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


def train(folder: str, kind: str, every: int, end: tuple[int, int, bool] | None) -> tuple[list[list[int]], int]:
    """Train from the newest checkpoint on; `end`: the rank that is killed, after how many steps, and whether while it saves."""
    config = DataLoaderConfiguration(
        resume="position",
        use_seedable_sampler=kind == "seedable",
        data_seed=5,
        dispatch_batches=kind.startswith("dispatched"),
    )
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, dataloader_config=config, project_config=project)
    loader, history, steps = accelerator.prepare(LOADERS[kind]()), History(), 0
    accelerator.register_for_checkpointing(history)
    if any(Path(folder, "checkpoints").glob("checkpoint_*")):
        accelerator.load_state()
    for epoch in range(loader.iteration, EPOCHS):
        for batch in loader:
            history.epochs[epoch] += accelerator.gather_for_metrics(batch).tolist()
            steps += 1
            saves = steps % every == 0
            dies = end is not None and end[0] == process.start().rank and steps >= end[1]
            if dies and end is not None and not end[2]:
                os.kill(os.getpid(), signal.SIGKILL)
            if dies and saves:  # at one of the changes of the disk that a save makes, or after it
                crash.watch(random.Random(steps).randint(1, 12))
            if saves:
                accelerator.save_state()
            if dies and saves:
                os.kill(os.getpid(), signal.SIGKILL)
    return history.epochs, steps


def many_deaths(folder: Path, kind: str, deaths: int, seed: int) -> None:
    draw = random.Random(seed)
    died = number = 0
    while died < deaths:
        number += 1
        run = folder / str(number)
        finished = False
        while not finished:
            ranks = draw.randint(1, 4)
            end = (draw.randrange(ranks), draw.randint(1, 25), draw.random() < 0.5) if died < deaths else None
            try:
                epochs, _ = run_ranks(train, ranks, str(run), kind, draw.randint(1, 4), end, timeout=60)[0]
                finished = True
            except RankError as error:
                if f"signal {int(signal.SIGKILL)} (Killed)" not in str(error):
                    raise
                died += 1
        for epoch in epochs:
            assert sorted(epoch) == list(range(SIZE)), (kind, number)


@pytest.mark.parametrize("kind", LOADERS)
def test_killed_runs_see_every_sample_once(tmp_path: Path, kind: str) -> None:
    many_deaths(tmp_path, kind, 2, 1)


@pytest.mark.full
@pytest.mark.parametrize("kind", LOADERS)
def test_runs_that_are_killed_very_often_see_every_sample_once(tmp_path: Path, kind: str) -> None:
    many_deaths(tmp_path, kind, 40, 2)

"""A run that saves every 5 steps is killed at random moments: it goes on from a complete checkpoint, to the bit."""

import os
import random
import signal
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator, ProjectConfiguration
from hasten.checkpoint import retention, store
from tests.ranks import RankError, run_ranks

STEPS, EVERY, EPOCH = 45, 5, 12  # an epoch is no multiple of what is saved
LONGEST = 0.8  # seconds from the beginning to a kill; most runs get two or three checkpoints further


class History:
    """The loss and a checksum of the parameters after each step."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, int]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def train(folder: str, victims: tuple[int, ...] = (), delay: float = 0.0) -> list[tuple[float, int]]:
    """Train from the newest checkpoint on; the victims are killed some seconds after that began."""
    torch.set_num_threads(1)
    torch.manual_seed(4)
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    data = TensorDataset(torch.randn(2 * EPOCH * accelerator.num_processes, 6))
    net = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Dropout(0.3), torch.nn.Tanh(), torch.nn.Linear(9, 6))
    adam = torch.optim.AdamW(net.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(adam, 7, gamma=0.9)
    model, optimizer, loader, scheduler = accelerator.prepare(
        net, adam, DataLoader(data, batch_size=2, shuffle=True), schedule
    )
    history = History()
    accelerator.register_for_checkpointing(history)
    accelerator.wait_for_everyone()
    if accelerator.process_index in victims:
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    if retention.numbered(retention.folder_of_all(folder)):
        accelerator.load_state()
        assert checksum(net) == history.steps[-1][1]
    while len(history.steps) < STEPS:
        for (batch,) in accelerator.skip_first_batches(loader, len(history.steps) % EPOCH):
            loss = functional.mse_loss(model(batch), batch)
            accelerator.backward(loss)
            for item in (optimizer, scheduler):
                item.step()
            optimizer.zero_grad()
            history.steps.append((float(accelerator.reduce(loss.detach(), "mean")), checksum(net)))
            if len(history.steps) % EVERY == 0:
                accelerator.save_state()
            if len(history.steps) == STEPS:
                break
    if accelerator.process_index in victims:
        timer.cancel()
    return history.steps


def checksum(net: torch.nn.Module) -> int:
    value = 0
    for each in net.state_dict().values():
        value = zlib.crc32(each.numpy().tobytes(), value)
    return value


def newest(folder: Path) -> list[tuple[float, int]]:
    """What the newest complete checkpoint says of the steps before it, whose files must all be whole."""
    place = retention.newest(retention.folder_of_all(folder))
    store.verify(store.resolve(place), checksums=True)
    steps: list[tuple[float, int]] = torch.load(place / "custom_checkpoint_0.pkl")["steps"]
    assert len(steps) == EVERY * (retention.number_of(place) + 1)
    return steps


def kill_again_and_again(base: Path, ranks: int, kills: int, seed: int) -> None:
    draw = random.Random(seed)
    whole = run_ranks(train, ranks, str(base / "whole"), timeout=60)[0]
    assert len(whole) == STEPS
    run, killed, reached = 0, 0, 0
    while True:
        folder = base / f"run_{run}"
        victims = draw.choice([(draw.randrange(ranks),), tuple(range(ranks))]) if killed < kills else ()
        try:
            found = run_ranks(train, ranks, str(folder), victims, draw.uniform(0, LONGEST), fresh=True, timeout=60)
        except RankError as error:
            assert "the process died: signal 9" in str(error)  # noqa: PT017
            killed += 1
            if retention.numbered(retention.folder_of_all(folder)):
                there = newest(folder)
                assert there == whole[: len(there)]
                assert len(there) >= reached, "a step back"
                reached = len(there)
            else:
                assert reached == 0
            continue
        assert all(each == whole for each in found)
        if killed == kills:
            return
        run, reached = run + 1, 0


@pytest.mark.parametrize(
    ("ranks", "kills"),
    [
        (2, 5),
        (3, 5),
        pytest.param(2, 150, marks=pytest.mark.full, id="2-many"),
        pytest.param(3, 150, marks=pytest.mark.full, id="3-many"),
    ],
)
def test_a_run_that_is_killed_goes_on_to_the_bit(tmp_path, ranks, kills):
    kill_again_and_again(tmp_path, ranks, kills, seed=ranks)

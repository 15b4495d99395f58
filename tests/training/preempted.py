"""A training run in which everything draws and depends on the step before; it can be interrupted by a signal and continued.

As a program, `python -m tests.training.preempted FOLDER [rank:step:signal]`: rank 0 prints what `train` returns as JSON.
"""

import json
import os
import signal
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from hasten import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin, ProjectConfiguration
from hasten.training import preemption
from hasten.utils import set_seed
from tests.checkpoint.objects import Counter
from tests.plain import TinyDataset, loss_of

SIGNALS = ("SIGTERM", "SIGUSR1")
EPOCHS, SAMPLES, BATCH = 2, 40, 2


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def train(
    folder: str, losses: list[str], sharded: bool = False, when: tuple[int, int, str] | None = None
) -> dict[str, Any]:
    """Train, going on from the newest checkpoint if there is one.

    Args:
        folder: of the run.
        losses: gets every loss, exactly.
        sharded: divide the parameters over the ranks.
        when: the rank that gets a signal, after how many micro-batches, and the signal.
    """
    preemption.PERIOD = 0.0  # agree at every boundary, so that all ranks stop at the first one
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, save_on_signal=SIGNALS)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        project_config=project,
        dataloader_config=DataLoaderConfiguration(resume="position"),
        fsdp_plugin=FullyShardedDataParallelPlugin() if sharded else None,
    )
    set_seed(5)
    models = net(), net()
    optimizers = torch.optim.AdamW(models[0].parameters(), lr=0.01), torch.optim.SGD(models[1].parameters(), lr=0.01)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    loader, held_out = DataLoader(TinyDataset(SAMPLES), BATCH, shuffle=True), DataLoader(TinyDataset(8, seed=1), 2)
    first, second, adam, sgd, *schedules, loader, held_out = accelerator.prepare(
        *models, *optimizers, *schedules, loader, held_out
    )
    count = Counter()  # it counts behind everything else
    set_seed(7, device_specific=True)
    accelerator.register_for_checkpointing(count)
    if os.path.isdir(os.path.join(folder, "checkpoints")):
        accelerator.load_state("latest")
    begun = count.value
    for _ in range(loader.iteration, EPOCHS):
        for batch in loader:
            with accelerator.accumulate(first, second):
                for model, optimizer in ((first, adam), (second, sgd)):
                    loss = loss_of(model, batch)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item().hex())
            for schedule in schedules:
                schedule.step()
            count.value += 1
            if when is not None and when[:2] == (accelerator.process_index, count.value):
                os.kill(os.getpid(), getattr(signal, when[2]))
        with torch.no_grad():  # draws, too
            losses += [loss_of(first, batch).item().hex() for batch in held_out]
    accelerator.end_training()
    return {"begun": begun, "count": count.value, "lr": adam.param_groups[0]["lr"].hex()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    parts = sys.argv[2].split(":") if len(sys.argv) > 2 else None
    losses: list[str] = []
    try:
        found = train(sys.argv[1], losses, when=(int(parts[0]), int(parts[1]), parts[2]) if parts else None)
    finally:
        with open(f"losses-{os.environ.get('RANK', '0')}", "a") as file:
            file.write("\n".join(losses) + "\n")
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(found), flush=True)

"""Trains, saves and goes on, or loads and goes on, in the library that is named.

`exchanged.py LIBRARY save|load FOLDER [safetensors|bin|background|shared]`

Prints the losses of the steps after the checkpoint.
"""

import importlib
import json
import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Tied(nn.Module):
    """Two names of one weight, a buffer, and dropout, which draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.norm(self.embedding(tokens))))


class Counter:
    """An object of the user's."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def let_small_files_be_shared() -> None:
    """As large ones are, by all processes."""
    from hasten.checkpoint import shares
    from hasten.weights import image

    shares.LEAST, shares.UNIT = 1, 256
    shares.LARGE = image.LARGE = 64


def main(library: str, mode: str, folder: str, kind: str = "safetensors") -> None:
    module = importlib.import_module(library)
    utils = importlib.import_module(f"{library}.utils")
    accelerator = module.Accelerator(cpu=True)
    utils.set_seed(3 if mode == "save" else 4)
    model, other = Tied(), nn.Linear(6, 2)
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=0.05),
        torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9),
    ]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 2, gamma=0.5)
    data = TensorDataset(torch.arange(32) % 11, (torch.arange(32) * 7) % 11)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    prepared = accelerator.prepare(model, other, *optimizers, scheduler, loader)
    model, other, first, second, scheduler, loader = prepared
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    losses: list[float] = []

    def epoch(keep: bool) -> None:
        for tokens, targets in loader:
            loss = nn.functional.cross_entropy(model(tokens), targets) + other(torch.ones(1, 6)).square().mean()
            accelerator.backward(loss)
            for optimizer in (first, second):
                optimizer.step()
            scheduler.step()
            for optimizer in (first, second):
                optimizer.zero_grad()
            counter.steps += 1
            if keep:
                losses.append(float(loss.detach()))

    if mode == "save":
        epoch(False)
        if kind == "shared":
            let_small_files_be_shared()
        if kind == "background":
            accelerator.save_state(folder, blocking=False).result()
        else:
            accelerator.save_state(folder, safe_serialization=kind != "bin")
    else:
        accelerator.load_state(folder)
    epoch(True)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        print(json.dumps({"losses": losses, "steps": counter.steps, "rate": scheduler.get_last_lr()}), flush=True)
    accelerator.wait_for_everyone()
    if library == "accelerate":
        # Now and then its processes abort when their group ends: a thread of gloo is still running.
        os._exit(0)
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])

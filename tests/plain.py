"""What a parity test compares with: a tiny model, a tiny dataset, and the plain PyTorch loop over them."""

from collections.abc import Callable, Iterable, Sized
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


class TinyDataset(Dataset[tuple[Tensor, Tensor]]):
    """`length` pairs of `width` floats and one float, the same on every machine; the global generator is not touched."""

    def __init__(self, length: int = 64, width: int = 8, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(length, width, generator=generator)
        self.targets = self.inputs.sin().sum(dim=1, keepdim=True)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class TinyMLP(nn.Module):
    """Two linear layers: (batch, width) to (batch, 1). Every instance has the same weights, whatever was drawn before."""

    def __init__(self, width: int = 8, hidden: int = 16, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.up = nn.Linear(width, hidden)
            self.down = nn.Linear(hidden, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down(functional.relu(self.up(inputs)))


sgd = partial(torch.optim.SGD, lr=0.1)
halving = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)


def parts(batch: int = 8) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], Any]:
    """A model, its optimizer, a loader and a scheduler that halves the rate, none of them prepared."""
    model = TinyMLP()
    optimizer = sgd(model.parameters())
    return model, optimizer, DataLoader(TinyDataset(), batch), halving(optimizer)


def loss_of(model: Any, batch: Any) -> Tensor:
    """The mean squared error of a model on a batch of `TinyDataset`."""
    inputs, targets = batch
    return functional.mse_loss(model(inputs), targets)


def plain_losses(
    model_fn: Callable[[], nn.Module],
    dataset: Dataset[tuple[Tensor, Tensor]],
    global_batch: int,
    steps: int,
    optimizer_fn: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    accumulation: int = 1,
    clip: float | None = None,
    scheduler_fn: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
) -> list[float]:
    """Train for `steps` optimizer steps in one process and return the mean squared error of each batch.

    Batches of `global_batch` samples come in the order of the dataset, epoch after epoch. Each step averages the gradients
    of `accumulation` batches, clips their norm to `clip` and steps the scheduler once. So there are `steps * accumulation`
    losses, and n ranks with batches of `global_batch / n` must have the same ones as their mean.
    """
    assert isinstance(dataset, Sized)
    if len(dataset) % (global_batch * accumulation):
        raise ValueError(f"{len(dataset)} samples are not a multiple of {accumulation} batches of {global_batch}")
    model = model_fn()
    optimizer = optimizer_fn(model.parameters())
    scheduler = scheduler_fn(optimizer) if scheduler_fn else None
    losses: list[float] = []
    while len(losses) < steps * accumulation:
        for inputs, targets in DataLoader(dataset, global_batch):
            loss = functional.mse_loss(model(inputs), targets)
            (loss / accumulation).backward()
            losses.append(loss.item())
            if len(losses) % accumulation:
                continue
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler:
                scheduler.step()
            if len(losses) == steps * accumulation:
                break
    return losses

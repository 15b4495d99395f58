"""The same training loop twice: written by hand in plain PyTorch, and prepared by a library."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 8
WIDTH = 16


@dataclass(frozen=True)
class Loop:
    """A loop over `epoch()`; `model` is the bare module that it trains, `parts` what it holds besides."""

    model: nn.Module
    epoch: Callable[[], None]
    parts: tuple[Any, ...] = ()
    accelerator: Any = None


def build(batches: int, width: int, adam: bool, sampler: bool = False) -> tuple[Any, ...]:
    """Model, optimizer, scheduler and loader, the same at every call; `sampler` shares the data between the ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer: torch.optim.Optimizer
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3) if adam else torch.optim.SGD(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10_000)
    inputs = torch.randn(batches * BATCH, WIDTH)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    own: DistributedSampler[Any] | None = DistributedSampler(dataset, shuffle=False) if sampler else None
    return model, optimizer, scheduler, DataLoader(dataset, batch_size=BATCH, sampler=own)


def raw_loop(
    batches: int, accumulation: int = 1, bf16: bool = False, width: int = WIDTH, adam: bool = False, ddp: bool = False
) -> Loop:
    """The loop by hand; with `ddp`, `batches` is the number of all ranks together."""
    bare, optimizer, scheduler, loader = build(batches, width, adam, sampler=ddp)
    model = DistributedDataParallel(bare) if ddp else bare

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not bf16:
            return model(x)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        return output.float()

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    def epoch() -> None:
        for x, y in loader:
            mse_loss(forward(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    def accumulating_epoch() -> None:
        last = len(loader) - 1
        for index, (x, y) in enumerate(loader):
            if (index + 1) % accumulation and index != last:
                with model.no_sync() if ddp else contextlib.nullcontext():
                    (mse_loss(forward(x), y) / accumulation).backward()
            else:
                (mse_loss(forward(x), y) / accumulation).backward()
                update()

    run = epoch if accumulation == 1 else accumulating_epoch
    return Loop(bare, run, (model, optimizer, scheduler, loader))


def prepared_loop(
    library: str,
    batches: int,
    accumulation: int = 1,
    bf16: bool = False,
    width: int = WIDTH,
    adam: bool = False,
    ddp: bool = False,
) -> Loop:
    """The same loop through the Accelerator of `library`; "raw" is the loop by hand."""
    if library == "raw":
        return raw_loop(batches, accumulation, bf16, width, adam, ddp)
    accelerator = importlib.import_module(library).Accelerator(
        cpu=True, gradient_accumulation_steps=accumulation, mixed_precision="bf16" if bf16 else "no"
    )
    assert accelerator.num_processes == (dist.get_world_size() if ddp else 1)
    bare, *others = build(batches, width, adam)
    model, optimizer, scheduler, loader = accelerator.prepare(bare, *others)

    def epoch() -> None:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return Loop(bare, epoch, (model, optimizer, scheduler, loader), accelerator)


def same_weights(one: nn.Module, other: nn.Module, tolerance: float = 0.0) -> bool:
    """Whether two models hold the same values, to an absolute tolerance."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(mine, yours, rtol=0.0, atol=tolerance) for mine, yours in pairs)

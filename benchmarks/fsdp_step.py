"""A prepared FSDP2 loop over one by hand, on 2 gloo ranks: a small decoder, AdamW, clipping, and accumulation without exchange."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.measure import RAW, Benchmark, Part, Wrong, main, step_figures, take_turns

RANKS = 2
LAYERS, WIDTH, TOKENS, LENGTH, BATCH, BATCHES = 4, 128, 256, 32, 4, 10
TURNS = 20


class Block(nn.Module):
    """A residual block with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Decoder(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


@dataclass
class Loop:
    """A loop over one epoch, and its model."""

    epoch: Callable[[], None]
    model: Any


def _parts() -> tuple[Decoder, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(0)
    model = Decoder()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(TOKENS, (RANKS * BATCH * BATCHES, LENGTH), generator=generator)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3), TensorDataset(tokens)


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens)[:, :-1].reshape(-1, TOKENS), tokens[:, 1:].reshape(-1))


def by_hand(steps: int) -> Loop:
    """The loop without a library."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, _, dataset = _parts()
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model.embedding, mesh=mesh)
    fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    sharded: Any = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, BATCH, sampler=sampler)

    def epoch() -> None:
        for index, (tokens,) in enumerate(loader):
            last = (index + 1) % steps == 0 or index + 1 == BATCHES
            sharded.set_requires_gradient_sync(last)
            (_loss(model, tokens) / steps).backward()
            if last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return Loop(epoch, model)


def prepared(library: str, steps: int) -> Loop:
    """The loop with a library."""
    if library == RAW:
        return by_hand(steps)
    module = importlib.import_module(library)
    plugin = module.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = module.Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=steps)
    model, optimizer, dataset = _parts()
    sampler = DistributedSampler(dataset, shuffle=False)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = DataLoader(dataset, BATCH, sampler=sampler)
    loader = accelerator.prepare(loader) if library == "hasten" else loader  # the other one would share it out again

    def epoch() -> None:
        for (tokens,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(_loss(model, tokens))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return Loop(epoch, model)


def _measure(library: str, prefix: str, steps: int) -> dict[str, float]:
    own, hand = prepared(library, steps), by_hand(steps)
    own.epoch()
    hand.epoch()
    for one, other in zip(own.model.parameters(), hand.model.parameters(), strict=True):
        if not torch.allclose(one.full_tensor(), other.full_tensor(), rtol=1e-4, atol=1e-5):
            raise Wrong("the prepared loop and the loop by hand end with different weights")
    turns = take_turns(hand.epoch, own.epoch, TURNS, before=dist.barrier)
    return turns.values(prefix, BATCHES)


def plain(library: str) -> dict[str, float]:
    return _measure(library, "plain", 1)


def accumulate5(library: str) -> dict[str, float]:
    return _measure(library, "accumulate5", 5)


BENCHMARK = Benchmark(
    "benchmarks.fsdp_step",
    f"FSDP2 loop on 2 gloo ranks: {LAYERS} layers of width {WIDTH}, AdamW, clipping, {BATCHES} batches of {BATCH} per rank",
    [*step_figures("plain", "plain", 1.03), *step_figures("accumulate5", "accumulate 5", 1.03)],
    [Part("plain", plain, ranks=RANKS), Part("accumulate5", accumulate5, ranks=RANKS)],
)

if __name__ == "__main__":
    main(BENCHMARK)

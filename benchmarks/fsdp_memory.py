"""Bytes on the device of one of 2 ranks that share a transformer of 24 layers, sequence 4096: what layers keep for backward.

The device is simulated (`tests/simulated_device.py`): every byte is counted, none is estimated.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from tests.simulated_device import Memory, install
from torch import nn
from torch.nn import functional

from benchmarks.measure import RAW, Benchmark, Figure, Part, main

RANKS = 2
LAYERS, WIDTH, WINDOW, LENGTH, TOKENS = 24, 64, 128, 4096, 128
INPUT = LENGTH * WIDTH * 4  # bytes of what one layer takes in


class Layer(nn.Module):
    """Attention within windows and a feed-forward network, each with a norm before and a residual around it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.mixed, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        windows = self.mixed(self.before(hidden)).view(-1, WINDOW, 3 * WIDTH)
        query, key, value = windows.chunk(3, -1)
        attended = torch.softmax(query @ key.transpose(-1, -2) / WIDTH**0.5, -1) @ value
        hidden = hidden + self.out(attended.view(hidden.shape))
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class Transformer(nn.Module):
    """Embedding, layers, norm and head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def prepare(library: str, layers: int, **settings: Any) -> tuple[Any, Any]:
    """A sharded model and its optimizer; by hand, or prepared."""
    torch.manual_seed(0)
    model: Any = Transformer(layers).to("npu")
    if library == RAW:
        return _by_hand(model, **settings)
    from hasten import Accelerator, FullyShardedDataParallelPlugin, InitProcessGroupKwargs

    plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Layer"], **settings)
    handlers = [InitProcessGroupKwargs(backend="cpu:gloo,npu:gloo")]
    accelerator = Accelerator(fsdp_plugin=plugin, kwargs_handlers=handlers)
    assert accelerator.device.type == "npu", accelerator.device
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def _by_hand(model: Any, activation_checkpointing: bool = False, activation_checkpointing_offload: bool = False) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,npu:gloo")
    mesh = init_device_mesh("npu", (RANKS,))
    for index, layer in enumerate(model.layers):
        if activation_checkpointing:
            layer = checkpoint_wrapper(layer)
        if activation_checkpointing_offload:
            layer = offload_wrapper(layer)
        model.layers[index] = fully_shard(layer, mesh=mesh)
    fully_shard(model.embedding, mesh=mesh)
    fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters())


def kept(memory: Memory, model: Any, tokens: torch.Tensor) -> int:
    """Bytes that a forward pass leaves on the device for the backward pass."""
    sizes = []
    for grad in (False, True):
        gc.collect()
        with torch.set_grad_enabled(grad):
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        gc.collect()
        sizes.append(memory.live)
        if grad:
            loss.backward()
        del loss
    return sizes[1] - sizes[0]


def measure(library: str, **settings: Any) -> tuple[float, int]:
    """What a layer keeps, in inputs of one layer, and the most bytes of a training step."""
    memory = install("npu")[0]
    tokens = torch.arange(LENGTH).remainder(TOKENS).unsqueeze(0).to("npu")
    found = []
    for layers in (LAYERS // 2, LAYERS):
        model, optimizer = prepare(library, layers, **settings)
        found.append(kept(memory, model, tokens))
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        memory.reset_peak()
        functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        peak = memory.peak
        del model, optimizer
    return (found[1] - found[0]) / (LAYERS - LAYERS // 2) / INPUT, peak


MODES: dict[str, dict[str, Any]] = {
    "all": {},
    "inputs": {"activation_checkpointing": True},
    "host": {"activation_checkpointing": True, "activation_checkpointing_offload": True},
}


def _part(mode: str) -> Part:
    def part(library: str) -> dict[str, float]:
        if library not in (RAW, "hasten"):
            return {}
        layer, peak = measure(library, **MODES[mode])
        return {f"{mode}_layer": layer, f"{mode}_peak": peak / 1e6}

    return Part(mode, part, RANKS)


BENCHMARK = Benchmark(
    "benchmarks.fsdp_memory",
    "24 layers, sequence 4096, on 2 ranks: bytes on the device of one",
    [
        Figure("nothing recomputed: kept per layer, in inputs of a layer", "all_layer"),
        Figure("nothing recomputed: MB at most in a step", "all_peak", digits=1),
        Figure("activation checkpointing: kept per layer, in inputs of a layer", "inputs_layer", 1.05, 3),
        Figure("activation checkpointing: MB at most in a step", "inputs_peak", digits=1),
        Figure("inputs on the host: kept per layer, in inputs of a layer", "host_layer", 0.0, 3),
        Figure("inputs on the host: MB at most in a step", "host_peak", digits=1),
    ],
    [_part(mode) for mode in MODES],
)

if __name__ == "__main__":
    main(BENCHMARK)

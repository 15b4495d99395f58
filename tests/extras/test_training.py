"""Models of transformers train as they do on one process."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.extras.models import FAMILIES, LIMIT, adamw, alone, llama, loss_of, seeded, sharding, tokens, train
from tests.ranks import run_ranks

HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"activation_checkpointing": True},
    "offloaded": {"activation_checkpointing": True, "activation_checkpointing_offload": True},
}


def sharded(name: str, **settings: Any) -> list[float]:
    accelerator = sharding(**settings)
    model = seeded(FAMILIES[name])
    model, optimizer = accelerator.prepare(model, adamw(model))
    assert all(isinstance(each, DTensor) for each in model.parameters())
    return train(accelerator, model, optimizer)


LONG = pytest.mark.full


@pytest.mark.parametrize(
    ("how", "micros"),
    [
        ("plain", 1),
        ("recomputed", 3),
        ("offloaded", 1),
        pytest.param("plain", 3, marks=LONG),
        pytest.param("recomputed", 1, marks=LONG),
        pytest.param("offloaded", 3, marks=LONG),
    ],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_losses_are_those_of_one_process(name, how, micros):
    expected = alone(seeded(FAMILIES[name]), micros=micros)
    for losses in run_ranks(sharded, 2, name, micros=micros, timeout=LIMIT, **HOW[how]):
        assert losses == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert expected[-1] < 0.8 * expected[0]


@pytest.mark.parametrize("how", ["plain", "offloaded", pytest.param("recomputed", marks=LONG)])
@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_stays_close(name, how):
    expected = alone(seeded(FAMILIES[name]))
    for losses in run_ranks(sharded, 2, name, precision="bf16", timeout=LIMIT, **HOW[how]):
        assert losses == pytest.approx(expected, rel=2e-2)


def with_own_checkpointing(both: bool) -> tuple[list[float], bool]:
    accelerator = sharding(activation_checkpointing=both)
    model = seeded(llama)
    model.activation_checkpointing_enable()
    model, optimizer = accelerator.prepare(model, adamw(model))
    return train(accelerator, model, optimizer), model.is_activation_checkpointing


@pytest.mark.parametrize("both", [False, True])
def test_checkpointing_of_transformers(both):
    expected = alone(seeded(llama))
    found = run_ranks(with_own_checkpointing, 2, both, timeout=LIMIT)
    for losses, its_own in found:
        assert losses == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert its_own is not both
    assert ("checkpoints its activations itself" in found.stderr[0]) is both


def with_evaluation(name: str) -> tuple[list[float], list[float]]:
    accelerator = sharding()
    model = seeded(FAMILIES[name])
    model, optimizer = accelerator.prepare(model, adamw(model))
    losses, checks = [], []
    for step in range(4):
        model.eval()
        with torch.no_grad():
            checks.append(accelerator.reduce(loss_of(model, tokens(accelerator.process_index, 100)), "mean").item())
        model.train()
        loss = loss_of(model, tokens(accelerator.process_index, step))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses, checks


@pytest.mark.parametrize("name", FAMILIES)
def test_evaluation_between_steps(name):
    expected = alone(seeded(FAMILIES[name]), steps=4)
    checks = []
    for steps in range(4):
        model = seeded(FAMILIES[name])
        alone(model, steps=steps)
        model.eval()
        with torch.no_grad():
            checks.append(sum(loss_of(model, tokens(rank, 100)).item() / 2 for rank in range(2)))
    for losses, found in run_ranks(with_evaluation, 2, name, timeout=LIMIT):
        assert losses == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert found == pytest.approx(checks, rel=1e-5, abs=1e-5)


def with_compiled_layers() -> list[float]:
    accelerator = sharding()
    model = seeded(llama)
    model, optimizer = accelerator.prepare(model, adamw(model))
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    return train(accelerator, model, optimizer, steps=3)


def test_layers_may_be_compiled():
    expected = alone(seeded(llama), steps=3)
    for losses in run_ranks(with_compiled_layers, 2, fresh=True, timeout=LIMIT):
        assert losses == pytest.approx(expected, rel=1e-5, abs=1e-5)

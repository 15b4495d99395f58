from typing import Any

import pytest
import torch
from benchmarks.counts import Operations
from torch import nn

from hasten import Accelerator
from hasten.training.local_sgd import LocalSGD
from tests.ranks import run_ranks

STEPS, EVERY = 7, 3
RATE = 0.05


def network() -> nn.Module:
    torch.manual_seed(3)
    # No bias before the BatchNorm: its gradient is nothing but rounding, which Adam makes large.
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(6, 4, generator=generator).double(), torch.randn(6, 1, generator=generator).double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE)


def moments(optimizer: Any) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]


# ---- parity with one process that plays all ----


def local_run(average_state: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    accelerator = Accelerator()
    model = network()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    state = {"optimizer": optimizer} if average_state else {}
    with LocalSGD(accelerator, model, EVERY, **state) as local_sgd:
        for step in range(STEPS):
            x, y = batch(accelerator.process_index, step)
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
    assert local_sgd.num_steps == STEPS
    bare = accelerator.unwrap_model(model)
    steps = [state["step"].item() for state in optimizer.state.values()]
    assert steps == [STEPS] * len(steps)
    return [p.detach() for p in bare.parameters()], list(bare.buffers()), moments(optimizer)


def simulate(ranks: int, average_state: bool) -> tuple[list[torch.Tensor], list[list[torch.Tensor]], list[Any]]:
    models = [network() for _ in range(ranks)]
    optimizers = [optimizer_of(model) for model in models]

    def average() -> None:
        groups = [list(model.parameters()) for model in models]
        if average_state:
            groups = [[*group, *moments(optimizer)] for group, optimizer in zip(groups, optimizers, strict=True)]
        with torch.no_grad():
            for copies in zip(*groups, strict=True):
                mean = torch.stack(list(copies)).mean(0)
                for copy in copies:
                    copy.copy_(mean)

    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            x, y = batch(rank, step)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            average()
    average()
    return (
        [p.detach() for p in models[0].parameters()],
        [list(model.buffers()) for model in models],
        [moments(optimizer) for optimizer in optimizers],
    )


@pytest.mark.parametrize("average_state", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_it_is_the_same_as_one_process_that_plays_all(ranks: int, average_state: bool):
    """In float64, 1e-9: up to the order of the sums. Buffers stay each process's own."""
    parameters, buffers, states = simulate(ranks, average_state)
    for rank, (own, statistics, state) in enumerate(run_ranks(local_run, ranks, average_state)):
        torch.testing.assert_close(own, parameters, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(statistics, buffers[rank], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(state, states[rank], rtol=1e-9, atol=1e-9)
    if ranks > 1:
        assert not torch.equal(buffers[0][0], buffers[1][0])
        assert torch.equal(states[0][0], states[1][0]) == average_state


# ---- values of the reference ----


def scenario(accumulation: int, steps: int, every: int, enabled: bool, in_window: bool) -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    values = []

    def step() -> None:
        loss = model(torch.ones(1, 1)).sum() * (accelerator.process_index + 1) * 0.01
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        local_sgd.step()
        values.append(round(model.module.weight.item(), 6))

    with LocalSGD(accelerator, model, every, enabled) as local_sgd:
        for _ in range(steps):
            if in_window:
                with accelerator.accumulate(model):
                    step()
            else:
                step()
    return [*values, round(model.module.weight.item(), 6)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1, 5, 2, True, True), [0.99, 0.97, 0.96, 0.94, 0.93, 0.925]),
        ((2, 6, 2, True, True), [1.0, 0.985, 0.985, 0.97, 0.97, 0.955, 0.955]),
        ((1, 5, 2, False, True), [0.985, 0.97, 0.955, 0.94, 0.925, 0.925]),
        ((2, 6, 2, True, False), [0.995, 0.985, 0.98, 0.97, 0.965, 0.955, 0.955]),
        ((1, 2, 1, True, True), [0.985, 0.97, 0.97]),
        ((1, 3, 2, True, False), [0.99, 0.97, 0.96, 0.955]),
        ((1, 0, 2, True, True), [1.0]),
    ],
)
def test_values_of_the_reference(arguments: tuple[Any, ...], expected: list[float]):
    """As accelerate 1.15.0 gives them on rank 0 of 2."""
    assert run_ranks(scenario, 2, *arguments)[0] == expected


def step_outside() -> float:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1))
    model.module.weight.data.fill_(accelerator.process_index + 1.0)
    local_sgd = LocalSGD(accelerator, model, 2)
    local_sgd.step()
    local_sgd.step()
    return model.module.weight.item()


def test_steps_outside_of_the_context_average_too_as_in_the_reference():
    assert run_ranks(step_outside, 2) == [1.5] * 2


# ---- what is exchanged ----


def count(trainable_only: bool, average_state: bool) -> list[Any]:
    accelerator = Accelerator()
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3).double(), nn.Linear(3, 3)])
    model[2].requires_grad_(False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.data.fill_(accelerator.process_index)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    optimizer.step()
    options = {"trainable_only": trainable_only, **({"optimizer": optimizer} if average_state else {})}
    counts = []
    with LocalSGD(accelerator, model, 2, **options) as local_sgd:
        for _ in range(4):
            with Operations() as operations:
                local_sgd.step()
            counts.append(operations.collectives)
    assert places == [parameter.data_ptr() for parameter in model.parameters()]
    return [*counts, [parameter.flatten()[0].item() for parameter in model.parameters()]]


@pytest.mark.parametrize("average_state", [False, True])
@pytest.mark.parametrize("trainable_only", [False, True])
def test_one_collective_per_dtype_after_the_agreement(trainable_only: bool, average_state: bool):
    counts = [0, 3, 0, 3]
    for rank, found in enumerate(run_ranks(count, 2, trainable_only, average_state)):
        assert found == [*counts, [0.5] * 4 + [float(rank) if trainable_only else 0.5] * 2]


class Eight(torch.optim.SGD):
    """An optimizer with 8-bit state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"momentum": torch.ones(2, dtype=torch.uint8)}


def average_whole_numbers() -> str:
    accelerator = Accelerator()
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, Eight(model.parameters()))
    optimizer.step()
    local_sgd = LocalSGD(accelerator, model, 1, optimizer=optimizer)
    with pytest.raises(ValueError) as caught:
        local_sgd.step()
    return str(caught.value)


def test_state_in_whole_numbers_is_refused():
    text = (
        "LocalSGD(optimizer=...): AcceleratedOptimizer keeps 'momentum' in torch.uint8, which can not be averaged. Leave "
        "`optimizer` out; each process then keeps its own state."
    )
    assert run_ranks(average_whole_numbers, 2) == [text] * 2


def different_state() -> str:
    accelerator = Accelerator()
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    if accelerator.process_index == 1:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    with pytest.raises(Exception) as caught:
        LocalSGD(accelerator, model, 1, optimizer=optimizer).step()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_process_without_state_is_named_and_nobody_waits_for_it():
    first, second = run_ranks(different_state, 2)
    assert first == second
    assert first.startswith("DistributedOperationException: ")
    assert "optimizer state 'exp_avg' of parameter 0" in first


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(ValueError, match=r"LocalSGD\(optimizer='sgd'\): it must be an optimizer, or None\."):
        LocalSGD(Accelerator(), nn.Linear(1, 1), 2, optimizer="sgd")  # type: ignore[arg-type]


# ---- one process ----


def test_alone_it_does_nothing():
    accelerator = Accelerator()
    model = nn.Linear(1, 1)
    local_sgd = LocalSGD(accelerator, model, 2)
    assert not local_sgd.enabled
    with local_sgd as entered:
        assert entered is local_sgd
        for _ in range(4):
            local_sgd.step()
    assert local_sgd.num_steps == 4

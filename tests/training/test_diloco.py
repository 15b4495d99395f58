import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.counts import Operations
from torch import nn

from hasten import Accelerator
from hasten.training.diloco import DiLoCo
from hasten.training.local_sgd import LocalSGD
from tests.ranks import run_ranks

STEPS, EVERY = 8, 3
CLOSE = {"rtol": 1e-9, "atol": 1e-9}  # in float64: up to the order of the sums


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(6, 4, generator=generator).double(), torch.randn(6, 1, generator=generator).double()


def inner_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


# ---- parity with one process that plays all ----


def simulate(
    ranks: int, steps: int, rate: float, momentum: float, accumulation: int = 1, resumed_at: int = -1
) -> list[torch.Tensor]:
    """Algorithm 1 of the source, by hand: `ranks` workers, Nesterov momentum written out.

    A resumed run goes on with the inner optimizer of rank 0 everywhere.
    """
    models = [network() for _ in range(ranks)]
    inners = [inner_of(model) for model in models]
    outer = values(models[0])
    velocity: list[torch.Tensor] = [torch.zeros_like(parameter) for parameter in outer]

    def round_() -> None:
        ways = [
            torch.stack([old - own.detach() for own in owns]).mean(0)
            for old, *owns in zip(outer, *(model.parameters() for model in models), strict=True)
        ]
        for old, speed, way in zip(outer, velocity, ways, strict=True):
            speed.mul_(momentum).add_(way)
            old.sub_(rate * (way + momentum * speed))
        with torch.no_grad():
            for model in models:
                for own, old in zip(model.parameters(), outer, strict=True):
                    own.copy_(old)

    done = 0
    for step in range(steps):
        if step == resumed_at:
            for inner in inners[1:]:
                inner.load_state_dict(copy.deepcopy(inners[0].state_dict()))
        for rank, (model, inner) in enumerate(zip(models, inners, strict=True)):
            x, y = batch(rank, step)
            (nn.functional.mse_loss(model(x), y) / accumulation).backward()
            if (step + 1) % accumulation == 0:
                inner.step()
                inner.zero_grad()
        if (step + 1) % accumulation == 0:
            done += 1
            if done % EVERY == 0:
                round_()
    if done % EVERY:
        round_()
    return outer


def train(accelerator: Accelerator, model: Any, optimizer: Any, diloco: Any, steps: range) -> None:
    for step in steps:
        with accelerator.accumulate(model):
            x, y = batch(accelerator.process_index, step)
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()


def parts(accelerator: Accelerator, **options: Any) -> tuple[Any, Any, DiLoCo]:
    model = network()
    model, optimizer = accelerator.prepare(model, inner_of(model))
    return model, optimizer, DiLoCo(accelerator, model, EVERY, **options)


def diloco_run(steps: int, accumulation: int, options: dict[str, float]) -> list[torch.Tensor]:
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    model, optimizer, diloco = parts(accelerator, **options)
    with diloco as entered:
        assert entered is diloco
        train(accelerator, model, optimizer, diloco, range(steps))
    assert (diloco.num_steps, diloco.in_round) == (steps // accumulation, 0)
    return values(model)


@pytest.mark.parametrize("steps", [2 * EVERY, STEPS])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_is_the_same_as_one_process_that_plays_all(ranks: int, steps: int):
    expected = simulate(ranks, steps, 0.7, 0.9)
    for own in run_ranks(diloco_run, ranks, steps, 1, {}):
        torch.testing.assert_close(own, expected, **CLOSE)


@pytest.mark.parametrize(("rate", "momentum"), [(1.0, 0.0), (0.5, 0.5)])
def test_the_outer_optimizer_obeys_its_settings(rate: float, momentum: float):
    expected = simulate(2, STEPS, rate, momentum)
    for own in run_ranks(diloco_run, 2, STEPS, 1, {"outer_lr": rate, "outer_momentum": momentum}):
        torch.testing.assert_close(own, expected, **CLOSE)


def test_micro_batches_do_not_count():
    expected = simulate(2, 14, 0.7, 0.9, accumulation=2)
    for own in run_ranks(diloco_run, 2, 14, 2, {}):
        torch.testing.assert_close(own, expected, **CLOSE)


def local_sgd_run(steps: int) -> list[torch.Tensor]:
    accelerator = Accelerator()
    model = network()
    model, optimizer = accelerator.prepare(model, inner_of(model))
    with LocalSGD(accelerator, model, EVERY) as local_sgd:
        train(accelerator, model, optimizer, local_sgd, range(steps))
    return values(model)


def test_with_rate_one_and_no_momentum_it_is_local_sgd():
    options = {"outer_lr": 1.0, "outer_momentum": 0.0}
    for own, other in zip(run_ranks(diloco_run, 2, STEPS, 1, options), run_ranks(local_sgd_run, 2, STEPS), strict=True):
        torch.testing.assert_close(own, other, **CLOSE)


# ---- what is exchanged ----


def count() -> list[Any]:
    accelerator = Accelerator()
    model, optimizer, diloco = parts(accelerator)
    counts = []
    with diloco:
        for step in range(2 * EVERY):
            with Operations() as operations:
                train(accelerator, model, optimizer, diloco, range(step, step + 1))
            counts.append(operations.collectives)
        with Operations() as operations:
            diloco._meet(end=True)
    return [*counts, operations.collectives]


def test_a_round_takes_one_collective_per_dtype_after_the_agreement():
    assert run_ranks(count, 2) == [[0, 0, 2, 0, 0, 2, 1]] * 2


def half() -> list[float]:
    accelerator = Accelerator()
    model = nn.Linear(1, 1, bias=False).bfloat16()
    frozen = nn.Linear(1, 1, bias=False).requires_grad_(False)
    nn.init.ones_(model.weight)
    both = accelerator.prepare(nn.ModuleList([model, frozen]))
    frozen.weight.data.fill_(accelerator.process_index)
    diloco = DiLoCo(accelerator, both, 1, outer_lr=0.125, outer_momentum=0.0)
    with diloco:
        for _ in range(4):
            model.weight.data.sub_(2**-7)
            diloco.step()
    return [model.weight.item(), diloco.outer_optimizer.param_groups[0]["params"][0].item(), frozen.weight.item()]


def test_outer_steps_too_small_for_half_precision_add_up_and_what_is_frozen_stays():
    outer, own = 1.0, torch.ones(1).bfloat16()
    for _ in range(4):
        own -= 2**-7
        outer -= 0.125 * (outer - own.item())  # at first 2^-10, which bfloat16 would round away
        own.fill_(outer)
    assert own.item() < 1
    assert run_ranks(half, 2) == [[own.item(), outer, float(rank)] for rank in range(2)]


# ---- weights that change outside ----


def test_weights_that_were_loaded_before_it_is_entered_are_where_it_begins():
    accelerator = Accelerator()
    model, _, diloco = parts(accelerator, outer_lr=1.0, outer_momentum=0.0)
    with torch.no_grad():
        model[0].bias.fill_(5.0)
    with diloco:
        diloco.step()
    assert model[0].bias.tolist() == [5.0] * 8


def test_momentum_does_not_move_a_model_that_stays_where_it_is_at_the_end():
    accelerator = Accelerator()
    model, optimizer, diloco = parts(accelerator)
    with diloco:
        train(accelerator, model, optimizer, diloco, range(EVERY))
        before = values(model)
    torch.testing.assert_close(values(model), before, rtol=0, atol=0)


# ---- checkpoints ----


def interrupt(folder: str) -> list[list[torch.Tensor]]:
    accelerator = Accelerator()
    model, optimizer, diloco = parts(accelerator)
    accelerator.register_for_checkpointing(diloco)
    with diloco:
        train(accelerator, model, optimizer, diloco, range(EVERY))
        accelerator.save_state(folder)
    with diloco:
        train(accelerator, model, optimizer, diloco, range(EVERY, 2 * EVERY))
    straight = values(model)

    again = Accelerator()
    torch.manual_seed(7)
    model, optimizer, diloco = parts(again)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    again.register_for_checkpointing(diloco)
    again.load_state(folder)
    assert (diloco.num_steps, diloco.in_round) == (EVERY, 0)
    with diloco:
        train(again, model, optimizer, diloco, range(EVERY, 2 * EVERY))
    return [straight, values(model)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_goes_on_where_it_was(ranks: int, tmp_path: Path):
    uninterrupted = simulate(ranks, 2 * EVERY, 0.7, 0.9)
    interrupted = simulate(ranks, 2 * EVERY, 0.7, 0.9, resumed_at=EVERY)
    for straight, resumed in run_ranks(interrupt, ranks, str(tmp_path / "ck")):
        torch.testing.assert_close(straight, uninterrupted, **CLOSE)
        torch.testing.assert_close(resumed, interrupted, **CLOSE)


def save_in_a_round() -> tuple[list[str], dict[str, Any]]:
    accelerator = Accelerator()
    model, optimizer, diloco = parts(accelerator)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with diloco:
            diloco.state_dict()
            train(accelerator, model, optimizer, diloco, range(EVERY - 1))
            state = diloco.state_dict()
    return [str(each.message) for each in caught if "DiLoCo" in str(each.message)], {
        name: state[name] for name in ("num_steps", "in_round")
    }


def test_saving_inside_a_round_warns_where_copies_differ():
    text = (
        "DiLoCo is saved 2 steps after a round, when the copies of the model differ: those of the other processes are not in the "
        "checkpoint. Save when `in_round` is 0: after every 3. step."
    )
    assert run_ranks(save_in_a_round, 2) == [([text], {"num_steps": 2, "in_round": 2})] * 2
    assert run_ranks(save_in_a_round, 1) == [([], {"num_steps": 2, "in_round": 2})]


def test_the_state_has_the_names_of_the_bare_model_and_is_refused_by_another():
    _, _, diloco = parts(Accelerator())
    state = diloco.state_dict()
    assert list(state["parameters"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    other = DiLoCo(Accelerator(), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), 1)
    with pytest.raises(ValueError, match=r"belongs to another model.*: 1\.bias, 1\.weight, 2\.bias, 2\.weight\.$"):
        other.load_state_dict(state)
    diloco.load_state_dict(state)


# ---- settings ----


@pytest.mark.parametrize(
    "options", [{"outer_lr": 0.0}, {"outer_lr": math.inf}, {"outer_momentum": 1.0}, {"outer_momentum": -0.1}]
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, float]):
    with pytest.raises(
        ValueError, match=r"the first must be a finite number above 0, the second at least 0 and below 1\."
    ):
        DiLoCo(Accelerator(), network(), 1, **options)


def test_a_step_outside_of_the_context_is_an_error():
    with pytest.raises(RuntimeError, match=r"belongs into its context"):
        DiLoCo(Accelerator(), network(), 1).step()


def test_switched_off_it_does_nothing():
    accelerator = Accelerator()
    model, _, diloco = parts(accelerator, enabled=False)
    before = values(model)
    with diloco:
        with torch.no_grad():
            model[0].bias.fill_(5.0)
        for _ in range(2 * EVERY):
            diloco.step()
    assert model[0].bias.tolist() == [5.0] * 8
    torch.testing.assert_close(values(model)[2:], before[2:], rtol=0, atol=0)
    assert diloco.num_steps == 0

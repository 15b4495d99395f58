from typing import Any

import pytest
import torch
from torch import nn

from hasten import Accelerator, GradScalerKwargs
from hasten.precision.scaler import LossScaling
from hasten.training.optimizer import AcceleratedOptimizer

HUGE = 1e6  # its square overflows in fp16 once scaled


def scaling(**options: Any) -> LossScaling:
    return LossScaling("cpu", GradScalerKwargs(init_scale=8.0, **options))


def joined(scale: LossScaling, lr: float = 1.0) -> tuple[AcceleratedOptimizer, nn.Parameter]:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = AcceleratedOptimizer(
        torch.optim.SGD([parameter], lr=lr), scaler=scale.scaler, update_scale=scale.stepped
    )
    scale.join(optimizer)
    return optimizer, parameter


def factor(scale: LossScaling) -> float:
    return float(scale.scaler.get_scale())


# ---- the scaler alone ----


def test_settings_reach_torch():
    found = scaling(growth_factor=3.0, backoff_factor=0.25, growth_interval=7).scaler
    assert (found.get_scale(), found.get_growth_factor(), found.get_backoff_factor(), found.get_growth_interval()) == (
        8.0,
        3.0,
        0.25,
        7,
    )
    assert LossScaling("cpu").scaler.get_scale() == 65536.0
    assert not scaling(enabled=False).scaler.is_enabled()


def test_two_optimizers_update_the_scale_once_per_window():
    scale = scaling(growth_interval=1)
    (first, one), (second, two) = joined(scale), joined(scale)
    for window in range(3):
        scale.scale(one.sum() + two.sum()).backward()
        first.step()
        assert factor(scale) == 8.0 * 2**window
        second.step()
        assert factor(scale) == 8.0 * 2 ** (window + 1)
        first.zero_grad()
        second.zero_grad()
    assert one.item() == two.item() == -2.0


def test_an_overflow_in_one_of_two_optimizers_halves_the_scale_for_both():
    scale = scaling()
    (first, one), (second, two) = joined(scale), joined(scale)
    scale.scale(one.sum() * float("inf") + two.sum()).backward()
    first.step()
    second.step()
    assert (first.step_was_skipped, second.step_was_skipped) == (True, False)
    assert (one.item(), two.item()) == (1.0, 0.0)
    assert factor(scale) == 4.0


def test_optimizers_that_take_turns_update_the_scale_before_the_next_backward():
    scale = scaling(growth_interval=1)
    (first, one), (second, two) = joined(scale), joined(scale)
    scale.scale(one.sum()).backward()
    first.step()
    assert factor(scale) == 8.0
    scale.scale(two.sum()).backward()
    assert factor(scale) == 16.0
    second.step()
    scale.settle()
    assert factor(scale) == 32.0
    scale.settle()
    assert factor(scale) == 32.0
    assert (one.item(), two.item()) == (0.0, 0.0)


def test_gradients_are_unscaled_once_per_step():
    scale = scaling()
    optimizer, parameter = joined(scale)
    scale.scale(parameter.sum()).backward()
    for _ in range(2):
        scale.unscale([optimizer])
        assert parameter.grad is not None
        assert parameter.grad.item() == 1.0
    optimizer.step()
    assert parameter.item() == 0.0


def test_an_optimizer_within_two_wrappers_is_found():
    scale = scaling()
    optimizer, parameter = joined(scale)
    scale.scale(parameter.sum()).backward()
    scale.unscale([AcceleratedOptimizer(optimizer)])
    assert parameter.grad is not None
    assert parameter.grad.item() == 1.0


class Lookahead(torch.optim.SGD):
    """An optimizer of the user's that holds another one."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.optimizer = torch.optim.SGD(self.param_groups, lr=lr)


def test_an_optimizer_that_wraps_another_is_unscaled_once():
    scale = scaling()
    parameter = nn.Parameter(torch.ones(1))
    optimizer = AcceleratedOptimizer(Lookahead([parameter], 1.0), scaler=scale.scaler, update_scale=scale.stepped)
    scale.join(optimizer)
    scale.scale(parameter.sum()).backward()
    scale.unscale([optimizer])
    optimizer.step()
    assert parameter.item() == 0.0


def test_a_scaler_that_is_off_changes_nothing():
    scale = scaling(enabled=False)
    optimizer, parameter = joined(scale)
    scale.scale(parameter.sum()).backward()
    scale.unscale([optimizer])
    optimizer.step()
    assert parameter.item() == 0.0
    assert not optimizer.step_was_skipped


def test_forgotten_optimizers_do_not_hold_the_scale_back():
    scale = scaling(growth_interval=1)
    joined(scale)
    scale.leave_all()
    optimizer, parameter = joined(scale)
    scale.scale(parameter.sum()).backward()
    optimizer.step()
    assert factor(scale) == 16.0


# ---- through an accelerator ----


def fp16(scale: float = 1024.0, **settings: Any) -> Accelerator:
    handlers = [GradScalerKwargs(init_scale=scale, growth_interval=settings.pop("growth_interval", 2000))]
    return Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=handlers, **settings)


def prepare(accelerator: Accelerator, lr: float = 0.5) -> tuple[Any, Any, Any]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    return accelerator.prepare(model, optimizer, scheduler)


def step(
    accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, inputs: float, clip: float | None = None
) -> Any:
    accelerator.backward(model(torch.full((1, 1), inputs)).sum())
    norm = accelerator.clip_grad_norm_(model.parameters(), clip) if clip is not None else None
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return norm


def test_an_overflowing_step_is_skipped_halves_the_scale_and_does_not_advance_the_schedule():
    accelerator = fp16()
    model, optimizer, scheduler = prepare(accelerator)
    step(accelerator, model, optimizer, scheduler, HUGE)
    assert accelerator.optimizer_step_was_skipped
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 512.0
    assert model.weight.item() == 1.0
    assert scheduler.get_last_lr() == [0.5]
    step(accelerator, model, optimizer, scheduler, 1.0)
    assert not accelerator.optimizer_step_was_skipped
    assert model.weight.item() == pytest.approx(0.5)
    assert scheduler.get_last_lr() == [0.25]
    assert accelerator.scaler.get_scale() == 512.0


def test_the_forward_pass_is_in_fp16_and_outputs_are_in_fp32():
    accelerator = fp16()
    model, _, _ = prepare(accelerator)
    assert accelerator.native_amp
    assert torch.isinf(model(torch.full((1, 1), 1e5))).all()  # more than fp16 can hold
    assert model(torch.ones(1, 1)).dtype == torch.float32
    with accelerator.autocast():
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == torch.float16


def test_clipping_unscales_once_and_returns_the_true_norm():
    accelerator = fp16()
    model, optimizer, _ = prepare(accelerator)
    accelerator.backward(model(torch.full((1, 1), 4.0)).sum())
    assert model.weight.grad.item() == 4096.0
    assert accelerator.clip_grad_norm_(model.parameters(), 8.0).item() == 4.0
    assert accelerator.clip_grad_norm_(iter(list(model.parameters())), 1.0).item() == pytest.approx(4.0)
    accelerator.clip_grad_value_(model.parameters(), 0.5)
    assert model.weight.grad.item() == pytest.approx(0.5)
    accelerator.unscale_gradients()
    accelerator.unscale_gradients(optimizer)
    accelerator.unscale_gradients([optimizer])
    optimizer.step()
    assert model.weight.item() == pytest.approx(0.75)


def test_clipping_an_overflow_still_skips_the_step():
    accelerator = fp16()
    model, optimizer, scheduler = prepare(accelerator)
    norm = step(accelerator, model, optimizer, scheduler, HUGE, clip=1.0)
    assert not torch.isfinite(norm)
    assert accelerator.optimizer_step_was_skipped
    assert model.weight.item() == 1.0


def test_accumulation_divides_before_scaling_and_updates_once_per_window():
    accelerator = fp16(gradient_accumulation_steps=2, growth_interval=1)
    model, optimizer, scheduler = prepare(accelerator)
    assert accelerator.scaler is not None
    scales = []
    for inputs in (1.0, 3.0, 1.0, 1.0):
        with accelerator.accumulate(model):
            step(accelerator, model, optimizer, scheduler, inputs)
        scales.append(accelerator.scaler.get_scale())
    assert scales == [1024.0, 2048.0, 2048.0, 4096.0]
    assert model.weight.item() == pytest.approx(1.0 - 0.5 * 2.0 - 0.25 * 1.0)
    assert scheduler.get_last_lr() == [0.125]


def test_two_models_with_an_optimizer_each_share_a_scaler():
    accelerator = fp16(growth_interval=1)
    first, second = prepare(accelerator), prepare(accelerator)
    assert accelerator.scaler is not None
    for round_ in range(2):
        for model, _, _ in (first, second):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            accelerator.clip_grad_norm_(model.parameters(), 10.0)
        for _, optimizer, _ in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        assert accelerator.scaler.get_scale() == 1024.0 * 2 ** (round_ + 1)
    assert first[0].weight.item() == second[0].weight.item() == pytest.approx(0.0)


def test_optimizers_in_turn_as_in_adversarial_training():
    accelerator = fp16(growth_interval=1)
    first, second = prepare(accelerator), prepare(accelerator)
    for _ in range(2):
        for model, optimizer, _ in (first, second):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            accelerator.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
    assert first[0].weight.item() == second[0].weight.item() == pytest.approx(0.0)


def test_clipping_leaves_the_gradients_of_other_optimizers_alone():
    accelerator = fp16()
    (first, optimizer, _), (second, other, _) = prepare(accelerator), prepare(accelerator)
    accelerator.backward(first(torch.ones(1, 1)).sum() + second(torch.ones(1, 1)).sum())
    accelerator.clip_grad_norm_(first.parameters(), 10.0)
    assert (first.weight.grad.item(), second.weight.grad.item()) == (1.0, 1024.0)
    optimizer.step()
    other.step()
    assert first.weight.item() == second.weight.item() == pytest.approx(0.5)


def test_unscaling_everything_leaves_out_what_has_no_gradients_yet():
    accelerator = fp16()
    (first, optimizer, _), (second, other, _) = prepare(accelerator), prepare(accelerator)
    accelerator.backward(first(torch.ones(1, 1)).sum())
    accelerator.unscale_gradients()
    accelerator.backward(second(torch.ones(1, 1)).sum())
    optimizer.step()
    other.step()
    assert first.weight.item() == second.weight.item() == pytest.approx(0.5)


@pytest.mark.parametrize("clip", [None, 10.0])
def test_a_fused_optimizer_that_skips_by_itself_is_seen_to_skip(clip: float | None):
    accelerator = fp16()
    model, _, _ = prepare(accelerator)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5, fused=True)
    optimizer, scheduler = accelerator.prepare(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5))
    step(accelerator, model, optimizer, scheduler, HUGE, clip)
    assert model.weight.item() == 1.0
    assert optimizer.step_was_skipped
    assert scheduler.get_last_lr() == [0.5]
    step(accelerator, model, optimizer, scheduler, 1.0, clip)
    assert model.weight.item() == pytest.approx(0.5, abs=1e-4)
    assert not optimizer.step_was_skipped
    assert scheduler.get_last_lr() == [0.25]


def test_an_accelerator_without_fp16_has_no_scaler():
    accelerator = Accelerator(cpu=True)
    assert accelerator.scaler is None
    assert not accelerator.optimizer_step_was_skipped
    accelerator.unscale_gradients()

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from hasten import Accelerator
from hasten.settings.accumulation import GradientAccumulationPlugin
from hasten.training.accumulation import GradientState
from hasten.training.optimizer import AcceleratedOptimizer
from hasten.training.scheduler import AcceleratedScheduler
from tests.ranks import run_ranks


def optimizer(lr: float = 1.0) -> AcceleratedOptimizer:
    parameter = torch.nn.Parameter(torch.ones(1))
    prepared = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=lr))
    prepared.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch would warn about the order
    return prepared


def halving(prepared: AcceleratedOptimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ExponentialLR(prepared.optimizer, gamma=0.5)


def rate(prepared: AcceleratedOptimizer) -> float:
    return float(prepared.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({}, [0.5, 0.25]),
        ({"num_processes": 2}, [0.25, 0.0625]),
        ({"num_processes": 2, "split_batches": True}, [0.5, 0.25]),
        ({"num_processes": 2, "step_with_optimizer": False}, [0.5, 0.25]),
        ({"num_processes": 2, "unit": "update"}, [0.5, 0.25]),
        ({"num_processes": 2, "unit": "process"}, [0.25, 0.0625]),
    ],
)
def test_each_step_advances_by_the_number_of_processes_that_have_a_batch(options: dict[str, Any], rates: list[float]):
    prepared = optimizer()
    scheduler = AcceleratedScheduler(halving(prepared), prepared, **options)
    found = []
    for _ in range(2):
        scheduler.step()
        found.append(rate(prepared))
    assert found == rates
    assert scheduler.get_last_lr() == rates[-1:]


def test_by_default_the_processes_are_those_of_the_job():
    assert run_ranks(step_once, 2) == [0.25, 0.25]


def step_once() -> float:
    prepared = optimizer()
    AcceleratedScheduler(halving(prepared), prepared).step()
    return rate(prepared)


def test_inside_a_window_nothing_happens():
    state = GradientState.for_accelerator(GradientAccumulationPlugin(num_steps=2))
    prepared = optimizer()
    scheduler = AcceleratedScheduler(halving(prepared), prepared)
    found = []
    for _ in range(4):
        state.advance()
        scheduler.step()
        found.append(rate(prepared))
    assert found == [1.0, 0.5, 0.5, 0.25]


def test_a_scheduler_that_is_the_users_own_business_steps_inside_a_window():
    state = GradientState.for_accelerator(GradientAccumulationPlugin(num_steps=2))
    prepared = optimizer()
    state.advance()
    AcceleratedScheduler(halving(prepared), prepared, step_with_optimizer=False).step()
    assert rate(prepared) == 0.5


def test_after_a_skipped_step_of_any_optimizer_nothing_happens():
    first, second = optimizer(), optimizer()
    scheduler = AcceleratedScheduler(halving(first), [first, second])
    second.step_was_skipped = True
    scheduler.step()
    assert rate(first) == 1.0
    second.step_was_skipped = False
    scheduler.step()
    assert rate(first) == 0.5


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_schedule_with_an_end_stays_there(processes: int):
    prepared, plain = optimizer(), optimizer()
    options: dict[str, Any] = {"max_lr": 1.0, "total_steps": 7}
    scheduler = AcceleratedScheduler(
        lr_scheduler.OneCycleLR(prepared.optimizer, **options), prepared, num_processes=processes
    )
    reference = lr_scheduler.OneCycleLR(plain.optimizer, **options)
    check_end(scheduler, prepared, reference, plain, processes)


def check_end(
    scheduler: AcceleratedScheduler,
    prepared: AcceleratedOptimizer,
    reference: Any,
    plain: AcceleratedOptimizer,
    processes: int,
) -> None:
    """Each call takes `processes` of the 6 steps that the reference has, and stays at the last rate."""
    expected = [rate(plain)]
    for _ in range(6):
        reference.step()
        expected.append(rate(plain))
    for call in range(1, 8):
        scheduler.step()
        assert rate(prepared) == expected[min(call * processes, 6)]


def test_a_schedule_that_is_driven_by_a_metric_steps_once_per_call():
    prepared = optimizer()
    scheduler = AcceleratedScheduler(
        lr_scheduler.ReduceLROnPlateau(prepared.optimizer, factor=0.5, patience=0), prepared, num_processes=4
    )
    scheduler.step(1.0)
    assert rate(prepared) == 1.0
    scheduler.step(2.0)
    assert rate(prepared) == 0.5
    scheduler.step(metrics=3.0)
    assert rate(prepared) == 0.25


def test_a_metric_counts_after_an_epoch_that_leaves_a_window_open_or_skipped_its_last_step():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    prepared = accelerator.prepare(optimizer().optimizer)
    plateau = lr_scheduler.ReduceLROnPlateau(prepared.optimizer, factor=0.5, patience=0)
    scheduler = accelerator.prepare(plateau)
    scheduler.step(1.0)
    with accelerator.accumulate():
        scheduler.step(2.0)  # in the window: not yet
    assert rate(prepared) == 1.0
    scheduler.step(2.0)
    assert rate(prepared) == 0.5
    with accelerator.accumulate():
        prepared.step_was_skipped = True
        scheduler.step(2.0)
    assert rate(prepared) == 0.25


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_schedule_that_is_put_together_stays_at_the_end_of_its_last_part(processes: int):
    def schedule(prepared: AcceleratedOptimizer, chained: bool) -> Any:
        inner = prepared.optimizer
        last = lr_scheduler.OneCycleLR(inner, max_lr=1.0, total_steps=7 if chained else 5)
        if chained:
            return lr_scheduler.ChainedScheduler([last], optimizer=inner)
        return lr_scheduler.SequentialLR(inner, [lr_scheduler.ConstantLR(inner, 0.5, 2), last], milestones=[2])

    for chained in (False, True):
        prepared, plain = optimizer(), optimizer()
        scheduler = AcceleratedScheduler(schedule(prepared, chained), prepared, num_processes=processes)
        check_end(scheduler, prepared, schedule(plain, chained), plain, processes)


def test_chained_and_sequential_schedules_work():
    prepared = optimizer()
    chained = lr_scheduler.ChainedScheduler([halving(prepared), halving(prepared)], optimizer=prepared.optimizer)
    AcceleratedScheduler(chained, prepared).step()
    assert rate(prepared) == 0.25
    prepared = optimizer()
    parts = [lr_scheduler.ConstantLR(prepared.optimizer, factor=0.5, total_iters=10), halving(prepared)]
    sequential = AcceleratedScheduler(lr_scheduler.SequentialLR(prepared.optimizer, parts, milestones=[1]), prepared)
    sequential.step()
    sequential.step()
    assert rate(prepared) == 0.5


def test_it_shows_the_users_own():
    prepared = optimizer()
    inner = lr_scheduler.StepLR(prepared.optimizer, step_size=1, gamma=0.5)
    scheduler = AcceleratedScheduler(inner, prepared)
    assert not isinstance(scheduler, lr_scheduler.LRScheduler)
    assert scheduler.optimizers == [prepared]
    scheduler.step()
    assert scheduler.last_epoch == 1
    assert scheduler.base_lrs == [1.0]
    assert scheduler.state_dict() == inner.state_dict()
    saved = scheduler.state_dict()
    scheduler.step()
    scheduler.load_state_dict(saved)
    assert inner.last_epoch == 1
    with pytest.raises(AttributeError, match="missing"):
        scheduler.missing  # noqa: B018


def test_get_lr_is_passed_on():
    prepared = optimizer()
    scheduler = AcceleratedScheduler(lr_scheduler.LambdaLR(prepared.optimizer, lambda step: 0.5**step), prepared)
    with pytest.warns(UserWarning, match="get_last_lr"):
        assert scheduler.get_lr() == [1.0]


def test_it_pickles_and_copies():
    prepared = optimizer()
    scheduler = AcceleratedScheduler(halving(prepared), prepared, num_processes=2)
    scheduler.step()
    for again in (pickle.loads(pickle.dumps(scheduler)), copy.deepcopy(scheduler)):
        assert again.get_last_lr() == [0.25]
        again.step()
        assert again.get_last_lr() == [0.0625]
    assert rate(prepared) == 0.25


def one_update(unit: str | None) -> tuple[float, list[str]]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hasten").addHandler(handler)
    try:
        accelerator = Accelerator(cpu=True, scheduler_unit=unit)
        inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        schedules = [lr_scheduler.ExponentialLR(inner, gamma=0.5), lr_scheduler.ReduceLROnPlateau(inner)]
        prepared, scheduler, _ = accelerator.prepare(inner, *schedules)
        prepared.step()
        scheduler.step()
        return rate(prepared), told
    finally:
        logging.getLogger("hasten").removeHandler(handler)


@pytest.mark.parametrize(("unit", "expected"), [(None, 0.25), ("process", 0.25), ("update", 0.5)])
def test_the_unit_is_chosen_or_told_once(unit, expected):
    first, second = run_ranks(one_update, 2, unit)
    assert first[0] == second[0] == expected
    assert second[1] == []
    if unit is None:
        assert len(first[1]) == 1
        assert "ExponentialLR advances 2 steps per update" in first[1][0]
        assert 'Accelerator(scheduler_unit="update")' in first[1][0]
    else:
        assert first[1] == []
    assert one_update(unit) == (0.5, [])


def test_an_unknown_unit():
    with pytest.raises(ValueError, match="'process' and 'update'"):
        Accelerator(cpu=True, scheduler_unit="epoch")

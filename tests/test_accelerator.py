import copy
import gc
import inspect
import os
import pickle
import subprocess
import sys
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from hasten import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedType,
    GradientState,
    InitProcessGroupKwargs,
    PartialState,
    World,
)
from hasten.settings.enums import FP8BackendType
from hasten.training.optimizer import AcceleratedOptimizer
from hasten.training.scheduler import AcceleratedScheduler
from hasten.world import torch_private
from hasten.world.context import CONTEXT
from tests.plain import TinyDataset, TinyMLP
from tests.ranks import RankError, run_ranks
from tests.simulated_device import install

sgd = partial(torch.optim.SGD, lr=0.1)
halving = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)


def parts(batch: int = 8) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], Any]:
    model = TinyMLP()
    optimizer = sgd(model.parameters())
    return model, optimizer, DataLoader(TinyDataset(), batch), halving(optimizer)


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def linear() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


# ---- the constructor ----


def test_arguments_have_the_order_of_the_reference_and_ours_are_by_name_only():
    parameters = inspect.signature(Accelerator).parameters
    assert [name for name, value in parameters.items() if value.kind is not value.KEYWORD_ONLY] == [
        "device_placement", "split_batches", "mixed_precision", "gradient_accumulation_steps", "cpu", "dataloader_config",
        "deepspeed_plugin", "fsdp_plugin", "torch_tp_plugin", "megatron_lm_plugin", "rng_types", "log_with", "project_dir",
        "project_config", "gradient_accumulation_plugin", "step_scheduler_with_optimizer", "kwargs_handlers", "dynamo_backend",
        "dynamo_plugin", "deepspeed_plugins", "parallelism_config",
    ]  # fmt: skip
    assert [name for name, value in parameters.items() if value.kind is value.KEYWORD_ONLY] == ["world", "ranks"]


def test_what_an_accelerator_says_of_itself():
    accelerator = Accelerator()
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (1, 0, 0)
    assert (accelerator.device, accelerator.distributed_type) == (torch.device("cpu"), DistributedType.NO)
    assert accelerator.is_main_process
    assert accelerator.is_local_main_process
    assert accelerator.is_last_process
    assert accelerator.should_save_model
    assert (accelerator.mixed_precision, accelerator.scaler) == ("no", None)
    assert (accelerator.fp8_backend, accelerator.parallelism_config, accelerator.torch_device_mesh) == (
        FP8BackendType.NO,
        None,
        None,
    )
    assert accelerator.deepspeed_plugin is None
    for name in (
        "use_distributed", "multi_device", "native_amp", "fp8_enabled", "is_fsdp2", "is_composable_parallelism_enabled",
        "has_lomo_optimizer", "optimizer_step_was_skipped", "split_batches", "use_seedable_sampler", "non_blocking",
        "use_stateful_dataloader",
    ):  # fmt: skip
        assert getattr(accelerator, name) is False, name
    assert accelerator.device_placement
    assert accelerator.even_batches
    assert accelerator.step_scheduler_with_optimizer
    assert (accelerator.dispatch_batches, accelerator.trackers, accelerator.log_with, accelerator.flag_tensor) == (
        None,
        [],
        [],
        None,
    )
    assert accelerator.sync_gradients
    assert (accelerator.step, accelerator.save_iteration) == (0, 0)
    assert accelerator.world is CONTEXT.world
    assert isinstance(accelerator.gradient_state, GradientState)
    assert str(accelerator.state).endswith("Mixed precision type: no\n")
    with pytest.raises(AttributeError, match="'Accelerator' object has no attribute 'missing'"):
        accelerator.missing  # noqa: B018


def test_split_batches_is_obeyed_wherever_it_is_set():
    config = DataLoaderConfiguration()
    assert Accelerator(True, True, dataloader_config=config).split_batches
    assert config.split_batches
    assert not Accelerator(split_batches=False, dataloader_config=config).split_batches
    assert Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True)).split_batches


def test_the_configuration_of_loaders_is_held_by_reference():
    config = DataLoaderConfiguration()
    accelerator = Accelerator(dataloader_config=config)
    config.even_batches = False
    assert not accelerator.even_batches
    accelerator.even_batches = True
    assert config.even_batches
    assert accelerator.dataloader_config is config


def test_unknown_precisions_are_refused():
    with pytest.raises(
        ValueError, match=r"Unknown mixed_precision mode: fp32. Choose between \['no', 'fp8', 'fp16', 'bf16'\]"
    ):
        Accelerator(mixed_precision="fp32")


def test_a_second_accelerator_may_not_change_the_precision():
    Accelerator(mixed_precision="bf16")
    assert Accelerator().mixed_precision == "bf16"
    with pytest.raises(
        ValueError, match="AcceleratorState has already been initialized and cannot be changed, restart your runtime"
    ):
        Accelerator(mixed_precision="no")


# ---- prepare ----


def test_objects_come_back_prepared_in_their_order():
    accelerator = Accelerator()
    model, optimizer, loader, scheduler = parts()
    found = accelerator.prepare(scheduler, optimizer, loader, model)
    assert [type(item) for item in found[:2]] == [AcceleratedScheduler, AcceleratedOptimizer]
    assert found[0].optimizers == [found[1]]
    assert found[3] is model
    assert isinstance(found[2], DataLoader)
    assert all(item._is_accelerate_prepared for item in found)
    assert accelerator._models == [model]
    assert accelerator._optimizers == [found[1]]
    assert accelerator._schedulers == [found[0]]
    assert len(accelerator._dataloaders) == 1


@pytest.mark.parametrize("item", [None, 3, "text", [1], {}, Mock(), object(), torch.ones(1)])
def test_everything_else_passes_through_untouched(item: Any):
    accelerator = Accelerator()
    assert accelerator.prepare(item) is item
    assert accelerator.prepare(item, None)[0] is item
    assert "_is_accelerate_prepared" not in getattr(item, "__dict__", {})


def test_nothing_is_prepared_as_nothing():
    assert Accelerator().prepare() == ()


def test_what_is_prepared_stays_what_it_is():
    accelerator = Accelerator()
    raw = parts()
    first = accelerator.prepare(*raw)
    assert all(one is other for one, other in zip(accelerator.prepare(*first), first, strict=True))
    again = accelerator.prepare(raw[0], raw[1], raw[3])
    assert all(one is other for one, other in zip(again, (first[0], first[1], first[3]), strict=True))
    assert [
        len(held)
        for held in (accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders)
    ] == [1] * 4


def prepare_twice() -> list[bool]:
    accelerator = Accelerator()
    model = linear()
    first = accelerator.prepare(model)
    again, wrapped = accelerator.prepare(model), accelerator.prepare(first)
    return [again is first, wrapped is first, len(accelerator._models) == 1, accelerator.unwrap_model(first) is model]


def test_a_model_is_wrapped_once_even_if_it_is_given_twice():
    assert run_ranks(prepare_twice, 2) == [[True] * 4] * 2


def test_device_placement_needs_one_entry_per_object():
    with pytest.raises(
        ValueError,
        match=r"`device_placement` should be a list with 2 elements \(the number of objects passed\), but it has 1",
    ):
        Accelerator().prepare(linear(), None, device_placement=[True])


def test_a_scheduler_follows_its_own_optimizer_or_else_all():
    accelerator = Accelerator()
    first, second = sgd(linear().parameters()), sgd(linear().parameters())
    schedulers = halving(first), halving(second)
    one, two = accelerator.prepare(first, second)
    prepared = accelerator.prepare(*schedulers, halving(sgd(linear().parameters())))
    assert [scheduler.optimizers for scheduler in prepared] == [[one], [two], [one, two]]
    assert accelerator.prepare(halving(one)).optimizers == [one]


def place(device_placement: bool) -> list[str]:
    install("npu")
    accelerator = Accelerator(device_placement=device_placement)
    first, second, third = linear(), linear(), linear()
    optimizer = torch.optim.Adam(first.parameters())
    first(torch.ones(1)).backward()
    optimizer.step()
    first, _, second, optimizer = accelerator.prepare(
        first, None, second, optimizer, device_placement=[None, None, not device_placement, None]
    )
    third = accelerator.prepare_model(third, device_placement=True)
    moment = next(iter(optimizer.state.values()))["exp_avg"]
    return [
        str(accelerator.device),
        *(tensor.device.type for tensor in (first.weight, moment, second.weight, third.weight)),
    ]


def test_objects_go_to_the_device_unless_told_otherwise():
    assert run_ranks(place, 1, True, fresh=True, initialise=False, env={"RANK": None, "WORLD_SIZE": None}) == [
        ["npu:0", "npu", "npu", "cpu", "npu"]
    ]
    assert run_ranks(place, 1, False, fresh=True, initialise=False, env={"RANK": None, "WORLD_SIZE": None}) == [
        ["npu:0", "cpu", "cpu", "npu", "npu"]
    ]


def spread() -> nn.Module:
    model = nn.Sequential(linear(), linear())
    model[1].hf_device_map = {"a": 0, "b": "cpu"}
    return model


def prepare_spread() -> bool:
    model = spread()
    accelerator = Accelerator()
    return accelerator.verify_device_map(model) and accelerator.prepare(model).module is model


def test_a_model_that_is_spread_over_devices_is_refused_in_a_job():
    with pytest.raises(
        RankError,
        match=r"ValueError: You can't train a model that has been loaded with `device_map='auto'` in any distributed",
    ):
        run_ranks(prepare_spread, 2)
    assert run_ranks(prepare_spread, 2, env={"ACCELERATE_BYPASS_DEVICE_MAP": "true"}) == [True, True]


def test_alone_a_model_that_is_spread_over_devices_is_left_where_it_is():
    accelerator = Accelerator(world=World(device=torch.device("meta")))
    model = spread()
    assert accelerator.verify_device_map(model)
    assert accelerator.prepare(model)[0].weight.device.type == "cpu"
    model = linear()
    model.hf_device_map = {"": 0}
    assert not accelerator.verify_device_map(model)


# ---- unwrapping, explaining ----


def unwrap() -> list[Any]:
    accelerator = Accelerator(mixed_precision="bf16")
    model = TinyMLP()
    wrapped = accelerator.prepare(model)
    assert isinstance(wrapped, DistributedDataParallel)
    kept = accelerator.unwrap_model(wrapped)
    names = list(accelerator.get_state_dict(wrapped))
    prefixed = list(accelerator.get_state_dict(wrapped, unwrap=False))
    found = [
        kept is model,
        "_original_forward" in model.__dict__,
        names[0],
        prefixed[0],
        str(accelerator.explain(model)).splitlines()[3],
    ]
    bare = accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
    return [*found, bare is model, "_original_forward" in model.__dict__, len(pickle.dumps(model)) > 0]


def test_models_are_unwrapped():
    steps = "steps           autocast > to cpu > DistributedDataParallel"
    assert run_ranks(unwrap, 2) == [[True, True, "up.weight", "module.up.weight", steps, True, False, True]] * 2


def test_what_was_never_wrapped_is_itself():
    accelerator, model = Accelerator(), linear()
    assert accelerator.unwrap_model(model) is model
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model


class Compiled(nn.Module):
    """What torch.compile makes of a module, without compiling."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def test_compiled_models_stay_compiled_or_not():
    accelerator, model = Accelerator(), linear()
    compiled = Compiled(model)
    assert accelerator.unwrap_model(compiled) is compiled
    assert accelerator.unwrap_model(compiled, keep_torch_compile=False) is model


def test_explaining():
    accelerator = Accelerator(mixed_precision="bf16")
    assert str(accelerator.explain()) == "nothing has been prepared yet"
    model = accelerator.prepare(linear())
    assert accelerator.explain() == [accelerator.explain(model)]
    assert accelerator.explain(model).steps == ("autocast", "to cpu")
    with pytest.raises(
        ValueError,
        match=r"explain\(int\): this Accelerator has not prepared that object as a model; it has prepared \['Linear'\]",
    ):
        accelerator.explain(3)


# ---- accumulation ----


def test_two_accelerators_keep_their_own_steps():
    first, second = Accelerator(gradient_accumulation_steps=2), Accelerator(gradient_accumulation_steps=3)
    models = [linear(), linear()]
    (one, first_optimizer), (two, second_optimizer) = (
        accelerator.prepare(model, sgd(model.parameters(), lr=1.0))
        for accelerator, model in zip((first, second), models, strict=True)
    )
    steps = []
    for _ in range(6):
        for accelerator, model, optimizer in ((first, one, first_optimizer), (second, two, second_optimizer)):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.full((1, 1), 0.25)))
                optimizer.step()
                optimizer.zero_grad()
        steps.append((one.weight.item(), two.weight.item()))
    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (2, 3)
    assert [pair[0] for pair in steps] == [1.0, 0.75, 0.75, 0.5, 0.5, 0.25]
    assert [pair[1] for pair in steps] == pytest.approx([1.0, 1.0, 0.75, 0.75, 0.75, 0.5])
    assert GradientState().num_steps == 3


def test_an_optimizer_obeys_the_accelerator_that_prepared_it_last():
    first, second = Accelerator(gradient_accumulation_steps=2), Accelerator()
    model, optimizer, scheduler = linear(), None, None
    inner = sgd(model.parameters(), lr=1.0)
    model, optimizer, scheduler = first.prepare(model, inner, halving(inner))
    assert second.prepare(model, optimizer, scheduler) == (model, optimizer, scheduler)
    first.gradient_state.advance()
    second.backward(model(torch.full((1, 1), 0.5)))
    optimizer.step()
    scheduler.step()
    assert model.weight.item() == 0.5
    assert scheduler.get_last_lr() == [0.5]


def test_an_fp16_optimizer_can_be_handed_on():
    first, second = Accelerator(mixed_precision="fp16"), Accelerator()
    model = linear()
    model, optimizer = first.prepare(model, sgd(model.parameters(), lr=1.0))
    model, optimizer = second.prepare(model, optimizer)
    second.backward(model(torch.full((1, 1), 0.5)).sum())
    second.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert model.weight.item() == 0.5
    assert first.scaler is not second.scaler is optimizer.scaler


def test_steps_can_be_set():
    accelerator = Accelerator()
    accelerator.gradient_accumulation_steps = 4
    assert accelerator.gradient_state.plugin_kwargs == {"num_steps": 4}
    accelerator.sync_gradients = False
    assert not GradientState().sync_gradients
    accelerator.step = 7
    assert accelerator.gradient_state.step == 7
    for bad in (0, -1, 1.5, None):
        with pytest.raises(ValueError, match="must be a whole number of at least 1"):
            accelerator.gradient_accumulation_steps = bad  # type: ignore[assignment]


def test_the_loss_is_divided_and_arguments_go_on():
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = linear()
    loss = model(torch.ones(1, 1)).sum()
    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(loss)
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 0.5


def train(accumulation: int) -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def test_an_error_inside_a_window_leaves_the_model_in_order():
    assert run_ranks(fail_in_window, 2) == [[True, 1.5]] * 2


def fail_in_window() -> list[Any]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(linear())
    try:
        with accelerator.accumulate(model):
            raise KeyError
    except KeyError:
        pass
    synced = model.require_backward_grad_sync
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.full((1, 1), 2.0 * (1 + accelerator.process_index))))
    return [synced, model.module.weight.grad.item()]


def trigger() -> float:
    accelerator = Accelerator()
    model = accelerator.prepare(linear())
    with accelerator.no_sync(model):
        losses = [model(torch.full((1, 1), float(10**power * (1 + accelerator.process_index)))) for power in range(3)]
        for loss in losses[:2]:
            accelerator.backward(loss)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(losses[2])
    return model.module.weight.grad.item()


def test_several_forwards_and_one_exchange():
    assert run_ranks(trigger, 2) == [166.5, 166.5]


# ---- precision ----


def test_autocast_follows_the_precision():
    accelerator = Accelerator(mixed_precision="bf16")
    layer = linear()
    with accelerator.autocast():
        assert layer(torch.ones(1, 1)).dtype == torch.bfloat16
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert layer(torch.ones(1, 1)).dtype == torch.float32
    assert accelerator.native_amp
    assert accelerator.prepare(layer)(torch.ones(1, 1)).dtype == torch.float32


def test_autocast_changes_nothing_in_full_precision():
    with Accelerator().autocast():
        assert linear()(torch.ones(1, 1)).dtype == torch.float32


def test_the_handler_of_the_constructor_is_the_default():
    accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])
    with accelerator.autocast():
        assert linear()(torch.ones(1, 1)).dtype == torch.float32


# ---- clipping ----


def clip(kind: str) -> list[float]:
    accelerator = Accelerator()
    model = accelerator.prepare(linear())
    accelerator.backward(model(torch.full((1, 1), 2.0 * (1 + accelerator.process_index))))
    given = {
        "generator": iter(list(model.parameters())),
        "list": list(model.parameters()),
        "tensor": model.module.weight,
    }[kind]
    norm = accelerator.clip_grad_norm_(given, 1.5).item()
    clipped = model.module.weight.grad.item()
    accelerator.clip_grad_value_(model.parameters(), 0.5)
    return [norm, clipped, model.module.weight.grad.item()]


@pytest.mark.parametrize("kind", ["generator", "list", "tensor"])
def test_gradients_are_clipped_whatever_holds_them(kind: str):
    for found in run_ranks(clip, 2, kind):
        assert found == pytest.approx([3.0, 1.5, 0.5], rel=1e-5)


# ---- parts of a job ----


def two_models() -> dict[str, Any]:
    half = 0 if PartialState().process_index < 2 else 1
    accelerator = Accelerator(
        ranks=[[0, 1], [2, 3]][half], mixed_precision=["no", "bf16"][half], gradient_accumulation_steps=1 + half
    )
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    seen: list[torch.dtype] = []
    model.register_forward_pre_hook(
        lambda *_: seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32)
    )
    model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    for step in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((2, 4), 1.0 + accelerator.process_index + 10 * half + step)).mean())
            optimizer.step()
            optimizer.zero_grad()
    return {
        "place": (accelerator.process_index, accelerator.num_processes, accelerator.is_main_process),
        "precision": (accelerator.mixed_precision, accelerator.native_amp),
        "weights": accelerator.gather(model.module.weight.detach())[:, 0].tolist(),
        "ranks": accelerator.gather(torch.tensor([PartialState().process_index])).tolist(),
        "default": (PartialState().num_processes, GradientState().num_steps),
    }


def test_two_halves_of_a_job_train_two_models_at_once():
    found = run_ranks(two_models, 4)
    for rank, result in enumerate(found):
        half = rank // 2
        assert result["place"] == (rank % 2, 2, rank % 2 == 0)
        assert result["precision"] == (["no", "bf16"][half], bool(half))
        assert result["ranks"] == [[0, 1], [2, 3]][half]
        assert result["default"] == (4, 1 + half)
    # without accumulation the mean inputs are 1.5, 2.5, 3.5, 4.5; with it (11.5 + 12.5) / 2 and (13.5 + 14.5) / 2
    assert found[0]["weights"] == found[1]["weights"] == pytest.approx([1 - 0.1 * 12.0] * 2)
    assert found[2]["weights"] == found[3]["weights"] == pytest.approx([1 - 0.1 * 26.0] * 2, rel=0.01)


def overlapping() -> list[Any]:
    rank = PartialState().process_index
    found = []
    for ranks in ([0, 1], [1, 2], [0, 1, 2]):
        if rank in ranks:
            found.append(Accelerator(ranks=ranks).reduce(torch.tensor(float(rank))).item())
    return found


def test_a_rank_may_be_in_several_parts():
    assert run_ranks(overlapping, 3) == [[1.0, 3.0], [1.0, 3.0, 3.0], [3.0, 3.0]]


def own_state_of_a_part() -> list[Any]:
    whole = Accelerator(mixed_precision="bf16")
    part = Accelerator(ranks=[0, 1], mixed_precision="no", gradient_accumulation_steps=2)
    return [whole.mixed_precision, part.mixed_precision, whole.gradient_accumulation_steps, part.state is whole.state]


def test_a_part_does_not_disturb_the_whole():
    assert run_ranks(own_state_of_a_part, 2) == [["bf16", "no", 1, False]] * 2


# ---- timeouts ----


def timeouts(seconds: float | None) -> set[float]:
    handlers = [] if seconds is None else [InitProcessGroupKwargs(timeout=timedelta(seconds=seconds))]
    accelerator = Accelerator(kwargs_handlers=handlers)
    Accelerator(ranks=[0, 1]).wait_for_everyone()
    accelerator.wait_for_everyone()
    groups = torch_private.all_groups()
    assert len(groups) == 2
    return {time.total_seconds() for group in groups for time in torch_private.group_timeouts(group).values()}


@pytest.mark.parametrize(("asked", "found"), [(None, 1800.0), (7.0, 7.0), (5400.0, 5400.0)])
def test_every_group_waits_exactly_as_long_as_was_asked_for(asked: float | None, found: float):
    assert run_ranks(timeouts, 2, asked, initialise=False) == [{found}] * 2


def later_wish() -> list[float]:
    found = []
    for seconds in (50, 5):
        accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=seconds))])
        assert accelerator.world.timeout is not None
        found.append(accelerator.world.timeout.total_seconds())
    return found


def test_a_later_wish_holds_too():
    assert run_ranks(later_wish, 2) == [[50.0, 5.0]] * 2


def refused_backend() -> None:
    Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="mpi")])


def test_another_backend_is_refused():
    with pytest.raises(
        RankError, match="ValueError: backend='mpi' was asked for, but this process already communicates through 'gloo'"
    ):
        run_ranks(refused_backend, 2)


# ---- together and in turn ----


def in_turn() -> list[Any]:
    accelerator = Accelerator()
    found: list[Any] = []
    for first in (accelerator.main_process_first, accelerator.local_main_process_first):
        try:
            with first():
                if accelerator.is_main_process:
                    raise KeyError("only the first")
            found.append("released")
        except KeyError:
            found.append("raised")
    accelerator.wait_for_everyone()

    @accelerator.on_main_process
    def only_main() -> str:
        return "main"

    @accelerator.on_last_process
    def only_last() -> str:
        return "last"

    @accelerator.on_process(process_index=1)
    def only_second() -> str:
        return "second"

    @accelerator.on_local_process(local_process_index=0)
    def only_local() -> str:
        return "local"

    return [
        *found,
        only_main(),
        only_last(),
        only_second(),
        only_local(),
        accelerator.on_local_main_process(lambda: "local main")(),
    ]


def test_the_others_are_released_when_the_first_fails_and_decorators_choose():
    assert run_ranks(in_turn, 2) == [
        ["raised", "raised", "main", None, None, "local", "local main"],
        ["released", "released", None, "last", "second", None, None],
    ]


def test_decorators_without_a_function_are_explained():
    with pytest.raises(ValueError, match="`on_main_process` decorates a function"):
        Accelerator().on_main_process()


def flags() -> list[bool]:
    accelerator = Accelerator()
    found = [accelerator.check_trigger()]
    if accelerator.is_last_process:
        accelerator.set_trigger()
    return [*found, accelerator.check_trigger(), accelerator.check_trigger()]


@pytest.mark.parametrize("size", [1, 2])
def test_a_flag_that_one_raises_is_seen_by_all_once(size: int):
    assert run_ranks(flags, size) == [[False, True, False]] * size


def exchange() -> list[Any]:
    accelerator = Accelerator()
    rank = accelerator.process_index
    with accelerator.split_between_processes([1, 2, 3]) as mine:
        split = list(mine)
    padded = accelerator.pad_across_processes(torch.ones(1 + rank))
    return [
        accelerator.gather(torch.tensor([rank])).tolist(),
        accelerator.gather({"a": torch.tensor(rank)})["a"].tolist(),
        accelerator.gather_for_metrics([f"rank {rank}"], use_gather_object=True),
        accelerator.reduce(torch.tensor([1.0 + rank])).item(),
        accelerator.reduce(torch.tensor([1.0 + rank]), reduction="mean").item(),
        padded.tolist(),
        split,
    ]


def test_exchanges():
    same = [[0, 1], [0, 1], ["rank 0", "rank 1"], 3.0, 1.5]
    assert run_ranks(exchange, 2) == [[*same, [1.0, 0.0], [1, 2]], [*same, [1.0, 1.0], [3]]]


def say() -> None:
    Accelerator().print("once", end="!")


def test_printing_once_per_machine():
    assert run_ranks(say, 2).stdout == ["once!", ""]


# ---- what is not built yet ----


def test_methods_of_features_that_are_not_built_say_so():
    accelerator = Accelerator()
    for call, area in (
        (lambda: accelerator.join_uneven_inputs([]), "training semantics"),
        (lambda: accelerator.profile(), "observability"),
        (lambda: accelerator.lomo_backward(torch.ones(()), 0.1), "engines"),
    ):
        with pytest.raises(NotImplementedError, match=rf"not built yet \(area: {area}\)"):
            call()
    with pytest.raises(ValueError, match=r"'wandb' is not an available tracker: trackers are not built yet"):
        accelerator.get_tracker("wandb")
    accelerator.init_trackers("run")
    accelerator.log({"loss": 1.0})


def test_context_parallelism_that_is_off_says_so_once():
    accelerator = Accelerator()
    with pytest.warns(UserWarning, match="maybe_context_parallel has no effect: context parallelism is off"):
        context = accelerator.maybe_context_parallel()
    with context, accelerator.maybe_context_parallel(buffers=[], buffer_seq_dims=[]):
        pass


# ---- keeping, copying, forgetting ----


def test_objects_for_checkpoints_need_both_methods():
    class Half:
        def state_dict(self) -> dict[str, int]:
            return {}

    accelerator, good = Accelerator(), linear()
    with pytest.raises(
        ValueError, match=r"(?s)All `objects` must include.*- Item at index 0, `int`\n.*- Item at index 2, `Half`"
    ):
        accelerator.register_for_checkpointing(3, good, Half())
    assert accelerator._custom_objects == []
    accelerator.register_for_checkpointing(good)
    assert accelerator._custom_objects == [good]


def test_a_copy_is_the_same_accelerator():
    accelerator = Accelerator()
    assert copy.deepcopy(accelerator) is accelerator
    assert copy.deepcopy({"held": [accelerator]})["held"][0] is accelerator


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_an_accelerator_pickles_with_what_it_has_prepared(precision: str):
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2)
    _, optimizer, loader, scheduler = accelerator.prepare(*parts())
    again, optimizer, loader, scheduler = pickle.loads(pickle.dumps((accelerator, optimizer, loader, scheduler)))
    assert again.mixed_precision == precision
    assert again.gradient_accumulation_steps == 2
    assert again._optimizers == [optimizer]
    assert again._schedulers == [scheduler]
    assert optimizer.gradient_state is scheduler.gradient_state is again.gradient_state
    assert optimizer.scaler is again.scaler
    assert [len(batch[0]) for batch in again._dataloaders[0]] == [8] * 8


def test_an_unpickled_accelerator_trains():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = linear()
    objects = pickle.dumps((accelerator, accelerator.prepare(model, sgd(model.parameters(), lr=1.0))))
    again, (model, optimizer) = pickle.loads(objects)
    weights = []
    for _ in range(4):
        with again.accumulate(model):
            again.backward(model(torch.full((1, 1), 0.25)))
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.weight.item())
    assert weights == [1.0, 0.75, 0.75, 0.5]


def pickle_in_a_job() -> list[Any]:
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=20))])
    accelerator.prepare(DataLoader(TinyDataset(), 8))
    again = pickle.loads(pickle.dumps(accelerator))
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(Accelerator(ranks=[0, 1]))
    return [again.world is accelerator.world, again.process_index, len(list(again._dataloaders[0]))]


def test_an_accelerator_of_a_job_pickles():
    assert run_ranks(pickle_in_a_job, 2) == [[True, 0, 4], [True, 1, 4]]


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_forgotten_objects_can_be_collected(precision: str):
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        break
    assert accelerator.step == 1
    references = [
        weakref.ref(item) for item in (model, optimizer.optimizer, optimizer, scheduler, loader, loader.dataset)
    ]
    del batch
    model, optimizer, loader, scheduler = accelerator.free_memory(model, optimizer, loader, scheduler)
    assert (model, optimizer, loader, scheduler) == (None,) * 4
    assert [reference() for reference in references] == [None] * 6
    assert (accelerator.step, accelerator._models, accelerator.explain()) == (0, [], [])
    assert accelerator.clear() == []


def forget_in_a_job() -> list[bool]:
    accelerator = Accelerator()
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    del batch
    references = [weakref.ref(model.module), weakref.ref(optimizer), weakref.ref(loader)]
    model, optimizer, loader, scheduler = accelerator.free_memory(model, optimizer, loader, scheduler)
    gc.collect()
    return [reference() is None for reference in references]


def test_in_a_job_too():
    assert run_ranks(forget_in_a_job, 2) == [[True] * 3] * 2


def test_hooks_come_and_go(tmp_path: Path):
    accelerator = Accelerator()
    accelerator.prepare(linear())
    calls: list[Any] = []
    save = accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: calls.append(("save", len(models), len(weights)))
    )
    load = accelerator.register_load_state_pre_hook(lambda models, folder: calls.append(("load", len(models))))
    accelerator.save_state(tmp_path / "one")
    accelerator.load_state(tmp_path / "one")
    save.remove()
    load.remove()
    accelerator.save_state(tmp_path / "two")
    accelerator.load_state(tmp_path / "two")
    assert calls == [("save", 1, 1), ("load", 1)]


# ---- the end ----


def end() -> list[Any]:
    accelerator = Accelerator()
    accelerator.end_training()
    accelerator.end_training()
    found: list[Any] = [dist.is_initialized(), accelerator.process_index]
    for use in (
        accelerator.wait_for_everyone,
        lambda: accelerator.gather(torch.ones(1)),
        lambda: accelerator.reduce(torch.ones(1)),
    ):
        try:
            use()
            found.append("worked")
        except RuntimeError as error:
            found.append("the process group was ended (by `end_training()`" in str(error))
    return found


def test_training_ends_once_and_what_comes_after_is_told_so():
    assert run_ranks(end, 2) == [[False, rank, True, True, True] for rank in range(2)]


def test_alone_ending_changes_nothing():
    accelerator = Accelerator()
    accelerator.end_training()
    accelerator.end_training()
    assert accelerator.gather(torch.ones(2)).tolist() == [1.0, 1.0]


# ---- whole jobs ----


def mpi(family: str) -> list[Any]:
    rank, size = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        del os.environ[name]
    names = {
        "MPI": (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        "SLURM": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    }[family]
    os.environ.update(zip(names, (rank, size, rank, size), strict=True))
    accelerator = Accelerator(cpu=True)
    found = [
        accelerator.distributed_type.value,
        accelerator.num_processes,
        accelerator.process_index,
        accelerator.local_process_index,
    ]
    total = accelerator.reduce(torch.tensor(1.0)).item()
    exported = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    CONTEXT.reset()
    return [*found, total, exported if size != "1" else None]


@pytest.mark.parametrize("family", ["MPI", "PMI", "SLURM"])
def test_jobs_that_others_start_are_joined(family: str):
    assert run_ranks(mpi, 2, family, initialise=False) == [
        ["MULTI_CPU", 2, rank, rank, 2.0, [str(rank), "2", str(rank)]] for rank in range(2)
    ]
    assert run_ranks(mpi, 1, family, initialise=False) == [["NO", 1, 0, 0, 1.0, None]]


SCRIPT = """
import torch
from hasten import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(2, 1)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), torch.utils.data.DataLoader(torch.ones(8, 2), 2))
for batch in loader:
    accelerator.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()
total = accelerator.reduce(torch.tensor(accelerator.process_index + 1)).item()
accelerator.print(accelerator.distributed_type.value, accelerator.num_processes, len(loader), total)
{end}
"""


@pytest.mark.parametrize(
    "end", ["", "accelerator.end_training(); accelerator.end_training()"], ids=["silent", "end_training"]
)
def test_a_script_ends_without_a_word(tmp_path: Path, end: str):
    (tmp_path / "script.py").write_text(SCRIPT.format(end=end))
    command = [sys.executable, "-W", "error", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("NO 1 4 1\n", "", 0)


def test_torchrun_without_an_accelerator_starts_one_job_that_ends_without_a_word(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT.format(end=""))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", "script.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, env=environment)
    assert (done.stdout, done.stderr, done.returncode) == ("MULTI_CPU 2 2 3\n", "", 0)


def on_a_device(device: str) -> list[float]:
    if device != "cpu":
        install(device)
    accelerator = Accelerator(cpu=device == "cpu")
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    losses = []
    for batch in loader:
        assert batch[0].device.type == device
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.free_memory()
    return losses


def test_an_accelerator_computes_what_the_cpu_computes():
    env = {"RANK": None, "WORLD_SIZE": None}
    (cpu,) = run_ranks(on_a_device, 1, "cpu", fresh=True, initialise=False, env=env)
    (npu,) = run_ranks(on_a_device, 1, "npu", fresh=True, initialise=False, env=env)
    assert npu == pytest.approx(cpu, rel=1e-6)
    assert cpu[-1] < cpu[0]

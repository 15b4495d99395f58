import inspect
import pickle
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from hasten import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedType,
    GradientState,
    World,
)
from hasten.settings.enums import FP8BackendType
from hasten.training.optimizer import AcceleratedOptimizer
from hasten.training.scheduler import AcceleratedScheduler
from hasten.world.context import CONTEXT
from tests.plain import TinyMLP, halving, parts, sgd
from tests.ranks import RankError, run_ranks
from tests.simulated_device import install


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
    own = [name for name, value in parameters.items() if value.kind is value.KEYWORD_ONLY]
    assert own == ["world", "ranks", "scheduler_unit"]


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
        match=r"explain\(int\): this Accelerator has not prepared that object .* or a data loader; it has prepared \['Linear'\]",
    ):
        accelerator.explain(3)


# ---- what is not built yet ----


def test_methods_of_features_that_are_not_built_say_so():
    accelerator = Accelerator()
    for call, area in (
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


def test_a_window_that_is_left_by_loading_adds_nothing_to_the_next(tmp_path):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = linear()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_state(str(tmp_path / "saved"))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, model.in_features)).sum())
    assert model.weight.grad is not None
    accelerator.load_state(str(tmp_path / "saved"))
    assert model.weight.grad is None

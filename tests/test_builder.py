from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten import (
    Accelerator,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradientState,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ParallelismConfig,
    ProfileKwargs,
    ProjectConfiguration,
    World,
    builder,
)
from hasten.settings.enums import DynamoBackend, RNGType
from hasten.settings.kwargs import KwargsHandler
from hasten.world.context import CONTEXT
from tests.ranks import run_ranks

META = World(device=torch.device("meta"))

# ---- what is not built yet ----


@pytest.mark.parametrize(
    ("argument", "value", "area"),
    [
        ("deepspeed_plugin", object(), "engines"),
        ("deepspeed_plugins", {"a": object()}, "engines"),
        ("torch_tp_plugin", object(), "N-D parallelism"),
        ("megatron_lm_plugin", object(), "engines"),
        ("log_with", "all", "trackers"),
        ("log_with", ["tensorboard"], "trackers"),
        ("dynamo_backend", "inductor", "compilation"),
        ("dynamo_backend", DynamoBackend.EAGER, "compilation"),
        ("dynamo_plugin", object(), "compilation"),
    ],
)
def test_arguments_of_features_that_are_not_built_are_refused(argument: str, value: Any, area: str):
    with pytest.raises(
        NotImplementedError, match=rf"Accelerator\({argument}=...\) is not built yet \(area: {area}\). Leave it out"
    ):
        Accelerator(**{argument: value})
    assert CONTEXT.world is None


@pytest.mark.parametrize(
    "arguments",
    [{"log_with": []}, {"dynamo_backend": "no"}, {"dynamo_backend": DynamoBackend.NO}, {"fsdp_plugin": None}],
)
def test_switching_them_off_is_fine(arguments: dict[str, Any]):
    Accelerator(**arguments)


@pytest.mark.parametrize(
    ("variable", "value", "area"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "1", "engines"),
        ("ACCELERATE_USE_MEGATRON_LM", "yes", "engines"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "N-D parallelism"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "compilation"),
        ("ACCELERATE_CPU_AFFINITY", "1", "NUMA affinity"),
    ],
)
def test_variables_of_features_that_are_not_built_are_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, area: str
):
    monkeypatch.setenv(variable, value)
    with pytest.raises(
        NotImplementedError,
        match=rf"The environment variable {variable}={value}, .*asks for.*\(area: {area}\). Leave it out",
    ):
        Accelerator()
    for off in ("", "no", "NO", "false", "0"):
        monkeypatch.setenv(variable, off)
        Accelerator()


# ---- handlers ----


def test_each_handler_is_found_under_its_name():
    handlers = [
        AutocastKwargs(cache_enabled=False),
        GradScalerKwargs(),
        DistributedDataParallelKwargs(),
        InitProcessGroupKwargs(),
        ProfileKwargs(),
    ]
    accelerator = Accelerator(kwargs_handlers=handlers)
    names = ["autocast_handler", "scaler_handler", "ddp_handler", "init_handler", "profile_handler"]
    for name, handler in zip(names, handlers, strict=True):
        assert getattr(accelerator, name) is handler
    for name in ("fp8_recipe_handler", "ao_recipe_handler", "te_recipe_handler", "msamp_recipe_handler"):
        assert getattr(accelerator, name) is None
    assert all(getattr(Accelerator(), name) is None for name in names)
    with pytest.raises(AttributeError, match="'Accelerator' object has no attribute 'other_handler'"):
        accelerator.other_handler  # noqa: B018


@dataclass
class MyAutocast(AutocastKwargs):
    pass


@dataclass
class Unknown(KwargsHandler):
    pass


def test_a_handler_of_ones_own_kind_counts_as_its_base():
    own = MyAutocast()
    assert Accelerator(kwargs_handlers=[own]).autocast_handler is own
    with pytest.raises(ValueError, match="You can only pass one AutocastKwargs in `kwargs_handlers`"):
        builder.sort_handlers([own, AutocastKwargs()])


@pytest.mark.parametrize("bad", [3, "fp16", None, AutocastKwargs])
def test_what_is_not_a_handler_is_refused_with_a_list(bad: Any):
    with pytest.raises(
        AssertionError,
        match=r"Unsupported kwargs handler passed: .*must be one that inherits `KwargsHandler`: Distributed",
    ):
        Accelerator(kwargs_handlers=[bad])


def test_a_handler_without_use_is_refused_with_a_list():
    with pytest.raises(
        KeyError,
        match=r"Unknown cannot be passed in `kwargs_handlers`; allowed: DistributedDataParallelKwargs, GradScal",
    ):
        Accelerator(kwargs_handlers=[Unknown()])


# ---- accumulation ----


def test_the_number_of_steps(monkeypatch: pytest.MonkeyPatch):
    assert Accelerator().gradient_accumulation_steps == 1
    assert Accelerator(gradient_accumulation_steps=3).gradient_accumulation_steps == 3
    plugin = GradientAccumulationPlugin(num_steps=4, sync_each_batch=True)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    assert (accelerator.gradient_accumulation_steps, accelerator.gradient_state.sync_each_batch) == (4, True)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "5")
    assert Accelerator(gradient_accumulation_steps=3).gradient_accumulation_steps == 5
    assert Accelerator(gradient_accumulation_plugin=plugin).gradient_accumulation_steps == 4


@pytest.mark.parametrize("steps", [0, -2, 1.5, "3", True])
def test_a_bad_number_of_steps_is_refused(steps: Any):
    with pytest.raises(ValueError, match="must be a whole number of at least 1"):
        Accelerator(gradient_accumulation_steps=steps)


@pytest.mark.parametrize("text", ["0", "two", "1.5"])
def test_a_bad_number_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch, text: str):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", text)
    with pytest.raises(
        ValueError,
        match=r"The environment variable ACCELERATE_GRADIENT_ACCUMULATION_STEPS is .*must be a whole number of at least 1",
    ):
        Accelerator()


def test_steps_and_a_plugin_are_too_much():
    with pytest.raises(
        ValueError, match="You can only pass one of `gradient_accumulation_steps` and `gradient_accumulation_plugin`"
    ):
        Accelerator(gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2))


# ---- project ----


def test_the_folder_of_the_run(tmp_path: Path):
    assert Accelerator().project_dir is None
    accelerator = Accelerator(project_dir=tmp_path)
    assert accelerator.project_dir == accelerator.logging_dir == tmp_path
    config = ProjectConfiguration(logging_dir="logs")
    accelerator = Accelerator(project_dir=tmp_path, project_config=config)
    assert (accelerator.project_dir, accelerator.logging_dir) == (tmp_path, "logs")
    assert accelerator.project_configuration is config
    accelerator = Accelerator(project_dir=tmp_path, project_config=ProjectConfiguration("kept", iteration=3))
    assert (accelerator.project_dir, accelerator.save_iteration) == ("kept", 3)


# ---- random generators ----


def test_generators_to_synchronise():
    assert Accelerator().rng_types == ["generator"]
    assert Accelerator(rng_types=["torch", RNGType.GENERATOR]).rng_types == ["torch", RNGType.GENERATOR]
    assert Accelerator(rng_types=[]).rng_types == []
    with pytest.raises(
        ValueError, match=r"rng_types=\['torch', 'dice'\]: 'dice' is unknown; choose from \['torch', 'cuda'"
    ):
        Accelerator(rng_types=["torch", "dice"])


# ---- worlds ----


def test_a_world_and_ranks_are_too_much():
    with pytest.raises(ValueError, match="Pass `world` or `ranks`, not both"):
        Accelerator(world=World(), ranks=[0])


def test_a_world_is_what_it_is():
    with pytest.raises(
        ValueError, match=r"InitProcessGroupKwargs\(timeout\) cannot change a world that exists already"
    ):
        Accelerator(world=World(), kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=1))])
    with pytest.raises(ValueError, match="cpu=True contradicts `world`, which is on meta"):
        Accelerator(world=META, cpu=True)
    assert Accelerator(world=META).device == torch.device("meta")
    assert Accelerator(world=World(), cpu=True).device == torch.device("cpu")


def test_ranks_that_do_not_exist_are_refused():
    with pytest.raises(
        ValueError, match=r"ranks=\[0, 1\]: each must be a different number from 0 to 0; this job has 1 process"
    ):
        Accelerator(ranks=[0, 1])


# ---- the mesh ----


def test_a_mesh_that_is_not_built_is_refused():
    for axis in ("dp_shard", "tp", "cp", "sp"):
        with pytest.raises(NotImplementedError, match=rf"ParallelismConfig with settings for {axis} is not built yet"):
            Accelerator(parallelism_config=ParallelismConfig(**{f"{axis}_size": 2}))
    with pytest.raises(NotImplementedError, match="ParallelismConfig with settings for tp is not built yet"):
        Accelerator(parallelism_config=ParallelismConfig(tp_handler=object()))


def test_a_mesh_that_does_not_fit_is_refused_and_nothing_is_left_behind():
    with pytest.raises(
        ValueError,
        match=r"ParallelismConfig\(dp_replicate_size=4, dp_shard_size=1\) does not fit 1 processes. Start 4 \(`hasten launch",
    ):
        Accelerator(mixed_precision="bf16", parallelism_config=ParallelismConfig(dp_replicate_size=4))
    assert Accelerator(mixed_precision="no").mixed_precision == "no"


@pytest.mark.parametrize("bad", [{"tp_size": 2}, 4, "dp_replicate=2"])
def test_what_is_not_a_mesh_is_refused(bad: Any):
    with pytest.raises(
        ValueError,
        match=r"parallelism_config=.* is not a ParallelismConfig, e.g. ParallelismConfig\(dp_replicate_size=2\)",
    ):
        Accelerator(parallelism_config=bad)


def with_mesh() -> list[Any]:
    config = ParallelismConfig(dp_replicate_size=2)
    accelerator = Accelerator(parallelism_config=config)
    return [
        accelerator.parallelism_config is config,
        accelerator.data_parallel_rank,
        accelerator.data_parallel_shard_rank,
        accelerator.tensor_parallel_rank,
        accelerator.context_parallel_rank,
    ]


def test_positions_in_a_mesh():
    assert run_ranks(with_mesh, 2) == [[True, 0, 0, 0, 0], [True, 1, 0, 0, 0]]


def test_positions_without_a_mesh():
    accelerator = Accelerator()
    for name, meaning in (
        ("tensor_parallel_rank", "Tensor parallelism"),
        ("data_parallel_rank", "Data parallelism"),
        ("data_parallel_shard_rank", "Shard-based data parallelism"),
        ("context_parallel_rank", "Context parallelism"),
    ):
        with pytest.raises(RuntimeError, match=f"{meaning} is not configured. Set `parallelism_config` first"):
            getattr(accelerator, name)
    with pytest.raises(NotImplementedError, match="Pipeline parallelism is not built yet"):
        accelerator.pipeline_parallel_rank  # noqa: B018


# ---- failures ----


@pytest.mark.parametrize(
    "arguments",
    [
        {"mixed_precision": "fp8"},
        {"mixed_precision": "half"},
        {"kwargs_handlers": [3]},
        {"gradient_accumulation_steps": 0},
        {"rng_types": ["x"]},
    ],
)
def test_a_refused_accelerator_leaves_the_state_of_the_others_alone(arguments: dict[str, Any]):
    first = Accelerator(gradient_accumulation_steps=2)
    with pytest.raises((ValueError, NotImplementedError, AssertionError)):
        Accelerator(**arguments)
    assert GradientState().__dict__ is first.gradient_state.__dict__
    assert Accelerator(mixed_precision="no").mixed_precision == "no"


# ---- sharding ----


def test_who_shards(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    assert builder.choose_sharding(None) is None
    plugin = FullyShardedDataParallelPlugin()
    Accelerator(cpu=True, fsdp_plugin=plugin)
    assert Accelerator().state.fsdp_plugin is builder.choose_sharding(None) is plugin
    # What was told to other libraries is not what the user has set.
    assert builder.choose_sharding(None, own_world=True) is None
    assert Accelerator(world=World(device=torch.device("cpu"))).state.fsdp_plugin is None


def test_a_variable_of_the_users_shards_every_world(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    for own_world in (False, True):
        assert isinstance(builder.choose_sharding(None, own_world), FullyShardedDataParallelPlugin)

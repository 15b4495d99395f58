"""From the arguments of `Accelerator(...)` to a session: what was asked for is checked once, here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hasten.parallel.replicate import Replicate
from hasten.session import Session
from hasten.settings import environment
from hasten.settings.accumulation import GradientAccumulationPlugin
from hasten.settings.dataloading import DataLoaderConfiguration
from hasten.settings.enums import RNGType
from hasten.settings.handlers import (
    AutocastKwargs,
    DistributedDataParallelSettings,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from hasten.settings.kwargs import KwargsHandler
from hasten.settings.parallelism import AXES, ParallelismSizes
from hasten.settings.project import ProjectConfiguration
from hasten.state.accelerator import AcceleratorState, read_precision
from hasten.world import process
from hasten.world.process import World

if TYPE_CHECKING:
    from hasten.protocols import Engine
    from hasten.training.preemption import Preemption

# The attribute of the Accelerator under which each kind of handler is found.
HANDLERS: dict[str, type[KwargsHandler]] = {
    "ddp_handler": DistributedDataParallelSettings,
    "scaler_handler": GradScalerKwargs,
    "init_handler": InitProcessGroupKwargs,
    "autocast_handler": AutocastKwargs,
    "profile_handler": ProfileKwargs,
}

# Handlers of fp8, which is not built yet: nobody can pass one, but other libraries look whether one was passed.
_FP8_HANDLERS = ("fp8_recipe_handler", "ao_recipe_handler", "te_recipe_handler", "msamp_recipe_handler")

# Arguments whose feature is not built yet, with the area of work that will bring it.
_NOT_BUILT = {
    "deepspeed_plugin": "engines",
    "deepspeed_plugins": "engines",
    "torch_tp_plugin": "N-D parallelism",
    "megatron_lm_plugin": "engines",
    "log_with": "trackers",
    "dynamo_backend": "compilation",
    "dynamo_plugin": "compilation",
}
_NOT_BUILT_ENVIRONMENT = {
    "ACCELERATE_USE_DEEPSPEED": "engines",
    "ACCELERATE_USE_MEGATRON_LM": "engines",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "N-D parallelism",
    "ACCELERATE_DYNAMO_BACKEND": "compilation",
    "ACCELERATE_DYNAMO_MODE": "compilation",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "compilation",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "compilation",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "compilation",
    "ACCELERATE_CPU_AFFINITY": "NUMA affinity",
}
_OFF = ("", "0", "false", "no", "off", "n", "f", "default")


def refuse_unbuilt(arguments: dict[str, Any]) -> None:
    """Raise for an argument or variable whose feature does not exist yet.

    Raises:
        NotImplementedError: names the setting and the area.
    """
    for name, area in _NOT_BUILT.items():
        value = arguments.get(name)
        if value is not None and str(getattr(value, "value", value)).lower() != "no" and value != []:
            raise NotImplementedError(
                f"Accelerator({name}=...) is not built yet (area: {area}). Leave it out; nothing would obey it."
            )
    for variable, area in _NOT_BUILT_ENVIRONMENT.items():
        if (environment.raw(variable) or "").lower() not in _OFF:
            raise NotImplementedError(
                f"The environment variable {variable}={environment.raw(variable)}, which a flag or a configuration file may have "
                f"set, asks for something that is not built yet (area: {area}). Leave it out."
            )


def check_kinds(**arguments: tuple[Any, type]) -> None:
    """Raise for an argument that is not None and not of its class.

    Raises:
        TypeError: names the argument and both classes.
    """
    for name, (value, kind) in arguments.items():
        if value is not None and not isinstance(value, kind):
            raise TypeError(
                f"Accelerator({name}={value!r}): a {kind.__name__} is needed, this is a {type(value).__name__}. For example "
                f"`{name}={kind.__name__}(...)`."
            )


def sort_handlers(handlers: Sequence[Any] | None) -> dict[str, KwargsHandler | None]:
    """Each handler under its name.

    Raises:
        AssertionError: something is not a handler.
        ValueError: two handlers of one kind.
        KeyError: a kind of handler that an Accelerator has no use for.
    """
    found: dict[str, KwargsHandler | None] = dict.fromkeys((*HANDLERS, *_FP8_HANDLERS))
    allowed = [kind.__name__.replace("Settings", "Kwargs") for kind in HANDLERS.values()]
    for handler in handlers or ():
        if not isinstance(handler, KwargsHandler):
            raise AssertionError(
                f"Unsupported kwargs handler passed: {handler}, must be one that inherits `KwargsHandler`: {', '.join(allowed)}."
            )
        name = next((name for name, kind in HANDLERS.items() if isinstance(handler, kind)), None)
        if name is None:
            raise KeyError(
                f"{type(handler).__name__} cannot be passed in `kwargs_handlers`; allowed: {', '.join(allowed)}."
            )
        if found[name] is not None:
            raise ValueError(f"You can only pass one {type(handler).__name__} in `kwargs_handlers`.")
        found[name] = handler
    return found


def choose_accumulation(steps: int, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    """The accumulation settings: the plugin's, else the environment's, else the argument's.

    Raises:
        ValueError: both a plugin and a number of steps.
    """
    if plugin is not None:
        if steps != 1:
            raise ValueError(
                "You can only pass one of `gradient_accumulation_steps` and `gradient_accumulation_plugin`. Please only pass in "
                "the created `GradientAccumulationPlugin` object."
            )
        return plugin
    from_environment = environment.get("gradient_accumulation_steps")
    return GradientAccumulationPlugin(num_steps=steps if from_environment is None else from_environment)


def choose_project(directory: Any, config: ProjectConfiguration | None) -> ProjectConfiguration:
    """The project settings, with the directory filled in."""
    config = ProjectConfiguration(project_dir=directory) if config is None else config
    if directory is not None and config.project_dir is None:
        config.set_directories(directory)
    return config


def choose_rng_types(rng_types: Sequence[Any] | None) -> list[Any]:
    """The generators that loaders synchronise: their own by default.

    Raises:
        ValueError: an unknown generator.
    """
    if rng_types is None:
        return [RNGType.GENERATOR.value]
    for kind in rng_types:
        if kind not in RNGType:
            raise ValueError(f"rng_types={rng_types!r}: {kind!r} is unknown; choose from {RNGType.list()}.")
    return list(rng_types)


def choose_world(world: World | None, ranks: Sequence[int] | None, cpu: bool, group: dict[str, Any]) -> World | None:
    """The world of its own that an Accelerator asks for, or None for the default world.

    Raises:
        ValueError: both a world and ranks, or a world and something that was settled when it was made.
    """
    if world is not None and ranks is not None:
        raise ValueError("Pass `world` or `ranks`, not both: `ranks` makes a world of some ranks of the default one.")
    if world is not None and group:
        raise ValueError(
            f"InitProcessGroupKwargs({', '.join(group)}) cannot change a world that exists already: leave out one of them."
        )
    if world is not None and cpu and not world.row.is_cpu:
        raise ValueError(f"cpu=True contradicts `world`, which is on {world.device}: leave out one of them.")
    if ranks is not None:
        return process.start(cpu, **group).part(ranks)
    return world


def choose_sharding(plugin: Any, own_world: bool = False) -> Any:
    """The plugin that was passed, or that of the default world's Accelerators, or one from the environment, or None.

    A world of its own obeys what the user or the launcher has set, and not what another Accelerator has told other libraries.

    Raises:
        TypeError: something else was passed.
    """
    if plugin is None and not own_world and AcceleratorState._shared_state:
        return AcceleratorState._shared_state.get("fsdp_plugin")
    if plugin is None and not _environment_shards(own_world):
        return None
    from hasten.parallel.fsdp import FullyShardedDataParallelPlugin

    check_kinds(fsdp_plugin=(plugin, FullyShardedDataParallelPlugin))
    return FullyShardedDataParallelPlugin() if plugin is None else plugin


def _environment_shards(own_world: bool) -> bool:
    shards = bool(environment.get("use_fsdp"))
    if not (shards and own_world):
        return shards
    from hasten.settings import export

    return bool(environment.get("use_fsdp", {"ACCELERATE_USE_FSDP": export.before("use_fsdp") or ""}))


def open_engine(plugin: Any, config: Any, state: AcceleratorState, handler: Any) -> Engine:
    """The engine that shards, or the one that replicates: without a plugin, without ranks to share with."""
    world = state.world
    if plugin is None:
        return Replicate(world, handler)
    shards, copies = plugin.shards_and_copies(world.size, world.local_size)
    if config is not None and config.total_size > 1:
        shards, copies = config.dp_shard_size, config.dp_replicate_size
    if world.group is None or (shards == 1 and world.size > 1):
        sharding = plugin.sharding()
        return Replicate(world, handler, sharding.transforms, sharding.initialise)
    from hasten.parallel.shard import Shard
    from hasten.world.mesh import build_mesh

    plugin.set_mixed_precision(state.mixed_precision)
    sizes = ParallelismSizes(dp_replicate_size=copies, dp_shard_size=shards)
    return Shard(world, build_mesh(sizes, world, sharded=True), plugin.sharding())


def check_parallelism(config: Any, world: World, shards: bool) -> None:
    """Refuse mesh axes that nothing works on yet.

    Raises:
        ValueError: the sizes do not multiply to the number of ranks.
        NotImplementedError: an axis other than those of data.
    """
    if config is None:
        return
    if not isinstance(config, ParallelismSizes):
        raise ValueError(
            f"parallelism_config={config!r} is not a ParallelismConfig, e.g. ParallelismConfig(dp_replicate_size=2)."
        )
    others = [
        axis
        for axis in AXES
        if axis not in ("dp_replicate", "dp_shard" if shards else "")
        and (config.size(axis) > 1 or getattr(config, f"{axis}_handler", None) is not None)
    ]
    if others:
        raise NotImplementedError(
            f"ParallelismConfig with settings for {', '.join(others)} is not built yet (area: N-D parallelism). Only "
            "dp_replicate_size is, and dp_shard_size with a FullyShardedDataParallelPlugin."
        )
    if config.total_size not in (1, world.size):
        raise ValueError(
            f"ParallelismConfig(dp_replicate_size={config.dp_replicate_size}, dp_shard_size={config.dp_shard_size}) does not fit "
            f"{world.size} processes. Start {config.total_size} (`hasten launch --num_processes {config.total_size}`) or change a "
            "size."
        )


def check_outputs(handler: Any, precision: str) -> None:
    """Refuse a format for outputs where models return what they compute.

    Raises:
        ValueError: `output_dtype` without mixed precision.
    """
    if precision == "no" and handler is not None and handler.output_dtype != AutocastKwargs.output_dtype:
        raise ValueError(
            f"AutocastKwargs(output_dtype={handler.output_dtype!r}) needs mixed precision: with mixed_precision='no' a model "
            "returns what it computes. Choose 'bf16' or 'fp16', or leave it out."
        )


def watch_signals(session: Session, project: ProjectConfiguration) -> Preemption | None:
    """Wait for the signals that announce the end of a machine, if that is asked for.

    Raises:
        ValueError: there is no folder to save to.
    """
    if not project.save_on_signal:
        return None
    if project.project_dir is None:
        raise ValueError(
            f"ProjectConfiguration(save_on_signal={project.save_on_signal!r}) needs the folder of the run to save to: pass "
            "`project_dir` to Accelerator or ProjectConfiguration."
        )
    from hasten import saving
    from hasten.training.preemption import Preemption

    return Preemption(
        project.save_on_signal, session.world, session.gradients, lambda: saving.save_preempted(session, project)
    )


def open_session(
    *,
    device_placement: bool,
    mixed_precision: Any,
    gradient_accumulation_steps: int,
    cpu: bool,
    dataloader_config: DataLoaderConfiguration,
    rng_types: Sequence[Any] | None,
    gradient_accumulation_plugin: GradientAccumulationPlugin | None,
    step_scheduler_with_optimizer: bool,
    scheduler_unit: str | None,
    fsdp_plugin: Any,
    kwargs_handlers: Sequence[Any] | None,
    parallelism_config: Any,
    world: World | None,
    ranks: Sequence[int] | None,
) -> Session:
    """Join the job, settle the precision, and open the session of one Accelerator."""
    if scheduler_unit not in (None, "process", "update"):
        raise ValueError(f"Accelerator(scheduler_unit={scheduler_unit!r}): allowed are 'process' and 'update'.")
    handlers = sort_handlers(kwargs_handlers)
    accumulation = choose_accumulation(gradient_accumulation_steps, gradient_accumulation_plugin)
    init = handlers["init_handler"]
    group = {} if init is None else init.to_kwargs()
    own_world = choose_world(world, ranks, cpu, group)
    plugin = choose_sharding(fsdp_plugin, own_world is not None)
    check_parallelism(parallelism_config, own_world or process.start(cpu, **group), shards=plugin is not None)
    known = {} if own_world is not None else AcceleratorState._shared_state
    precision = known.get("_mixed_precision") or read_precision(mixed_precision)
    check_outputs(handlers["autocast_handler"], precision)
    state = AcceleratorState(
        mixed_precision=mixed_precision,
        cpu=cpu,
        fsdp_plugin=plugin,
        parallelism_config=parallelism_config,
        _from_accelerator=True,
        **({} if own_world is None else {"_world": own_world}),
    )
    return Session(
        state,
        accumulation,
        handlers,
        device_placement,
        dataloader_config,
        choose_rng_types(rng_types),
        step_scheduler_with_optimizer,
        scheduler_unit,
        open_engine(plugin, parallelism_config, state, handlers["ddp_handler"]),
    )

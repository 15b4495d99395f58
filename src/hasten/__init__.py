"""hasten: plain PyTorch loops that run unchanged on one CPU, eight GPUs or a thousand nodes.

Public names are imported when they are first used, so that `import hasten` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hasten.version import __version__ as __version__

# Public name -> the module that defines it.
_HOMES = {
    "Accelerator": "hasten.accelerator",
    "AcceleratorState": "hasten.state.accelerator",
    "AutocastKwargs": "hasten.settings.handlers",
    "DDPCommunicationHookType": "hasten.settings.enums",
    "DataLoaderConfiguration": "hasten.settings.dataloading",
    "DistributedDataParallelKwargs": "hasten.parallel.replicate",
    "DistributedType": "hasten.settings.enums",
    "ExponentialMovingAverage": "hasten.training.moving_average",
    "FullyShardedDataParallelPlugin": "hasten.parallel.fsdp",
    "GradScalerKwargs": "hasten.settings.handlers",
    "GradientAccumulationPlugin": "hasten.settings.accumulation",
    "GradientState": "hasten.training.accumulation",
    "InitProcessGroupKwargs": "hasten.settings.handlers",
    "MissingProcessError": "hasten.world.arrivals",
    "ParallelismConfig": "hasten.world.mesh",
    "PartialState": "hasten.state.partial",
    "ProfileKwargs": "hasten.settings.handlers",
    "ProjectConfiguration": "hasten.settings.project",
    "World": "hasten.world.process",
    "debug_launcher": "hasten.launch.notebook",
    "find_executable_batch_size": "hasten.training.batch_size",
    "notebook_launcher": "hasten.launch.notebook",
    "prepare_data_loader": "hasten.data.loader",
    "set_seed": "hasten.world.rng",
    "skip_first_batches": "hasten.data.skip",
    "synchronize_rng_states": "hasten.world.rng",
}

__all__ = sorted([*_HOMES, "__version__"])

if TYPE_CHECKING:
    from hasten.accelerator import Accelerator as Accelerator
    from hasten.data.loader import prepare_data_loader as prepare_data_loader
    from hasten.data.skip import skip_first_batches as skip_first_batches
    from hasten.launch.notebook import debug_launcher as debug_launcher
    from hasten.launch.notebook import notebook_launcher as notebook_launcher
    from hasten.parallel.fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from hasten.parallel.replicate import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from hasten.settings.accumulation import GradientAccumulationPlugin as GradientAccumulationPlugin
    from hasten.settings.dataloading import DataLoaderConfiguration as DataLoaderConfiguration
    from hasten.settings.enums import DDPCommunicationHookType as DDPCommunicationHookType
    from hasten.settings.enums import DistributedType as DistributedType
    from hasten.settings.handlers import AutocastKwargs as AutocastKwargs
    from hasten.settings.handlers import GradScalerKwargs as GradScalerKwargs
    from hasten.settings.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
    from hasten.settings.handlers import ProfileKwargs as ProfileKwargs
    from hasten.settings.project import ProjectConfiguration as ProjectConfiguration
    from hasten.state.accelerator import AcceleratorState as AcceleratorState
    from hasten.state.partial import PartialState as PartialState
    from hasten.training.accumulation import GradientState as GradientState
    from hasten.training.batch_size import find_executable_batch_size as find_executable_batch_size
    from hasten.training.moving_average import ExponentialMovingAverage as ExponentialMovingAverage
    from hasten.world.arrivals import MissingProcessError as MissingProcessError
    from hasten.world.mesh import ParallelismConfig as ParallelismConfig
    from hasten.world.process import World as World
    from hasten.world.rng import set_seed as set_seed
    from hasten.world.rng import synchronize_rng_states as synchronize_rng_states


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'hasten' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

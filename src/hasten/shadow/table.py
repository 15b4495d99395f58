"""The table of aliases: for each module of the reference, where each of its names lives in hasten.

A value is a module, or `module:name` where the name differs there.
"""

from __future__ import annotations

ROOT = "accelerate"
# The release of the reference whose calls are understood. The drop-in distribution has the same version.
VERSION = "1.15.0.post1"

_OPERATIONS = {
    name: home
    for home, names in {
        "hasten.collectives.nested": (
            "TensorInformation",
            "concatenate",
            "convert_to_fp32",
            "find_batch_size",
            "find_device",
            "get_data_structure",
            "get_shape",
            "honor_type",
            "ignorant_find_batch_size",
            "initialize_tensors",
            "is_namedtuple",
            "is_tensor_information",
            "is_torch_tensor",
            "is_torch_xpu_tensor",
            "listify",
            "recursively_apply",
            "send_to_device",
            "slice_tensors",
        ),
        "hasten.collectives.gather": ("gather",),
        "hasten.collectives.objects": ("broadcast_object_list", "gather_object"),
        "hasten.collectives.broadcast": ("broadcast",),
        "hasten.collectives.reduce": ("reduce",),
        "hasten.collectives.outputs": ("ConvertOutputsToFp32", "GatheredParameters", "convert_outputs_to_fp32"),
        "hasten.collectives.pad": ("CannotPadNestedTensorWarning", "pad_across_processes", "pad_input_tensors"),
        "hasten.collectives.relay": (
            "TENSOR_INT_TO_DTYPE",
            "TENSOR_TYPE_TO_INT",
            "copy_tensor_to_devices",
            "gather_tensor_shape",
        ),
        "hasten.collectives.verify": ("TORCH_DISTRIBUTED_OPERATION_TYPES", "chained_operation", "verify_operation"),
        "hasten.world.agreement": ("DistributedOperationException",),
    }.items()
    for name in names
}
_RANDOM = dict.fromkeys(("set_seed", "synchronize_rng_state", "synchronize_rng_states"), "hasten.world.rng")
_RAM_LOADING = dict.fromkeys(
    ("disable_fsdp_ram_efficient_loading", "enable_fsdp_ram_efficient_loading"), "hasten.settings.loading"
)
_FSDP = {
    "load_fsdp_model": "hasten.checkpoint.fsdp",
    "load_fsdp_optimizer": "hasten.checkpoint.fsdp",
    "merge_fsdp_weights": "hasten.checkpoint.merge",
    "save_fsdp_model": "hasten.checkpoint.fsdp",
    "save_fsdp_optimizer": "hasten.checkpoint.fsdp",
    **dict.fromkeys(
        (
            "ensure_weights_retied",
            "fsdp2_apply_ac",
            "fsdp2_canonicalize_names",
            "fsdp2_load_full_state_dict",
            "fsdp2_prepare_model",
            "fsdp2_switch_optimizer_parameters",
            "get_fsdp2_grad_scaler",
        ),
        "hasten.parallel.fsdp_functions",
    ),
}
_DATACLASSES = {
    "AutocastKwargs": "hasten.settings.handlers",
    "BaseEnum": "hasten.settings.enums",
    "ComputeEnvironment": "hasten.settings.enums",
    "DDPCommunicationHookType": "hasten.settings.enums",
    "DataLoaderConfiguration": "hasten.settings.dataloading",
    "DistributedDataParallelKwargs": "hasten.parallel.replicate",
    "DistributedType": "hasten.settings.enums",
    "DynamoBackend": "hasten.settings.enums",
    "FP8BackendType": "hasten.settings.enums",
    "FullyShardedDataParallelPlugin": "hasten.parallel.fsdp",
    "GradScalerKwargs": "hasten.settings.handlers",
    "GradientAccumulationPlugin": "hasten.settings.accumulation",
    "InitProcessGroupKwargs": "hasten.settings.handlers",
    "KwargsHandler": "hasten.settings.kwargs",
    "LoggerType": "hasten.settings.enums",
    "PrecisionType": "hasten.settings.enums",
    "ProfileKwargs": "hasten.settings.handlers",
    "ProjectConfiguration": "hasten.settings.project",
    "RNGType": "hasten.settings.enums",
}
_STATE = {
    "AcceleratorState": "hasten.state.accelerator",
    "GradientState": "hasten.training.accumulation",
    "PartialState": "hasten.state.partial",
    "is_initialized": "hasten.state.accelerator",
}
_PARALLELISM = {"ParallelismConfig": "hasten.world.mesh"}
_LAUNCHERS = {
    "debug_launcher": "hasten.launch.notebook",
    "notebook_launcher": "hasten.launch.notebook",
}
_DATA = {
    "BatchSamplerShard": "hasten.data.shard",
    "DataLoaderDispatcher": "hasten.data.dispatch",
    "DataLoaderShard": "hasten.data.loader",
    "IterableDatasetShard": "hasten.data.shard",
    "SeedableRandomSampler": "hasten.data.samplers",
    "SkipBatchSampler": "hasten.data.samplers",
    "SkipDataLoader": "hasten.data.skip",
    "get_sampler": "hasten.data.samplers",
    "prepare_data_loader": "hasten.data.loader",
    "skip_first_batches": "hasten.data.skip",
}
_MEMORY = {
    "clear_device_cache": "hasten.world.memory",
    "find_executable_batch_size": "hasten.training.batch_size",
    "release_memory": "hasten.world.memory",
    "should_reduce_batch_size": "hasten.world.memory",
}

_COMMANDS = {
    "env": {"hasten.cli.env": "env_command env_command_parser main"},
    "estimate": {
        "hasten.cli.estimate_memory": (
            "add_timm_hub_prefix check_has_model create_ascii_table create_empty_model estimate_command estimate_command_parser "
            "estimate_training_usage gather_data main verify_on_hub"
        )
    },
    "launch": {"hasten.cli.launch": "launch_command launch_command_parser"},
    "merge": {"hasten.cli.merge_weights": "main"},
    "test": {"hasten.cli.test": "main test_command test_command_parser"},
    "to_fsdp2": {
        "hasten.cli.to_fsdp2": (
            "ARGUMENT_KEY_MAPPING ARGUMENT_VALUE_MAPPING ConversionStatus convert_config_to_fsdp2 load_config to_fsdp2_command "
            "to_fsdp2_command_parser"
        )
    },
}

MODULES: dict[str, dict[str, str]] = {
    "accelerate": {
        "Accelerator": "hasten.accelerator",
        "find_executable_batch_size": "hasten.training.batch_size",
        "skip_first_batches": "hasten.data.skip",
        "synchronize_rng_states": "hasten.world.rng",
        "PartialState": "hasten.state.partial",
        **_LAUNCHERS,
        **_PARALLELISM,
        **{
            name: _DATACLASSES[name]
            for name in (
                "AutocastKwargs",
                "DDPCommunicationHookType",
                "DataLoaderConfiguration",
                "DistributedDataParallelKwargs",
                "DistributedType",
                "FullyShardedDataParallelPlugin",
                "GradScalerKwargs",
                "InitProcessGroupKwargs",
                "ProfileKwargs",
            )
        },
    },
    "accelerate.accelerator": {"Accelerator": "hasten.accelerator"},
    "accelerate.state": _STATE,
    "accelerate.optimizer": {"AcceleratedOptimizer": "hasten.training.optimizer"},
    "accelerate.scheduler": {"AcceleratedScheduler": "hasten.training.scheduler"},
    "accelerate.data_loader": _DATA,
    "accelerate.local_sgd": {"LocalSGD": "hasten.training.local_sgd"},
    "accelerate.parallelism_config": _PARALLELISM,
    "accelerate.launchers": _LAUNCHERS,
    "accelerate.utils": {**_MEMORY, **_OPERATIONS, **_RANDOM, **_DATACLASSES, **_PARALLELISM, **_RAM_LOADING, **_FSDP},
    "accelerate.utils.fsdp_utils": {
        **_RAM_LOADING,
        **_FSDP,
        "fsdp2_prepare_auto_wrap_policy": "hasten.parallel.fsdp_functions",
        "get_parameters_from_modules": "hasten.parallel.fsdp_functions",
    },
    "accelerate.utils.memory": _MEMORY,
    "accelerate.utils.modeling": {"clear_device_cache": "hasten.world.memory"},
    "accelerate.utils.operations": _OPERATIONS,
    "accelerate.utils.random": _RANDOM,
    "accelerate.utils.dataclasses": _DATACLASSES,
    "accelerate.commands": {},
    **{
        f"accelerate.commands.{module}": {name: home for home, names in homes.items() for name in names.split()}
        for module, homes in _COMMANDS.items()
    },
}

"""What the reference's command line and files can set and hasten does not obey yet: refused by name, never ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# area: its flags; a trailing * stands for every flag that begins so
_FLAGS = {
    "DeepSpeed": "use_deepspeed deepspeed_* zero_stage zero3_* offload_optimizer_* offload_param_* gradient_clipping",
    "Megatron-LM": "use_megatron_lm megatron_lm_*",
    "parallelism over several axes": "use_parallelism_config parallelism_config_*",
    "FP8 recipes": "fp8_*",
    "TPU": "tpu tpu_cluster no_tpu_cluster tpu_use_sudo vm env main_training_function downcast_bf16",
    "SageMaker": "aws_*",
    "MPI": "mpirun_hostfile",
    "NUMA affinity": "enable_cpu_affinity",
}

# area: its keys in accelerate's configuration files
_KEYS = {
    "DeepSpeed": "deepspeed_config",
    "Megatron-LM": "megatron_lm_config",
    "parallelism over several axes": "parallelism_config",
    "FP8 recipes": "fp8_config",
    "MPI": "mpirun_config",
    "NUMA affinity": "enable_cpu_affinity",
    "TPU": (
        "downcast_bf16 main_training_function tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env "
        "command_file commands"
    ),
    "SageMaker": (
        "ec2_instance_type iam_role_name image_uri profile region base_job_name pytorch_version transformers_version "
        "py_version sagemaker_inputs_file sagemaker_metrics_file additional_args"
    ),
}

# What files hold for a feature that is off.
_OFF = (None, False, "", "no", "false", "none", "null", "main")


def flag_area(flag: str) -> str | None:
    """The area of a flag that is known but not obeyed yet, or None. `--zero-stage=2` is in "DeepSpeed"."""
    name = flag.partition("=")[0].lstrip("-").replace("-", "_")
    for area, patterns in _FLAGS.items():
        for pattern in patterns.split():
            if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])):
                return area
    return None


def key_areas() -> dict[str, str]:
    """The known keys of a file that are not obeyed yet, with their areas."""
    return {key: area for area, keys in _KEYS.items() for key in keys.split()}


def is_off(value: Any) -> bool:
    """Whether a key's value says that its feature is not used."""
    if isinstance(value, dict):
        return all(is_off(item) for item in value.values())
    if isinstance(value, list):
        return all(is_off(item) for item in value)
    return (value.strip().lower() if isinstance(value, str) else value) in _OFF


def used(attributes: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Flag and area of everything in a parsed command line that asks for something not obeyed yet."""
    for name, value in attributes.items():
        area = flag_area(name)
        if area is not None and not is_off(value):
            yield f"--{name}", area

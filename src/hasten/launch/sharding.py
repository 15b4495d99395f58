"""What no sharded job could obey is refused before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten.settings.resolve import FLAG

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hasten.settings.resolve import Value


def refuse_contradictions(settings: Mapping[str, Value]) -> None:
    """Check the settings of sharding against each other.

    Words of the other version are refused where somebody has typed both; files and variables often hold them for no reason.

    Raises:
        ValueError: they contradict each other; the message says what to write instead.
    """
    version, strategy = settings["fsdp_version"], settings["fsdp_sharding_strategy"]
    frees = settings["fsdp_reshard_after_forward"]
    typed = version.origin == FLAG
    if version.value == 2 and isinstance(frees.value, str):
        raise ValueError(
            f"fsdp_reshard_after_forward is {frees.value} ({frees.where}), which is of version 1, but fsdp_version is 2 "
            f"({version.where}). Write {_translated(frees.value)}."
        )
    if typed and version.value == 2 and strategy.origin == FLAG:
        raise ValueError(
            f"--fsdp_sharding_strategy {strategy.value} is of version 1, but --fsdp_version is 2. Write "
            f"{_translated(strategy.value)}."
        )
    if typed and version.value == 1 and frees.origin == FLAG and not isinstance(frees.value, str):
        raise ValueError(
            f"--fsdp_reshard_after_forward {str(frees.value).lower()} is of version 2, but --fsdp_version is 1. Write "
            "--fsdp_version 2."
        )
    _check_offloading(settings, version)


def _check_offloading(settings: Mapping[str, Value], version: Value) -> None:
    offload = settings["fsdp_activation_checkpointing_offload"]
    if not offload.value:
        return
    said = f"fsdp_activation_checkpointing_offload is true ({offload.where}), which needs"
    if not settings["fsdp_activation_checkpointing"].value:
        raise ValueError(f"{said} --fsdp_activation_checkpointing true.")
    if version.value == 1:
        raise ValueError(f"{said} --fsdp_version 2, but fsdp_version is 1 ({version.where}).")


def _translated(strategy: str) -> str:
    """What version 2 calls it."""
    frees = f"--fsdp_reshard_after_forward {str(strategy in ('FULL_SHARD', 'HYBRID_SHARD')).lower()}"
    if strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        return frees
    if strategy == "NO_SHARD":
        return "it without --use_fsdp"
    return f"{frees} and, in the script, ParallelismConfig(dp_replicate_size=..., dp_shard_size=...), or leave --fsdp_version out"

"""Whether other libraries let rank 0 alone read a model's weights; they look at the environment."""

from __future__ import annotations

from hasten.settings import environment, export


def enable_fsdp_ram_efficient_loading() -> None:
    """Let Hugging Face models be read by rank 0 alone, where a job is sharded: the others get empty weights.

    Writes `FSDP_CPU_RAM_EFFICIENT_LOADING`, and `ACCELERATE_USE_FSDP` where nobody has set it; `hasten.world.context.reset()`
    undoes it.
    """
    if environment.raw("ACCELERATE_USE_FSDP") is None:
        export.export("use_fsdp", True)
    export.export("fsdp_cpu_ram_efficient_loading", True)


def disable_fsdp_ram_efficient_loading() -> None:
    """Let every process read Hugging Face models by itself again. Writes `FSDP_CPU_RAM_EFFICIENT_LOADING`."""
    export.export("fsdp_cpu_ram_efficient_loading", False)

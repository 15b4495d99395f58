"""Keyword arguments for torch's own objects, one class per object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from hasten.settings.enums import DDPCommunicationHookType
from hasten.settings.kwargs import KwargsHandler

OUTPUT_DTYPES = ("fp32", "bf16", "fp16", "keep")


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of `torch.autocast`: `enabled=False` switches it off inside a mixed-precision run.

    Args:
        enabled, cache_enabled: as in torch.
        output_dtype: the format in which prepared models return what they computed in a smaller one: "fp32", the default, "bf16",
            "fp16", a torch dtype, or "keep" to return it as it is. Contexts (`accelerator.autocast()`) convert nothing.

    Raises:
        ValueError: an unknown `output_dtype`.
    """

    enabled: bool = True
    cache_enabled: bool | None = None
    output_dtype: Any = "fp32"

    def __post_init__(self) -> None:
        if isinstance(self.output_dtype, str) and self.output_dtype not in OUTPUT_DTYPES:
            raise ValueError(
                f"AutocastKwargs(output_dtype={self.output_dtype!r}): allowed are {', '.join(map(repr, OUTPUT_DTYPES))}, and "
                "torch's own floating-point dtypes."
            )


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of `torch.amp.GradScaler`, used with fp16."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of `torch.distributed.init_process_group`.

    Args:
        backend: communication backend; the device's own by default. The default value here means "not chosen".
        init_method: URL of the rendezvous, e.g. `file:///shared/rendezvous`.
        timeout: the longest that any collective waits, on every group that is made; None leaves torch's default.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class DistributedDataParallelSettings(KwargsHandler):
    """Arguments of `torch.nn.parallel.DistributedDataParallel`, and the communication hook to register on it.

    Users take `DistributedDataParallelKwargs`, which can also register the hook.

    Raises:
        ValueError: an unknown hook or wrapper, or one that does not go with the other settings.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False

    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: Literal[DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16] = (
        DDPCommunicationHookType.NO
    )
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_hook()

    def check_hook(self) -> None:
        """Raise if the hook's settings are not legal or contradict each other."""
        hooks, wrappers = DDPCommunicationHookType.list(), ["no", "fp16", "bf16"]
        for name, allowed in (("comm_hook", hooks), ("comm_wrapper", wrappers)):
            given = getattr(self, name)
            if str(getattr(given, "value", given)) not in allowed:
                raise ValueError(f"{name}={given} is unknown; choose one of {allowed}.")
        hook = DDPCommunicationHookType(self.comm_hook)
        if hook is DDPCommunicationHookType.NO and str(getattr(self.comm_wrapper, "value", self.comm_wrapper)) != "no":
            raise ValueError(f"comm_wrapper={self.comm_wrapper} wraps a communication hook: choose a comm_hook too.")
        if not self.comm_state_option:
            return
        if hook is DDPCommunicationHookType.NO:
            raise ValueError(
                f"comm_state_option={self.comm_state_option} is for the hooks of PowerSGD: choose a comm_hook too."
            )
        if hook not in (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD):
            raise ValueError(f"comm_state_option={self.comm_state_option} is for power_sgd; {hook} takes no options.")

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Every field by name, without the hook's own."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of DDP whose value is not the default; the hook's are never among them."""
        default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != default[name]}


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of `torch.profiler.profile`; see `Accelerator.profile`."""

    activities: list[Literal["cpu", "xpu", "mtia", "cuda", "hpu"]] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

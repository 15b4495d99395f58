"""`AcceleratorState`: a world together with the precision and the plugins that an Accelerator was built with."""

from __future__ import annotations

from typing import Any

from hasten.settings import environment
from hasten.settings.enums import DistributedType, PrecisionType
from hasten.state.partial import PartialState, ProcessView, describe, summary
from hasten.world import process
from hasten.world.context import CONTEXT
from hasten.world.process import World


class AcceleratorState(ProcessView):
    """What an Accelerator was set to. All instances for the default world share one dictionary.

    An Accelerator on a world of its own (`Accelerator(ranks=...)`) has a state of its own, so that two of them can differ.

    Raises:
        ValueError: it is built before any Accelerator, the precision is unknown or not supported by the device, or it differs
            from the one in use.
    """

    _shared_state: dict[str, Any] = CONTEXT.accelerator_state
    _known_attrs = (
        *PartialState._known_attrs,
        "_mixed_precision",
        "dynamo_plugin",
        "fsdp_plugin",
        "megatron_lm_plugin",
    )
    _world: World
    _mixed_precision: str
    num_processes: int
    process_index: int
    local_process_index: int

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        world = kwargs.pop("_world", None)
        self.__dict__ = self._shared_state if world is None else {}
        if self.initialized:
            process.start(cpu, **kwargs)
            self._check_same(mixed_precision)
            if parallelism_config is not None:
                self.parallelism_config = parallelism_config
            if fsdp_plugin is not None:
                self._shard_by(fsdp_plugin)
            return
        if not _from_accelerator:
            raise ValueError(
                "Please make sure to properly initialize your accelerator via `accelerator = Accelerator()` before using any "
                "functionality from the `accelerate` library."
            )
        precision = read_precision(mixed_precision)
        if world is None:
            partial = PartialState(cpu, **kwargs)
            world, attributes = partial.world, partial._shared_state
        else:
            attributes = describe(world)
        if precision != "no":
            from hasten.precision import autocast

            autocast.check_supported(precision, world.row)
        self.__dict__.update(
            attributes,
            _world=world,
            _mixed_precision=precision,
            deepspeed_plugins=deepspeed_plugin,
            fsdp_plugin=None,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            parallelism_config=parallelism_config,
            dynamo_plugin=dynamo_plugin,
            device_mesh=None,
        )
        if fsdp_plugin is not None:
            self._shard_by(fsdp_plugin)

    def _shard_by(self, plugin: Any) -> None:
        self.__dict__["fsdp_plugin"] = plugin
        if self._world.group is not None:
            self.__dict__["distributed_type"] = DistributedType.FSDP
        if self.__dict__ is self._shared_state and not environment.get("use_fsdp"):
            from hasten.settings import export

            # Model libraries look at it. Not for a world of its own: they take the whole job for sharded.
            export.export("use_fsdp", True)

    def _check_same(self, mixed_precision: str | None) -> None:
        if mixed_precision is not None and read_precision(mixed_precision) != self._mixed_precision:
            raise ValueError(
                "AcceleratorState has already been initialized and cannot be changed, restart your runtime completely and pass "
                f"`mixed_precision='{mixed_precision}'` to `Accelerator()`. It is now {self._mixed_precision!r}; an Accelerator "
                "with `world=` or `ranks=` has a precision of its own."
            )

    @property
    def world(self) -> World:
        """The world that this state describes."""
        return self._world

    @property
    def initialized(self) -> bool:
        """Whether an Accelerator has filled this state."""
        return "_world" in self.__dict__

    @property
    def mixed_precision(self) -> str:
        """`no`, `bf16` or `fp16`."""
        return self._mixed_precision

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded by FSDP2."""
        return self.distributed_type == DistributedType.FSDP

    @property
    def deepspeed_plugin(self) -> None:
        """The active DeepSpeed plugin; None, since DeepSpeed is not built yet."""
        return None

    def destroy_process_group(self, group: Any = None) -> None:
        """End `group`, or the default process group; does nothing where there is none."""
        PartialState().destroy_process_group(group)

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forget the Accelerator's settings, and with `reset_partial_state` the default world too."""
        if AcceleratorState._shared_state.pop("fsdp_plugin", None) is not None:
            from hasten.settings import export

            export.undo("use_fsdp")
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    def __getattr__(self, name: str) -> Any:
        if name in type(self)._known_attrs:
            raise AttributeError(
                f"`AcceleratorState` object has no attribute `{name}`. This happens if `AcceleratorState._reset_state()` was "
                "called and an `Accelerator` or `PartialState` was not reinitialized."
            )
        raise AttributeError(f"'AcceleratorState' object has no attribute '{name}'")

    def __repr__(self) -> str:
        return f"{summary(self)}\nMixed precision type: {self.mixed_precision}\n"


def read_precision(mixed_precision: str | None) -> str:
    """The precision asked for: the argument, else `ACCELERATE_MIXED_PRECISION`, else "no".

    Raises:
        ValueError: unknown precision.
        NotImplementedError: fp8.
    """
    chosen = mixed_precision if mixed_precision is not None else environment.get("mixed_precision") or "no"
    chosen = str(getattr(chosen, "value", chosen)).lower()
    if chosen not in PrecisionType.list():
        raise ValueError(f"Unknown mixed_precision mode: {chosen}. Choose between {PrecisionType.list()}")
    if chosen == "fp8":
        raise NotImplementedError(
            "mixed_precision='fp8' is not built yet (area: precision). Choose 'no', 'bf16' or 'fp16'."
        )
    return chosen


def is_initialized() -> bool:
    """Whether an Accelerator has been built since the start or the last reset."""
    return bool(AcceleratorState._shared_state)

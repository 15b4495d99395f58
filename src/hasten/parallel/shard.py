"""Sharding: every rank holds a part of each parameter, and FSDP2 gathers a unit while it runs."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hasten.collectives.objects import broadcast_object_list
from hasten.collectives.together import together
from hasten.parallel import passes
from hasten.parallel.alike import Passes
from hasten.parallel.division import Division
from hasten.parallel.stepping import follow
from hasten.parallel.units import Choose, Unit, plan_units
from hasten.parallel.values import Initialisation, ValuesOfFirst, find_different, materialise
from hasten.protocols import Transform
from hasten.weights import gradients
from hasten.weights.empty import check_values
from hasten.weights.load import load_weights
from hasten.weights.successors import all_current, replace
from hasten.weights.whole import own_name, state_of, stream
from hasten.world.frames import frames_of
from hasten.world.process import World

_logger = logging.getLogger(__name__)

# torch marks parts with tensors of their own. transformers asks: ranks must then go through the same layers.
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


@dataclass(frozen=True)
class Sharding:
    """How models are sharded.

    Args:
        choose: makes, for a model, the function that says which modules are units; None for the model as a whole.
        frees: whether whole parameters are freed after the forward pass, and gathered again for the backward pass; an integer
            keeps them in shards of so many ranks.
        precision: the formats of compute, of the reduction of gradients and of outputs.
        offload: where shards are kept.
        ignored: gives, for a model, the parameters that every rank keeps whole.
        prefetch: units that are gathered ahead, in the forward and in the backward pass.
        upcast: store parameters that are trained in fp32, so that small updates are not lost.
        transforms: what is done to a model before.
        from_first: give every rank the values that rank 0 has; the others need none.
        synchronises: the same, if rank 0 has any.
        initialise: gives memory and values to a module on the meta device, before its unit is sharded.
    """

    choose: Callable[[nn.Module], Choose | None] = lambda model: None
    frees: bool | int | None = True
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)
    ignored: Callable[[nn.Module], set[nn.Parameter]] = lambda model: set()
    prefetch: tuple[int, int] = (0, 0)
    upcast: bool = False
    transforms: tuple[Transform, ...] = ()
    from_first: bool = False
    synchronises: bool = False
    initialise: Callable[[nn.Module], Any] | None = None


class Shard:
    """The engine for sharded models.

    Args:
        world: the ranks.
        mesh: their mesh of one axis (shards), or of two (copies of shards).
        sharding: how.
    """

    name = "shard"

    def __init__(self, world: World, mesh: DeviceMesh, sharding: Sharding) -> None:
        self.world = world
        self.mesh = mesh
        self.sharding = sharding
        self._divisions: weakref.WeakKeyDictionary[nn.Module, Division] = weakref.WeakKeyDictionary()
        self._passes: list[weakref.ref[Passes]] = []
        self._alone: weakref.WeakKeyDictionary[Any, list[passes.Alone]] = weakref.WeakKeyDictionary()

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """What is done to a model before it is wrapped."""
        return self.sharding.transforms

    def __reduce__(self) -> Any:
        return Shard, (self.world, self.mesh, self.sharding)

    # -- models ------------------------------------------------------------------------------------------------------

    divides_state = True
    moves_models = True

    @property
    def axes(self) -> dict[str, int]:
        """Shards, and copies of them."""
        return dict(zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=True))

    def notes(self, model: Any) -> list[str]:
        """The units, and what else was decided."""
        division = self.details(model)
        return [] if division is None else list(division.lines())

    def details(self, model: Any) -> Division | None:
        """How a model was divided; None if somebody else has done it."""
        return self._divisions.get(_compiled(model))

    def follow(self, optimizer: torch.optim.Optimizer) -> int:
        """Let an optimizer hold the shards of its parameters; see the function."""
        return follow(optimizer)

    def before_step(self, optimizer: Any) -> None:
        """Raise if ranks have gone different ways through a model since the last step."""
        for each in self._in_order():
            each.check()

    def before_save(self) -> None:
        """Raise if ranks have gone different ways through a model, whose weights are wrong then; every rank calls it."""
        for each in self._in_order():
            each.compare()

    def locate(self, error: BaseException) -> None:
        """Add to an error of the backend what each model had gathered last."""
        for each in self._in_order():
            each.locate(error)

    def _in_order(self) -> Iterator[Passes]:
        """What watches the models that are still there, in the order in which they were prepared."""
        return (passes for each in self._passes if (passes := each()) is not None)

    def _ignored(self, model: nn.Module) -> set[nn.Parameter]:
        # One number, or none, can not be divided.
        whole = {each for each in model.parameters() if _is_quantized(each) or each.dim() == 0 or each.numel() == 0}
        return whole | self.sharding.ignored(model)

    def wrap(self, model: nn.Module, evaluation: bool = False) -> nn.Module:
        """Shard a model in place, also one that is only evaluated; one that is sharded already stays as it is.

        What is on the meta device stays there: `load_weights` gives it memory and values.

        Raises:
            ValueError: a part of the model is divided already, and another part, which is trained, is not; or something of it
                would be lost, or can not be divided (see `passes.check` and `plan_units`).
        """
        if _compiled(model) is not model:  # what torch.compile has put around it stays around it
            self.wrap(_compiled(model), evaluation)
            return model
        if isinstance(model, FSDPModule) or any(isinstance(each, DTensor) for each in model.parameters()):
            _check_divided(model)
            return model
        passes.check(model)
        self._check_reshard()
        frames_of(self.world).agree("prepare", engine=self.name)
        values = ValuesOfFirst(model, self.world) if self._takes_values_of_first(model) else None
        initialisation = (
            None if values or not self.sharding.initialise else Initialisation(model, self.sharding.initialise)
        )
        if not (values or initialisation):
            self._check_alike(model)
        units = self._divide(model, initialisation)
        self._divisions[model] = Division(
            units=tuple(units),
            frees=self.sharding.frees,
            computed=self.sharding.precision.param_dtype,
            reduced=self.sharding.precision.reduce_dtype,
            whole=tuple(name for name, each in model.named_parameters() if not isinstance(each, DTensor)),
            frozen=tuple(name for name, each in model.named_parameters() if not each.requires_grad),
            offloads=isinstance(self.sharding.offload, CPUOffloadPolicy),
            prefetch=self.sharding.prefetch,
        )
        if values is not None:
            values.spread(model, self._home)
        passes.require_values(model)
        for mark in _MARKS:
            setattr(model, mark, True)
        return model

    def load_weights(self, model: Any, path: Any, **options: Any) -> tuple[list[str], list[str]]:
        """Load weights from files; each rank reads its shards alone, also into a model on the meta device.

        Where it fails on one rank, it fails on all.
        """

        def load() -> tuple[list[str], list[str]]:
            own = _compiled(model)
            return load_weights(own, path, materialise=lambda module: materialise(module, self._home), **options)

        return together(self.world, "load_weights failed", load)

    @property
    def _home(self) -> torch.device:
        """Where shards are kept."""
        offloads = isinstance(self.sharding.offload, CPUOffloadPolicy)
        return torch.device("cpu") if offloads else self.world.device

    def _divide(self, model: nn.Module, initialisation: Initialisation | None) -> list[Unit]:
        before = dict(model.named_parameters())
        modules = dict(model.named_modules())
        if initialisation is not None:
            owners = {id(each) for each in self._ignored(model)}
            initialisation.apply(
                module
                for module in modules.values()
                if owners & {id(each) for each in module.parameters(recurse=False)}
            )
        ignored, given = self._ignored(model), self.sharding.ignored(model)
        if self.world.is_main:
            passes.warn_of_ignored(model, given)
        units = plan_units(model, self.sharding.choose(model), ignored, self.sharding.upcast)
        for unit in units:
            own = [modules[name] for name in unit.modules]
            if initialisation is not None:
                initialisation.apply(own)
            for module in own:
                passes.make_contiguous(module)
                if self.sharding.upcast:
                    upcast(module)
            there = {each for module in own for each in module.parameters()}
            self._apply(own, unit, there - {model.get_parameter(name) for name in unit.parameters})
            for name in unit.parameters:  # unit by unit, so that no more than one is there as a whole and in shards
                replace(before.pop(name), model.get_parameter(name))
        self._prefetch(
            [module for name, module in modules.items() if name in {unit.modules[0] for unit in units} - {""}]
        )
        passes.free_without_gradients(model, [modules[unit.modules[0]] for unit in units])
        passes.leave_inference_mode(model)
        passes.accept_whole_states(model)
        self._passes.append(weakref.ref(Passes(model, units, self.world)))
        alone = {each for each in model.parameters() if each.dim() == 0 and each.is_floating_point()}
        self._alone[model] = [passes.Alone(each, self.mesh) for each in alone - given]
        return units

    def _takes_values_of_first(self, model: nn.Module) -> bool:
        if self.sharding.from_first or not self.sharding.synchronises:
            return self.sharding.from_first
        has_values = [not any(each.is_meta for each in model.parameters())]
        broadcast_object_list(has_values, world=self.world)
        return has_values[0]  # otherwise they come from files, later

    def _check_reshard(self) -> None:
        frees, shards = self.sharding.frees, self.mesh.shape[-1]
        if isinstance(frees, int) and not isinstance(frees, bool) and shards % frees:
            allowed = ", ".join(str(number) for number in range(1, shards + 1) if shards % number == 0)
            raise ValueError(
                f"reshard_after_forward={frees} keeps shards over {frees} processes after the forward pass, but parameters are "
                f"divided over {shards}, which is no multiple of it. Allowed are {allowed}, True and False."
            )

    def _check_alike(self, model: nn.Module) -> None:
        name = find_different(model, self.world)
        if name is not None and self.world.is_main:
            _logger.warning(
                "The processes have different values for %s of %s, and each will keep its part of its own. Call `set_seed` before "
                "the model is built, or take those of the first process with `cpu_ram_efficient_loading=True`.",
                name,
                type(model).__name__,
            )

    def _apply(self, modules: Sequence[nn.Module], unit: Unit, ignored: set[nn.Parameter]) -> None:
        frees: bool | int | None = self.sharding.frees
        if frees is True and unit.frees is False:
            frees = False  # the last to run: backward needs it at once
        elif frees is True and unit.modules == ("",):
            frees = None  # torch knows best
        for module in modules:
            passes.answer_no_view(module)
        fully_shard(
            modules[0] if len(modules) == 1 else list(modules),
            mesh=self.mesh,
            reshard_after_forward=frees,
            mp_policy=self.sharding.precision,
            offload_policy=self.sharding.offload,
            ignored_params=ignored,
        )
        if frees is not False and len(modules) == 1:
            passes.keep_what_is_hidden(modules[0])

    def _prefetch(self, units: Sequence[Any]) -> None:
        forward, backward = self.sharding.prefetch
        for index, unit in enumerate(units):
            if forward:
                unit.set_modules_to_forward_prefetch(list(units[index + 1 : index + 1 + forward]))
            if backward:
                unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, index - backward) : index])))

    def forward_methods(self, model: Any) -> tuple[str, ...]:
        """`generate`, which may run an encoder, or the model in an adapter, by itself."""
        return ("generate",) if hasattr(model, "reshard") and callable(getattr(model, "generate", None)) else ()

    def unwrap(self, model: Any) -> Any:
        """The user's own module: the same object, whose class has been extended."""
        return model

    def model_state_dict(self, model: Any) -> dict[str, Any]:
        """The whole model's tensors on the CPU, on rank 0; nothing on the others. All ranks must call it."""
        model = _compiled(model)
        check_values(model)
        tensors = stream(state_of(model), self.world, "get_state_dict", device="cpu")
        whole = {name: value for name, value in tensors if self.world.is_main}
        state = ((own_name(name), value) for name, value in model.state_dict().items())
        return {name: whole.get(name, value) for name, value in state} if self.world.is_main else {}

    # -- gradients ---------------------------------------------------------------------------------------------------

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        """Accumulate whole gradients locally inside; nothing is exchanged."""
        model = _compiled(model)
        return _exchanging(model, self._alone.get(model, []), False) if isinstance(model, FSDPModule) else nullcontext()

    def sync_next_backward(self, model: Any) -> AbstractContextManager[Any]:
        """Exchange gradients in backward passes inside, also where the forward pass ran under `no_sync`."""
        model = _compiled(model)
        return _exchanging(model, self._alone.get(model, []), True) if isinstance(model, FSDPModule) else nullcontext()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip by the global norm over all shards."""
        return gradients.clip_grad_norm_(parameters, max_norm, norm_type)

    def current(self, parameters: Any) -> Any:
        """The shards of parameters that were listed before their model was wrapped."""
        return all_current(parameters)

    def exchange_order(self, model: Any) -> list[str] | None:
        """None: each unit is reduced at once, in the order of the backward pass."""
        return None

    def repeat_exchange_order(self, model: Any, names: Sequence[str]) -> None:
        """Do nothing; see `exchange_order`."""


def _check_divided(model: nn.Module) -> None:
    """Refuse a model, divided by somebody else, of which a part would be trained on each rank by itself."""
    if isinstance(model, FSDPModule):
        return
    named = dict(model.named_parameters())
    divided = [name for name, each in named.items() if isinstance(each, DTensor)]
    rest = [name for name, each in named.items() if each.requires_grad and not isinstance(each, DTensor)]
    if rest:
        raise ValueError(
            f"{type(model).__name__} is divided in part: {len(divided)} of its parameters are ({divided[0]!r}, ...), but "
            f"{len(rest)} that are trained are not ({rest[0]!r}, ...), and nothing would sum their gradients over the processes. "
            "If it shares modules with a model that was prepared before, prepare one module that holds both models; else divide "
            "all of it."
        )


def _compiled(model: Any) -> Any:
    """The module that torch.compile runs, if a model is what it has returned; else the model."""
    return getattr(model, "_orig_mod", model)


@contextmanager
def _exchanging(model: FSDPModule, alone: Sequence[passes.Alone], value: bool) -> Iterator[None]:
    def say(value: bool) -> None:
        model.set_requires_gradient_sync(value)
        for each in alone:
            each.exchanges = value

    say(value)
    try:
        yield
    finally:
        say(True)


def _is_quantized(parameter: nn.Parameter) -> bool:
    # Integers, which are never trained; where they hide in another format, what they mean is beside them.
    return not (parameter.is_floating_point() or parameter.is_complex()) or hasattr(parameter, "quant_state")


def upcast(model: nn.Module) -> list[str]:
    """Store the parameters that are trained in fp32; returns the names of those that were not."""
    changed = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
            changed.append(name)
    return changed

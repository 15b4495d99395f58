"""Sharding: every rank holds a part of each parameter, and FSDP2 gathers a unit while it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from hasten.parallel.units import Choose, Unit, plan_units
from hasten.protocols import Transform
from hasten.weights import gradients, names
from hasten.world.process import World

_SUCCESSOR = "_sharded_as"  # on a parameter that has been replaced: its sharded form


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
    """

    choose: Callable[[nn.Module], Choose | None] = lambda model: None
    frees: bool | int | None = True
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)
    ignored: Callable[[nn.Module], set[nn.Parameter]] = lambda model: set()
    prefetch: tuple[int, int] = (0, 0)
    upcast: bool = False
    transforms: tuple[Transform, ...] = ()


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
        self._units: weakref.WeakKeyDictionary[nn.Module, list[Unit]] = weakref.WeakKeyDictionary()

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """What is done to a model before it is wrapped."""
        return self.sharding.transforms

    def __reduce__(self) -> Any:
        return Shard, (self.world, self.mesh, self.sharding)

    # -- models ------------------------------------------------------------------------------------------------------

    saves_state = False
    moves_models = True

    @property
    def axes(self) -> dict[str, int]:
        """Shards, and copies of them."""
        return dict(zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=True))

    def notes(self, model: Any) -> list[str]:
        """The units."""
        return [str(unit) for unit in self._units.get(model, ())]

    def follow(self, optimizer: torch.optim.Optimizer) -> int:
        """Let an optimizer hold the shards of its parameters; see the function."""
        return follow(optimizer)

    def _ignored(self, model: nn.Module) -> set[nn.Parameter]:
        # Quantized weights are integers, which are never trained.
        whole = {each for each in model.parameters() if not (each.is_floating_point() or each.is_complex())}
        return whole | self.sharding.ignored(model)

    def wrap(self, model: nn.Module, evaluation: bool = False) -> nn.Module:
        """Shard a model in place, also one that is only evaluated; one that is sharded already stays as it is.

        Raises:
            NotImplementedError: a parameter has no values yet (meta device).
        """
        if isinstance(model, FSDPModule) or any(isinstance(each, DTensor) for each in model.parameters()):
            return model
        self._check(model)
        if self.sharding.upcast:
            upcast(model)
        before = dict(model.named_parameters())
        ignored = self._ignored(model)
        modules = dict(model.named_modules())
        units = plan_units(model, self.sharding.choose(model), ignored)
        for unit in units:
            self._apply([modules[name] for name in unit.modules], unit, ignored)
        self._prefetch([modules[unit.modules[0]] for unit in units if unit.modules != ("",)])
        for name, parameter in model.named_parameters():
            replace(before[name], parameter)
        self._units[model] = units
        return model

    def _check(self, model: nn.Module) -> None:
        empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if empty:
            raise NotImplementedError(
                f"{type(model).__name__} has {len(empty)} parameters without values, on the meta device ({empty[0]!r}, ...). "
                "Sharding such a model is not built yet (area: FSDP2): build it on the CPU."
            )

    def _apply(self, modules: Sequence[nn.Module], unit: Unit, ignored: set[nn.Parameter]) -> None:
        frees: bool | int | None = self.sharding.frees
        if frees is True and unit.frees is False:
            frees = False  # the last to run: backward needs it at once
        elif frees is True and unit.modules == ("",):
            frees = None  # torch knows best
        fully_shard(
            modules[0] if len(modules) == 1 else list(modules),
            mesh=self.mesh,
            reshard_after_forward=frees,
            mp_policy=self.sharding.precision,
            offload_policy=self.sharding.offload,
            ignored_params=ignored,
        )

    def _prefetch(self, units: Sequence[Any]) -> None:
        forward, backward = self.sharding.prefetch
        for index, unit in enumerate(units):
            if forward:
                unit.set_modules_to_forward_prefetch(list(units[index + 1 : index + 1 + forward]))
            if backward:
                unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, index - backward) : index])))

    def unwrap(self, model: Any) -> Any:
        """The user's own module: the same object, whose class has been extended."""
        return model

    def model_state_dict(self, model: Any) -> dict[str, Any]:
        """The whole model's tensors on the CPU, on rank 0; nothing on the others. All ranks must call it."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        for first, *others in names.find_ties(model):
            whole |= {other: whole[first] for other in others if first in whole}
        return whole

    # -- gradients ---------------------------------------------------------------------------------------------------

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        """Accumulate whole gradients locally inside; nothing is exchanged."""
        return _exchanging(model, False) if isinstance(model, FSDPModule) else nullcontext()

    def sync_next_backward(self, model: Any) -> AbstractContextManager[Any]:
        """Exchange gradients in backward passes inside, also where the forward pass ran under `no_sync`."""
        return _exchanging(model, True) if isinstance(model, FSDPModule) else nullcontext()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip by the global norm over all shards."""
        return gradients.clip_grad_norm_(parameters, max_norm, norm_type)

    def exchange_order(self, model: Any) -> list[str] | None:
        """None: each unit is reduced at once, in the order of the backward pass."""
        return None

    def repeat_exchange_order(self, model: Any, names: Sequence[str]) -> None:
        """Do nothing; see `exchange_order`."""


@contextmanager
def _exchanging(model: FSDPModule, value: bool) -> Iterator[None]:
    model.set_requires_gradient_sync(value)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def upcast(model: nn.Module) -> list[str]:
    """Store the parameters that are trained in fp32; returns the names of those that were not."""
    changed = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
            changed.append(name)
    return changed


def replace(old: nn.Parameter, new: nn.Parameter) -> None:
    """Note on a parameter what it has become, for optimizers that hold it."""
    if old is new:
        return
    setattr(old, _SUCCESSOR, new)
    old.grad = None


def follow(optimizer: torch.optim.Optimizer) -> int:
    """Let an optimizer hold the sharded forms of its parameters, with what it knows about them; returns how many it found.

    Groups keep their order and settings. State that was made in advance (Adagrad's sums) is cut as its parameter is.
    """
    found = 0
    for group in optimizer.param_groups:
        for index, old in enumerate(group["params"]):
            new = getattr(old, _SUCCESSOR, None)
            if new is None:
                continue
            group["params"][index] = new
            found += 1
            if old in optimizer.state:
                optimizer.state[new] = _cut(optimizer.state.pop(old), old, new)
    return found


def _cut(state: dict[str, Any], old: torch.Tensor, new: Any) -> dict[str, Any]:
    return {
        name: distribute_tensor(value, new.device_mesh, new.placements, src_data_rank=None)
        if isinstance(value, torch.Tensor) and value.shape == old.shape and value.dim() > 0
        else value
        for name, value in state.items()
    }

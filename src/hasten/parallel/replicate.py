"""Replication: every rank holds the whole model, and DDP averages the gradients."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hasten.protocols import Transform
from hasten.settings.enums import DDPCommunicationHookType
from hasten.settings.handlers import DistributedDataParallelSettings
from hasten.world import torch_private
from hasten.world.process import World

if TYPE_CHECKING:
    from hasten.parallel.exchange_order import ExchangeOrder


@dataclass
class DistributedDataParallelKwargs(DistributedDataParallelSettings):
    """Arguments of `torch.nn.parallel.DistributedDataParallel`, and the communication hook to register on it.

    Args:
        dim, broadcast_buffers, bucket_cap_mb, find_unused_parameters, check_reduction, gradient_as_bucket_view, static_graph:
            as in torch.
        comm_hook: compress gradients: "fp16", "bf16", "power_sgd", "batched_power_sgd", or "no".
        comm_wrapper: run the hook on gradients cast to "fp16" or "bf16".
        comm_state_option: arguments of `PowerSGDState`.
    """

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Register the chosen communication hook on a DDP model; does nothing for "no"."""
        register_comm_hook(self, model)


class Replicate:
    """The engine for whole models: DDP where there are several ranks and something to train, else the model itself.

    Args:
        world: the ranks.
        handler: arguments of DDP.
        transforms: what is done to a model before.
        initialise: gives memory and values to a module on the meta device.
    """

    name = "replicate"

    def __init__(
        self,
        world: World,
        handler: DistributedDataParallelSettings | None = None,
        transforms: tuple[Transform, ...] = (),
        initialise: Callable[[torch.nn.Module], Any] | None = None,
    ) -> None:
        self.world = world
        self.handler = handler
        self.transforms = transforms
        self.initialise = initialise
        self._orders: weakref.WeakKeyDictionary[torch.nn.Module, ExchangeOrder] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> Any:
        return Replicate, (self.world, self.handler, self.transforms, self.initialise)

    before_step = None
    before_save = None
    divides_state = False
    moves_models = False

    @property
    def axes(self) -> dict[str, int]:
        """One axis of copies, where there is a process group."""
        return {"dp_replicate": self.world.size} if self.world.group is not None else {}

    def notes(self, model: Any) -> list[str]:
        """Nothing."""
        return []

    def follow(self, optimizer: torch.optim.Optimizer) -> int:
        """Do nothing: parameters stay what they are."""
        return 0

    def locate(self, error: BaseException) -> None:
        """Do nothing: DDP's errors say what they are about."""

    def current(self, parameters: Any) -> Any:
        """The parameters."""
        return parameters

    def wrap(self, model: torch.nn.Module, evaluation: bool = False) -> torch.nn.Module:
        """Wrap in DDP; evaluation models and models without trainable parameters stay as they are.

        Raises:
            ValueError: the model holds DTensors, which DDP cannot replicate, or tensors without values.
        """
        if self.initialise is not None:
            initialise(model, self.initialise, self.world.device)
        has_values = check_values(model)
        if self.world.group is None or evaluation or not any(p.requires_grad for p in model.parameters()):
            return model
        if not has_values:
            raise ValueError(
                f"Rank {self.world.rank}: {type(model).__name__} is on the meta device, so there is nothing to replicate. Load it "
                "before it is prepared: `accelerator.load_weights(model, path)`."
            )
        if self.world.size == 1 and self.world.row.is_cpu is False:
            return model
        check_no_dtensor(model, self.world)
        self._agree()
        arguments = {} if self.handler is None else self.handler.to_kwargs()
        index = self.world.device.index
        if not self.world.row.is_cpu and index is not None:
            arguments |= {"device_ids": [index], "output_device": index}
        with warnings.catch_warnings():
            # Its replacement is not the same yet: forward_sync_buffers=False still changes the buffers when the model is wrapped.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            wrapped = DistributedDataParallel(model, process_group=self.world.group, **arguments)
        if self.handler is not None:
            register_comm_hook(self.handler, wrapped)
        self._note_order(wrapped)
        return wrapped

    def _agree(self) -> None:
        from hasten.world.frames import frames_of

        frames_of(self.world).agree("prepare", engine=self.name)

    def _note_order(self, model: DistributedDataParallel) -> None:
        from hasten.parallel import exchange_order

        if exchange_order.matters(model, self.world.size):
            self._orders[model] = exchange_order.ExchangeOrder(model)

    def details(self, model: Any) -> None:
        """Nothing beside the notes."""

    def forward_methods(self, model: Any) -> tuple[str, ...]:
        """None: what runs the user's own module needs no exchange."""
        return ()

    def unwrap(self, model: Any) -> Any:
        """The user's own module."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        """Accumulate gradients locally inside; a model without DDP has nothing to hold back.

        With `static_graph` the very first backward pass exchanges all the same, since DDP learns the graph there. What is averaged
        early is averaged once more later, which changes nothing.
        """
        if not isinstance(model, DistributedDataParallel):
            return nullcontext()
        if model.static_graph and torch_private.must_learn_graph(model):
            return nullcontext()
        return model.no_sync()

    @contextmanager
    def sync_next_backward(self, model: Any) -> Iterator[None]:
        """Exchange gradients in the next backward pass although the forward passes ran under `no_sync`.

        Raises:
            ValueError: DDP was told to look at the forward pass for parameters that are not used.
        """
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        for setting in ("find_unused_parameters", "static_graph"):
            if getattr(model, setting):
                raise ValueError(
                    f"trigger_sync_in_backward does not work with {setting}=True: DDP must see the forward pass whose gradients "
                    "it exchanges. Run the last forward pass outside of `no_sync` instead, or switch the setting off."
                )
        before = model.require_backward_grad_sync, model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        # The reducer learns in the forward pass which gradients to expect; these forwards told it to expect none.
        model.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            model.require_backward_grad_sync, model.require_forward_param_sync = before

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip by the global norm, which is the local one where gradients are replicated."""
        from hasten.weights import gradients

        return gradients.clip_grad_norm_(parameters, max_norm, norm_type)

    def exchange_order(self, model: Any) -> list[str] | None:
        """The names of a model's gradients in the order of their exchange, where sums depend on it and it is known."""
        order = self._orders.get(model)
        return list(order.names) if order is not None and order.is_known else None

    def repeat_exchange_order(self, model: Any, names: Sequence[str]) -> None:
        """Exchange a model's gradients in this order from the start; see `ExchangeOrder`. Call it on every rank."""
        order = self._orders.get(model)
        if order is not None and not order.is_known:
            from hasten.parallel import exchange_order

            exchange_order.repeat(model, names)

    def load_weights(self, model: Any, path: Any, **options: Any) -> tuple[list[str], list[str]]:
        """Load weights from files, on each rank."""
        from hasten.parallel.values import materialise
        from hasten.weights.load import load_weights

        return load_weights(model, path, materialise=lambda module: materialise(module, self.world.device), **options)

    def model_state_dict(self, model: Any) -> dict[str, Any]:
        """The model's tensors, without DDP's prefix."""
        return self.unwrap(model).state_dict()


def check_no_dtensor(model: torch.nn.Module, world: World) -> None:
    """Raise if a model that is to be replicated is sharded already.

    Raises:
        ValueError: names the first sharded parameter.
    """
    name = first_dtensor(model)
    if name is not None:
        raise ValueError(
            f"Rank {world.rank}: the parameter {name!r} of {type(model).__name__} is a DTensor, so the model is sharded already "
            "and cannot be replicated by DDP. Prepare it with `evaluation_mode=True` to leave it as it is, or pass the "
            "unsharded model."
        )


def initialise(model: torch.nn.Module, function: Callable[[torch.nn.Module], Any], device: torch.device) -> None:
    """Give memory and values to what is on the meta device, and put it where the model runs."""
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        from hasten.parallel.values import Initialisation

        Initialisation(model, function).apply([model])
        model.to(device)


def check_values(model: torch.nn.Module) -> bool:
    """Whether every parameter has values; if one has none, the first pass without them will be refused."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        return True
    from hasten.parallel.passes import require_values

    require_values(model)
    return False


def first_dtensor(model: torch.nn.Module) -> str | None:
    """The name of a model's first parameter that is a DTensor, or None."""
    import sys

    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:  # nobody can have made a DTensor
        return None
    return next((name for name, value in model.named_parameters() if isinstance(value, tensor.DTensor)), None)


def register_comm_hook(settings: DistributedDataParallelSettings, model: DistributedDataParallel) -> None:
    """Register the hook that `settings` describe.

    Raises:
        ValueError: an unknown hook or wrapper.
    """
    settings.check_hook()  # they may have been changed since
    hook_type = DDPCommunicationHookType(settings.comm_hook)
    if hook_type is DDPCommunicationHookType.NO:
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    state: Any = model.process_group
    hooks = {
        DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
        DDPCommunicationHookType.BF16: default_hooks.bf16_compress_hook,
        DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
        DDPCommunicationHookType.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
    }
    wrappers = {
        DDPCommunicationHookType.NO: lambda hook: hook,
        DDPCommunicationHookType.FP16: default_hooks.fp16_compress_wrapper,
        DDPCommunicationHookType.BF16: default_hooks.bf16_compress_wrapper,
    }
    wrapper_type = DDPCommunicationHookType(settings.comm_wrapper)
    if hook_type in (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD):
        known = list(inspect.signature(powerSGD_hook.PowerSGDState).parameters)[1:]
        if unknown := sorted(set(settings.comm_state_option) - set(known)):
            raise ValueError(
                f"comm_state_option: {', '.join(unknown)} is unknown to PowerSGD; it knows {', '.join(known)}."
            )
        state = powerSGD_hook.PowerSGDState(model.process_group, **settings.comm_state_option)
    hook = wrappers[wrapper_type](hooks[hook_type])
    # Nameless, since torch refuses hooks in bf16 by their name where there is no NCCL; gloo sums bf16 as well.
    model.register_comm_hook(state, lambda state, bucket: hook(state, bucket))

"""The facade: `Accelerator` gives every room's verb a name, and holds no logic of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from hasten.builder import check_kinds, choose_project, open_session, refuse_unbuilt, watch_signals
from hasten.settings.accumulation import GradientAccumulationPlugin
from hasten.settings.dataloading import DataLoaderConfiguration
from hasten.settings.enums import DistributedType, FP8BackendType
from hasten.settings.project import ProjectConfiguration
from hasten.state.partial import ProcessView
from hasten.training.accumulation import GradientState, Window

if TYPE_CHECKING:
    import os
    from collections import OrderedDict

    from hasten.settings.handlers import AutocastKwargs
    from hasten.state.accelerator import AcceleratorState
    from hasten.training.optimizer import AcceleratedOptimizer
    from hasten.world.process import World

_UNSET: Any = object()


class Accelerator(ProcessView):
    """Lets a plain training loop run on any number of processes and devices.

    Args:
        device_placement: move models, optimizer state and batches to `device`.
        split_batches: as `DataLoaderConfiguration.split_batches`, which is the place to set it.
        mixed_precision: "no", "bf16" or "fp16"; None takes `ACCELERATE_MIXED_PRECISION`, else "no".
        gradient_accumulation_steps: micro-batches per update; `ACCELERATE_GRADIENT_ACCUMULATION_STEPS` wins over it.
        cpu: use the CPU even where there is an accelerator.
        dataloader_config: how prepared loaders divide their data; later changes take effect on loaders prepared later.
        rng_types: generators to synchronise over the ranks at the start of each epoch; by default a loader's own.
        project_dir, project_config: the folder of the run, and how its checkpoints are named and kept.
        gradient_accumulation_plugin: more about accumulation than the number of steps.
        step_scheduler_with_optimizer: False leaves it to you when a prepared scheduler steps.
        kwargs_handlers: further arguments for torch's DDP, GradScaler, autocast and process group.
        parallelism_config: the mesh; only `dp_replicate_size` and, with an `fsdp_plugin`, `dp_shard_size` are built yet.
        world, ranks: the part of the job that this Accelerator lives on; the whole job by default. Only members build it.
        scheduler_unit: what a prepared scheduler counts. "process", the default: each update advances it by the number of
            processes, so that a schedule written for one process keeps its length in epochs. "update": each update is one step.
        fsdp_plugin: divide parameters over the ranks, a `FullyShardedDataParallelPlugin`.
        deepspeed_plugin, torch_tp_plugin, megatron_lm_plugin, log_with, dynamo_backend, dynamo_plugin,
        deepspeed_plugins: not built yet.

    Raises:
        ValueError: a setting is not legal, contradicts another or the running process, or is not supported by the device.
        NotImplementedError: a feature that is not built yet.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = _UNSET,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[Any] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        *,
        world: World | None = None,
        ranks: Sequence[int] | None = None,
        scheduler_unit: str | None = None,
    ) -> None:
        refuse_unbuilt(locals())
        check_kinds(
            dataloader_config=(dataloader_config, DataLoaderConfiguration),
            gradient_accumulation_plugin=(gradient_accumulation_plugin, GradientAccumulationPlugin),
            project_config=(project_config, ProjectConfiguration),
        )
        self.dataloader_config = DataLoaderConfiguration() if dataloader_config is None else dataloader_config
        if split_batches is not _UNSET:
            self.dataloader_config.split_batches = bool(split_batches)
        self.project_configuration = choose_project(project_dir, project_config)
        self._session = open_session(
            device_placement=device_placement,
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            cpu=cpu,
            dataloader_config=self.dataloader_config,
            rng_types=rng_types,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            scheduler_unit=scheduler_unit,
            fsdp_plugin=fsdp_plugin,
            kwargs_handlers=kwargs_handlers,
            parallelism_config=parallelism_config,
            world=world,
            ranks=ranks,
        )
        self._session.preemption = watch_signals(self._session, self.project_configuration)
        self.state: AcceleratorState = self._session.state
        self.gradient_state: GradientState = self._session.gradients
        self.rng_types = self._session.rng_types
        self.trackers: list[Any] = []
        self.log_with: list[Any] = []
        self.flag_tensor: torch.Tensor | None = None
        self.has_lomo_optimizer = False

    # -- where am I --------------------------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """The processes that this Accelerator works with."""
        return self._session.world

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.state.device

    @property
    def distributed_type(self) -> DistributedType:
        """The label of the set-up."""
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:
        """Number of processes."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        """This process's rank on its machine."""
        return self.state.local_process_index

    @property
    def multi_device(self) -> bool:
        """Whether several accelerators of one type train together."""
        return self.world.group is not None and not self.world.row.is_cpu

    @property
    def parallelism_config(self) -> Any:
        """The mesh that was asked for, or None."""
        return self.state.parallelism_config

    @property
    def tensor_parallel_rank(self) -> int:
        """This process's position among those that share each layer.

        Raises:
            RuntimeError: no `parallelism_config` was given.
        """
        return self._session.axis_rank("tp", "Tensor parallelism")

    @property
    def data_parallel_rank(self) -> int:
        """This process's position among the copies of the model.

        Raises:
            RuntimeError: no `parallelism_config` was given.
        """
        return self._session.axis_rank("dp_replicate", "Data parallelism")

    @property
    def data_parallel_shard_rank(self) -> int:
        """This process's position among those that share one copy's parameters.

        Raises:
            RuntimeError: no `parallelism_config` was given.
        """
        return self._session.axis_rank("dp_shard", "Shard-based data parallelism")

    @property
    def context_parallel_rank(self) -> int:
        """This process's position among those that share each sequence.

        Raises:
            RuntimeError: no `parallelism_config` was given.
        """
        return self._session.axis_rank("cp", "Context parallelism")

    @property
    def pipeline_parallel_rank(self) -> int:
        """The stage of this process. Not built yet."""
        raise NotImplementedError("Pipeline parallelism is not built yet (area: N-D parallelism).")

    @property
    def torch_device_mesh(self) -> Any:
        """The DeviceMesh, or None."""
        return self.state.device_mesh

    # -- what was set ------------------------------------------------------------------------------------------------

    @property
    def mixed_precision(self) -> str:
        """Precision of the forward pass."""
        return self.state.mixed_precision

    @property
    def native_amp(self) -> bool:
        """Whether torch's autocast is on."""
        return self._session.dtype is not None

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler of fp16 training."""
        return None if self._session.scaling is None else self._session.scaling.scaler

    @property
    def deepspeed_plugin(self) -> None:
        """The active DeepSpeed plugin; None, since DeepSpeed is not built yet."""
        return self.state.deepspeed_plugin

    @property
    def fp8_enabled(self) -> bool:
        """Whether fp8 is on; it is not built yet."""
        return False

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in fp8."""
        return FP8BackendType.NO

    @property
    def device_placement(self) -> bool:
        """Whether `prepare` moves things to the device."""
        return self._session.device_placement

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether prepared schedulers follow their optimizers."""
        return self._session.step_scheduler_with_optimizer

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch is shared by the processes."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether one process reads for all."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether every process gets the same number of full batches."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffling is seeded by the epoch."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device without waiting."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether torchdata's loader is used."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def project_dir(self) -> Any:
        """The folder of the run."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> Any:
        """The folder of the trackers' files."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next automatically named checkpoint."""
        return self.project_configuration.iteration

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes model files."""
        return self.world.is_local_main

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded by FSDP2."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether mesh axes are combined freely; that comes with FSDP2."""
        return False

    # -- prepare -----------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Make objects fit for this set-up and return them in the same order.

        Models, optimizers, schedulers and data loaders are prepared, everything else is returned as it is; what is prepared
        already is returned unchanged.

        Args:
            args: the objects.
            device_placement: per object, whether to move it to the device; `self.device_placement` by default.

        Raises:
            ValueError: `device_placement` has another length than `args`, or a model is spread over devices in a distributed run.
        """
        if device_placement is not None and len(device_placement) != len(args):
            raise ValueError(
                f"`device_placement` should be a list with {len(args)} elements (the number of objects passed), but it has "
                f"{len(device_placement)}."
            )
        placements: list[bool | None] = [None] * len(args) if device_placement is None else list(device_placement)
        prepared = self._session.prepare(args, placements)
        return prepared if len(prepared) > 1 else prepared[0] if prepared else ()

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare a model: autocast, device, then DDP where there are several processes and something to train.

        Args:
            model: the model; it is changed in place where that is possible.
            device_placement: move it to the device. Models that hold DTensors are never moved.
            evaluation_mode: it will not be trained, so that no gradients are exchanged.
        """
        return self._session.prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare an optimizer: it steps only when an accumulation window is complete."""
        return self._session.prepare_optimizer(optimizer, device_placement)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler: it advances when its optimizer steps, by the number of processes unless `split_batches`."""
        return self._session.prepare_scheduler(scheduler)

    def prepare_data_loader(
        self,
        data_loader: torch.utils.data.DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepare a loader: each process gets its part of the data, on its device."""
        return self._session.prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)

    def explain(self, obj: Any = None) -> Any:
        """What was done to a prepared model; what each rank gets of a prepared loader in an epoch; without `obj`, all models.

        The result prints as a table, and holds the same as data.

        Raises:
            ValueError: `obj` is not a model or a loader that this Accelerator prepared.
        """
        return self._session.explain(obj)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader that leaves out the first `num_batches` batches of its first pass."""
        return self._session.skip_first_batches(dataloader, num_batches)

    # -- train -------------------------------------------------------------------------------------------------------

    @property
    def sync_gradients(self) -> bool:
        """Whether the present micro-batch completes its accumulation window."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.gradient_state.plugin_kwargs["num_steps"] = GradientAccumulationPlugin(num_steps=value).num_steps or 1

    @property
    def step(self) -> int:
        """Micro-batches since the start, or since the end of the last loader."""
        return self.gradient_state.step

    @step.setter
    def step(self, value: int) -> None:
        self.gradient_state.step = value

    def accumulate(self, *models: torch.nn.Module) -> Window:
        """Count a micro-batch; inside, prepared optimizers and schedulers act only if it completes its window.

        Example:
            >>> for batch in loader:
            ...     with accelerator.accumulate(model):
            ...         accelerator.backward(loss_of(model, batch))
            ...         optimizer.step()
            ...         optimizer.zero_grad()
        """
        return self._session.lone_window or Window(self.gradient_state, self._session.exchanging, models)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Keep backward passes inside from exchanging gradients; they add up locally."""
        return self._session.no_sync(model)

    def trigger_sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Exchange gradients in the next backward pass although its forward passes ran under `no_sync`."""
        return self._session.engine.sync_next_backward(model)

    def backward(self, loss: torch.Tensor, *, weight: Any = None, **kwargs: Any) -> None:
        """The backward pass, with the loss divided for accumulation and scaled for fp16.

        Args:
            loss: the mean over the micro-batch; with a weight the sum over it.
            weight: with `GradientAccumulationPlugin(scale="weight")` how much the micro-batch has (its number of tokens, say).
            kwargs: those of `Tensor.backward`.
        """
        self._session.backward(loss, weight, kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Undo the loss scale of fp16 in the gradients of `optimizer` (one or a list), or of all; at most once per step."""
        one = optimizer is None or isinstance(optimizer, (list, tuple))
        self._session.unscale_gradients(optimizer if one else [optimizer])

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Scale gradients down to a global norm of at most `max_norm`, and return the norm before; unscales first.

        `parameters` may be a tensor, a list or a generator.
        """
        return self._session.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Limit every element of the gradients to [-clip_value, clip_value]; unscales first."""
        self._session.clip_grad_value_(parameters, clip_value)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether any optimizer left its last step out because gradients were not finite."""
        return any(optimizer.step_was_skipped for optimizer in self._session.optimizers)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Run the body in the chosen precision; `AutocastKwargs(enabled=False)` in full precision."""
        return self._session.autocast(autocast_handler)

    def set_trigger(self) -> None:
        """Raise a flag that `check_trigger` sees on every process."""
        self.flag_tensor = torch.ones((), dtype=torch.int64, device=self.device)

    def check_trigger(self) -> bool:
        """Whether any process has raised the flag since the last check; call it on all processes. Lowers the flag."""
        raised = self.flag_tensor is not None
        self.flag_tensor = None
        return self._session.any_rank(raised)

    def check_preemption(self) -> bool:
        """Whether a signal of `ProjectConfiguration.save_on_signal` has come to any process, the same on all of them.

        Call it on all processes, at the same places: it is a small exchange. From the first call on nothing is saved by itself:
        it is you who saves and leaves.

        Raises:
            ValueError: no signals are configured.

        Example:
            >>> for step in range(steps):
            ...     train(step)
            ...     if step % 50 == 0 and accelerator.check_preemption():
            ...         accelerator.save_state()
            ...         raise SystemExit(75)
        """
        return self._session.check_preemption()

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> AbstractContextManager[Any]:
        """Train although processes have different numbers of batches: those that have none left take part in the exchange only.

        Use it around one epoch. Gradients are divided by the number of all processes, also when some have no batch any more.

        Args:
            joinables: the prepared models, or what else can join (`torch.distributed.algorithms.Joinable`).
            even_batches: inside, what `DataLoaderConfiguration.even_batches` is for the prepared map-style loaders; True makes
                joining unnecessary. None leaves them as they are.

        Raises:
            ValueError: something that can not join, or an accumulation over several steps.

        Example:
            >>> with accelerator.join_uneven_inputs([model], even_batches=False):
            ...     for batch in loader:
            ...         accelerator.backward(loss_of(model, batch))
            ...         optimizer.step()
            ...         optimizer.zero_grad()
        """
        return self._session.joining(joinables, even_batches)

    def maybe_context_parallel(
        self, buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None
    ) -> AbstractContextManager[Any]:
        """Split sequences over the context-parallel ranks; without such ranks it changes nothing and says so once."""
        return self._session.without_context_parallelism()

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """The fused backward pass and update of a LOMO optimizer. Not built yet."""
        raise NotImplementedError("LOMO optimizers are not built yet (area: engines).")

    # -- exchange ----------------------------------------------------------------------------------------------------

    def gather(self, tensor: Any, *, ragged: bool = False) -> Any:
        """All processes' tensors (nested in any structure), concatenated along the first dimension, on every process.

        With `ragged` their shapes may differ, and each tensor becomes the list of every process's own.
        """
        return self._session.gather(tensor, ragged)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, without the samples that were repeated to fill the last batch; any objects are allowed."""
        return self._session.gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, mean, ... over the processes of each tensor, times `scale`; the inputs are left as they are."""
        return self._session.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad each tensor along `dim` to the longest of all processes, so that they can be gathered."""
        return self._session.pad_across_processes(tensor, dim, pad_index, pad_first)

    # -- models ------------------------------------------------------------------------------------------------------

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """Your own module inside a prepared one; `keep_fp32_wrapper=False` also restores its original `forward`."""
        return self._session.unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole model's tensors by qualified name; `unwrap=False` keeps the prefixes of the prepared model."""
        return self._session.engine.model_state_dict(model) if unwrap else model.state_dict()

    def register_forward_method(self, model: torch.nn.Module, name: str) -> None:
        """Let a method of a prepared model other than `forward`, say `encode` or `generate`, do what `forward` does.

        From then on `model.encode(...)` gathers shards, exchanges the gradients that come from it, and runs under autocast. Call
        it after `prepare`, once per method; without it a method of a sharded model meets shards, and one of a replicated model is
        not found. On one process without mixed precision it changes nothing.

        Raises:
            ValueError: there is no such method, or `model` is a part of a unit.

        Example:
            >>> model = accelerator.prepare(model)
            >>> accelerator.register_forward_method(model, "encode")
            >>> loss = loss_of(model.encode(batch))
        """
        self._session.register_forward_method(model, name)

    def gathered(
        self, model: torch.nn.Module, *, writeback: bool = False, dtype: torch.dtype | None = None
    ) -> AbstractContextManager[Any]:
        """Inside, a prepared model is your own module with whole, plain parameters, on every process; call it on all of them.

        Everything can be done with it but training: looking at parameters, `forward` and any other method (`generate` gathers once
        and not at every token), changing values. Memory: the whole model on each process, see `gathered_units`. Replicated models
        are whole anyway, and behave in the same way.

        Args:
            model: the prepared model.
            writeback: keep what rank 0 has made of the parameters; what other ranks did to them is dropped. Buffers are each
                rank's own. Backward passes of forward passes from before fail, as torch says, since parameters were changed.
            dtype: a format for floating-point parameters, say torch.bfloat16 for half the memory.

        Raises:
            ValueError: parameters were changed without `writeback`, have another shape, or have gradients, at the end.
            RuntimeError: the model is in a forward or backward pass.

        Example:
            >>> with accelerator.gathered(model) as whole, torch.no_grad():
            ...     answer = whole.generate(question)
        """
        from hasten.parallel import gathered

        return gathered.gathered(self._session.own_module(model), self.world, writeback, dtype)

    def gathered_units(
        self, model: torch.nn.Module, *, writeback: bool = False, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, dict[str, torch.nn.Parameter]]]:
        """One unit of a model after the other with whole parameters: as `gathered`, in the memory of one unit.

        Yields a unit's name and its parameters by qualified name, each once; meanwhile the modules have them. A model that is not
        sharded is one unit. All processes must go to the end; who leaves the loop early gives up the changes of the present unit.

        Example:
            >>> for _, parameters in accelerator.gathered_units(model, writeback=True):
            ...     for name, parameter in parameters.items():
            ...         torch.nn.init.normal_(parameter, std=0.02)
        """
        from hasten.parallel import gathered

        return gathered.gathered_units(self._session.own_module(model), self.world, writeback, dtype)

    def stream_weights(
        self,
        model: torch.nn.Module,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        at_once: int = 64 << 20,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The names and whole tensors of a model's state, one after the other, on every process: for an inference engine, say.

        Names and values are those of `get_state_dict`: parameters and persistent buffers; names that share a tensor come one after
        the other, with the same tensor. Tensors may be the model's own memory: do not change them.

        A process has at most one whole tensor and one of the loop's, or `at_once` bytes of small ones, which travel in one
        collective, after a small one in which processes make sure that all are here. All processes iterate to the end, or leave
        at the same place; if one leaves alone, the others get an error at their next step.

        Args:
            model: the prepared model.
            dtype: a format into which floating-point tensors are converted, before they travel.
            device: where the tensors shall be; by default this process's device, or where the model is.
            at_once: bytes of small tensors that travel together; a larger tensor travels alone.

        Example:
            >>> for name, tensor in accelerator.stream_weights(model, torch.bfloat16):
            ...     if accelerator.is_main_process:
            ...         engine.load(name, tensor)
        """
        from hasten.weights import whole

        entries = whole.state_of(self._session.own_module(model))
        return whole.stream(entries, self.world, "stream_weights", dtype, device, at_once)

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Whether a device map has spread the model over several devices."""
        return self._session.is_spread(model)

    # -- keep --------------------------------------------------------------------------------------------------------

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and restore further objects with `save_state` and `load_state`.

        Raises:
            ValueError: an object has no `state_dict` or no `load_state_dict`.
        """
        self._session.register_for_checkpointing(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` in each `save_state` before the models are written; it may empty `weights`."""
        return _register(self._session.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, input_dir)` in each `load_state` before the models are read; it may empty `models`."""
        return _register(self._session.load_hooks, hook)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Any:
        """Write everything that is needed to continue; a crash at any moment leaves the previous checkpoint intact.

        Call it on every process. It holds the models, optimizers, schedulers, scaler, random states, positions in the
        loaders, and registered objects.

        Args:
            output_dir: the folder; ignored under automatic checkpoint naming.
            safe_serialization: write models as safetensors.
            blocking: False copies everything into the memory of the host, returns, and writes it in the background. One save is
                under way at a time: the next one waits for it. What goes wrong is raised by `result()` of what is returned, or by
                the next `save_state`, `load_state` or `end_training`.
            save_model_func_kwargs: for sharded models, `use_dcp=False` writes one file of each process, `use_dcp=True` folders of
                shards; by default what `sharded_save` of the plugin says.

        Returns:
            The folder (a `Path`). With `blocking=False` the save, with `path`, `done()` and `result(timeout=None)`.

        Raises:
            ValueError: no folder is given and checkpoints are not named automatically, or the folder's number exists already.
        """
        from hasten import saving

        options = {"safe_serialization": safe_serialization, "blocking": blocking, **save_model_func_kwargs}
        return saving.save_state(self._session, self.project_configuration, output_dir, options)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        checksums: bool = False,
        fallback: bool = False,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Continue from a checkpoint; call it on every process after preparing the same objects.

        The loaders' seeds and epochs are restored, so that `skip_first_batches(loader, n)` continues in the same order.

        Args:
            input_dir: the folder; without it, or with "latest", the newest complete one, under automatic checkpoint naming.
            load_kwargs: arguments of `torch.load` for optimizers, schedulers and the scaler.
            checksums: read every file before anything is changed, and compare its checksums; sizes are always compared.
            fallback: if the checksums of the newest checkpoint are wrong, take the one before, with a warning.
            load_model_func_kwargs: arguments for loading models, e.g. `strict=False`, and `map_location`: None, "cpu" or
                "on_device".

        Raises:
            RuntimeError: a file is damaged; the message names it.
            ValueError: there is no such checkpoint.
        """
        from hasten import saving

        saving.load_state(
            self._session,
            self.project_configuration,
            input_dir,
            load_kwargs,
            load_model_func_kwargs,
            checksums=checksums or fallback,
            fallback=fallback,
        )

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights for others to read: safetensors files of at most `max_shard_size`, and their index."""
        from hasten import saving

        each_node = self.project_configuration.save_on_each_node
        saving.save_model(self._session, model, save_directory, max_shard_size, safe_serialization, each_node)

    def load_weights(
        self,
        model: torch.nn.Module,
        path: str | os.PathLike[str],
        *,
        strict: bool = True,
        initialise: Callable[[torch.nn.Module], Any] | None = None,
    ) -> tuple[list[str], list[str]]:
        """Load weights from files into a model, prepared or not; call it on every process, before anything is trained.

        Of a sharded model each process reads its own parts only, so that a model on the meta device
        (`with torch.device("meta")`) is loaded without ever being whole in memory.

        Args:
            model: the model; what of it is on the meta device gets memory.
            path: a safetensors file or one of `torch.save`, an index of several, a folder with one of these, a folder of the
                Hugging Face cache, or the name of a model in it. Nothing is downloaded.
            strict: raise if names are missing or unexpected; tied names need to be there once.
            initialise: is called with each module of which a tensor is on the meta device and not in the files (buffers that are
                not saved, new heads), and sets it; in transformers `model._init_weights`.

        Returns:
            The missing and the unexpected names.

        Raises:
            FileNotFoundError: there are no weights at the path.
            RuntimeError: a file is damaged, or names differ under `strict`.
            ValueError: shapes differ, or tensors would be left without values.
        """
        return self._session.load_weights(model, path, strict, initialise)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object to a file, once per job, or once per machine under `save_on_each_node`."""
        from hasten import saving

        saving.save(self._session, obj, f, safe_serialization, self.project_configuration.save_on_each_node)

    # -- track -------------------------------------------------------------------------------------------------------

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Start the trackers that `log_with` named; there are none yet, so nothing happens."""

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by name.

        Raises:
            ValueError: there is no such tracker; none is built yet.
        """
        raise ValueError(f"{name!r} is not an available tracker: trackers are not built yet (area: trackers).")

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Log values to the trackers; there are none yet, so nothing happens."""

    def profile(self, profile_handler: Any = None) -> AbstractContextManager[Any]:
        """Profile the body with torch's profiler. Not built yet."""
        raise NotImplementedError(
            "Accelerator.profile is not built yet (area: observability). Use torch.profiler.profile."
        )

    # -- end ---------------------------------------------------------------------------------------------------------

    def end_training(self) -> None:
        """Wait for a save in the background, and end the process group; call it last. A script that does not ends as cleanly.

        Raises:
            OSError, RuntimeError: the save in the background has failed. The process group has ended all the same.
        """
        if self._session.preemption is not None:
            self._session.preemption.close()
        try:
            if self._session.saving is not None:
                from hasten import saving

                saving.settle(self._session)
        finally:
            self.state.destroy_process_group()

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget every prepared object and give memory back; assign the result to your own names: `a, b = free_memory(a, b)`."""
        self._session.clear()
        return [None for _ in objects]

    def clear(self, *objects: Any) -> list[None]:
        """Another name of `free_memory`."""
        return self.free_memory(*objects)

    # -- names that other libraries reach for ------------------------------------------------------------------------

    @property
    def _models(self) -> list[torch.nn.Module]:
        return self._session.models

    @property
    def _optimizers(self) -> list[AcceleratedOptimizer]:
        return self._session.optimizers

    @property
    def _schedulers(self) -> list[Any]:
        return self._session.schedulers

    @property
    def _dataloaders(self) -> list[Any]:
        return self._session.dataloaders

    @property
    def _custom_objects(self) -> list[Any]:
        return self._session.custom

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_handler") and "_session" in self.__dict__ and name in self._session.handlers:
            return self._session.handlers[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        # A copy would be a second owner of the same prepared objects.
        return self


def _register(hooks: OrderedDict[int, Any], hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle

"""The session: what one Accelerator holds, and what it does with it."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from hasten.protocols import Engine
from hasten.training.accumulation import GradientState, Window
from hasten.world.context import CONTEXT

if TYPE_CHECKING:
    from hasten.checkpoint.background import Saving
    from hasten.parallel.plan import Recipe
    from hasten.precision.scaler import LossScaling
    from hasten.settings.accumulation import GradientAccumulationPlugin
    from hasten.settings.dataloading import DataLoaderConfiguration
    from hasten.state.accelerator import AcceleratorState
    from hasten.training.loss import WindowMean
    from hasten.training.optimizer import AcceleratedOptimizer
    from hasten.training.preemption import Preemption
    from hasten.training.scheduler import AcceleratedScheduler
    from hasten.world.process import World

_logger = logging.getLogger(__name__)

_PREPARED = "_is_accelerate_prepared"  # the mark that other libraries know


class Session:
    """The prepared objects of one Accelerator, and the engine, precision and accumulation state that they share.

    Args:
        state: the world and the precision.
        accumulation: how many micro-batches make an update.
        handlers: further arguments for torch's objects, by class.
        device_placement: move models, optimizer state and batches to the device.
        dataloader_config: how loaders are divided over the ranks; held by reference.
        rng_types: generators that are synchronised at the start of each epoch.
        step_scheduler_with_optimizer: whether prepared schedulers follow their optimizers.
        scheduler_unit: see `Accelerator`; None for the default.
        engine: how models live on the ranks.
    """

    def __init__(
        self,
        state: AcceleratorState,
        accumulation: GradientAccumulationPlugin,
        handlers: dict[str, Any],
        device_placement: bool,
        dataloader_config: DataLoaderConfiguration,
        rng_types: list[Any],
        step_scheduler_with_optimizer: bool,
        scheduler_unit: str | None,
        engine: Engine,
    ) -> None:
        self.state = state
        self.world: World = state.world
        self.gradients = GradientState.for_accelerator(accumulation)
        self.handlers = handlers
        self.device_placement = device_placement
        self.dataloader_config = dataloader_config
        self.rng_types = rng_types
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.scheduler_unit = scheduler_unit
        self.engine = engine
        self.exchanging: Engine | None = self.engine if self.world.group is not None else None
        self.lone_window = Window(self.gradients, None, ()) if self.exchanging is None else None
        self.dtype: torch.dtype | None = None
        self.scaling: LossScaling | None = None
        self.mean: WindowMean | None = None
        self.preemption: Preemption | None = None
        if state.mixed_precision != "no":
            self._set_precision(state.mixed_precision)
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[AcceleratedOptimizer] = []
        self.schedulers: list[AcceleratedScheduler] = []
        self.dataloaders: list[Any] = []
        self.custom: list[Any] = []
        self.save_hooks: OrderedDict[int, Any] = OrderedDict()
        self.load_hooks: OrderedDict[int, Any] = OrderedDict()
        self.recipes: dict[int, tuple[Recipe, list[str]]] = {}
        self.saving: Saving | None = None  # in the background

    def _set_precision(self, precision: str) -> None:
        from hasten.precision import autocast

        self.dtype = autocast.DTYPES[precision]
        if precision == "fp16":
            from hasten.precision.scaler import LossScaling

            self.scaling = LossScaling(self.world.device.type, self.handlers["scaler_handler"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for optimizer in self.optimizers:
            self._lead(optimizer)
        for scheduler in self.schedulers:
            scheduler.gradient_state = self.gradients

    # -- preparing ---------------------------------------------------------------------------------------------------

    def prepare(self, objects: tuple[Any, ...], placements: list[bool | None]) -> tuple[Any, ...]:
        """Prepare models, then optimizers, which may have to follow them, and loaders, then schedulers, which need to see all
        optimizers; the rest passes through."""
        pairs = list(zip(objects, placements, strict=True))
        models = {
            id(item): self.prepare_model(item, place) for item, place in pairs if isinstance(item, torch.nn.Module)
        }
        first = [models[id(item)] if id(item) in models else self._prepare_one(item, place) for item, place in pairs]
        return tuple(self.prepare_scheduler(item) if _is_scheduler(item) else item for item in first)

    def _prepare_one(self, item: Any, placement: bool | None) -> Any:
        if isinstance(item, torch.utils.data.DataLoader):
            return self.prepare_data_loader(item, placement)
        if isinstance(item, torch.optim.Optimizer):
            return self.prepare_optimizer(item, placement)
        return item

    def prepare_model(self, model: torch.nn.Module, placement: bool | None = None, evaluation: bool = False) -> Any:
        """Prepare one model; see `Accelerator.prepare_model`."""
        known = _find(model, self.models, self.engine.unwrap)
        if known is not None:
            return known
        self._check_device_map(model)
        from hasten.parallel import plan

        recipe = plan.Recipe(self.world, self.engine, before=[*self._transforms(), *self.engine.transforms])
        wrapped, steps = plan.prepare(
            model,
            recipe,
            place=(self.device_placement if placement is None else placement) and not self.is_spread(model),
            evaluation=evaluation,
        )
        setattr(wrapped, _PREPARED, True)
        for optimizer in self.optimizers:
            self.engine.follow(optimizer.optimizer)
        self.models.append(wrapped)
        self.recipes[id(wrapped)] = recipe, steps
        for name in self.engine.forward_methods(wrapped):
            self.register_forward_method(wrapped, name)
        self._check_even(self.dataloaders)
        return wrapped

    def _transforms(self) -> list[Any]:
        if self.dtype is None:
            return []
        from hasten.precision import autocast

        return [autocast.AutocastForward(self.world.device.type, self.dtype, self.handlers["autocast_handler"])]

    def is_spread(self, model: torch.nn.Module) -> bool:
        """Whether a device map has put parts of the model on several devices."""
        return any(len(getattr(module, "hf_device_map", None) or ()) > 1 for module in model.modules())

    def _check_device_map(self, model: torch.nn.Module) -> None:
        from hasten.settings import environment

        if self.world.group is None or not self.is_spread(model) or environment.get("bypass_device_map"):
            return
        raise ValueError(
            "You can't train a model that has been loaded with `device_map='auto'` in any distributed mode: "
            f"{type(model).__name__} is spread over several devices by its `hf_device_map`, and each of the {self.world.size} "
            "ranks would use all of them. Load it without a device map, start one process, or set "
            "ACCELERATE_BYPASS_DEVICE_MAP=true if you know that the devices of the ranks are disjoint."
        )

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare one optimizer; see `Accelerator.prepare_optimizer`."""
        prepared = _find(optimizer, self.optimizers, lambda held: held.optimizer)
        self.engine.follow(optimizer if prepared is None else prepared.optimizer)
        if prepared is None:
            from hasten.training.optimizer import AcceleratedOptimizer

            prepared = AcceleratedOptimizer(optimizer, self.device_placement if placement is None else placement)
            setattr(prepared, _PREPARED, True)
            self.optimizers.append(prepared)
        self._lead(prepared)
        return prepared

    def _lead(self, optimizer: AcceleratedOptimizer) -> None:
        # An optimizer obeys the Accelerator that prepared it last.
        optimizer.gradient_state = self.gradients
        optimizer.follow = self.engine.follow
        optimizer.before_step = self._before_first_step if self.world.size > 1 else None
        optimizer.scaler = optimizer.update_scale = None
        if self.scaling is not None:
            optimizer.scaler, optimizer.update_scale = self.scaling.scaler, self.scaling.stepped
            self.scaling.join(optimizer)

    def _before_first_step(self, optimizer: AcceleratedOptimizer) -> None:
        from hasten.training import strangers

        strangers.tell(optimizer, self.models, self.world)
        optimizer.before_step = self.engine.before_step
        if optimizer.before_step is not None:
            optimizer.before_step(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare one scheduler; see `Accelerator.prepare_scheduler`."""
        known = _find(scheduler, self.schedulers, lambda held: held.scheduler)
        if known is not None:
            known.gradient_state = self.gradients
            return known
        from hasten.training.scheduler import AcceleratedScheduler

        own = getattr(scheduler, "optimizer", None)
        bound = [prepared for prepared in self.optimizers if own is prepared or own is prepared.optimizer]
        prepared = AcceleratedScheduler(
            scheduler,
            bound or self.optimizers,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.dataloader_config.split_batches,
            gradient_state=self.gradients,
            num_processes=self.world.size,
            unit=self.scheduler_unit or "process",
        )
        if prepared.steps_per_update > 1 and self.scheduler_unit is None:
            self._tell_unit(prepared)
        setattr(prepared, _PREPARED, True)
        self.schedulers.append(prepared)
        return prepared

    def _tell_unit(self, scheduler: AcceleratedScheduler) -> None:
        if self.world.is_main and CONTEXT.first_time("how schedules advance"):
            _logger.warning(
                "%s advances %d steps per update, one per process, so that a schedule written for one process keeps its length "
                'in epochs. Accelerator(scheduler_unit="update") takes one step per update; "process" keeps it as it is and says '
                "nothing.",
                type(scheduler.scheduler).__name__,
                scheduler.steps_per_update,
            )

    def prepare_data_loader(
        self, loader: Any, placement: bool | None = None, slice_fn: Callable[..., Any] | None = None
    ) -> Any:
        """Prepare one loader; see `Accelerator.prepare_data_loader`."""
        if _find(loader, self.dataloaders, lambda held: held) is not None:
            return loader
        from hasten.data import loader as loader_module

        config = self.dataloader_config
        prepared = loader_module.prepare_data_loader(
            loader,
            self.world.device,
            num_processes=self.world.size,
            process_index=self.world.rank,
            split_batches=config.split_batches,
            put_on_device=self.device_placement if placement is None else placement,
            rng_types=list(self.rng_types),
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            slice_fn_for_dispatch=slice_fn,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            world=self.world,
            sharding=config.sharding,
            resume=config.resume,
            read_ahead=config.read_ahead,
            move_ahead=config.move_ahead,
        )
        setattr(prepared, _PREPARED, True)
        self.dataloaders.append(prepared)
        self._check_even([prepared])
        return prepared

    def _check_even(self, loaders: Iterable[Any]) -> None:
        """Warn of a loader that would let some ranks run a sharded model once more than others."""
        if not (self.engine.divides_state and self.models and self.world.is_main):
            return
        from hasten.data import contract

        for loader in loaders:
            steps = contract.describe(loader).share.steps if getattr(loader, "even_batches", None) is False else None
            if steps is not None and len(set(steps)) > 1:
                _logger.warning(
                    "With even_batches=False the processes have different numbers of batches (%s), but a sharded model needs all "
                    "of them in each pass: those with a batch more would wait for the others. Use even_batches=True (the "
                    "default), drop_last=True, or end the epoch after %d batches.",
                    ", ".join(map(str, steps)),
                    min(steps),
                )

    # -- training ----------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, weight: Any, arguments: dict[str, Any]) -> None:
        """The backward pass of one micro-batch."""
        if self.preemption is not None:
            self.preemption.before_backward()
        settings = self.gradients.plugin_kwargs
        mean = self._window_mean(weight) if weight is not None or "scale" in settings else None
        if mean is not None:
            loss = mean.divide(loss, weight)
        elif (steps := settings.get("num_steps", 1)) != 1:
            loss = loss / steps
        if self.scaling is not None:
            loss = self.scaling.scale(loss)
        try:
            loss.backward(**arguments)
        except RuntimeError as error:
            self.engine.locate(error)
            raise
        if mean is not None:
            mean.correct()

    def _window_mean(self, weight: Any) -> WindowMean | None:
        """What divides losses if it is not the number of steps."""
        from hasten.training.loss import WEIGHT, WindowMean

        if weight is not None and self.gradients.scale != WEIGHT:
            raise ValueError(
                f"Rank {self.world.rank}: `backward(loss, weight=...)` needs GradientAccumulationPlugin(scale={WEIGHT!r}); here it "
                f"is scale={self.gradients.scale!r}, which divides losses without looking at weights."
            )
        if self.gradients.scale == "num_steps":
            return None
        if self.mean is None:
            self.mean = WindowMean(self.gradients, self.world, self._trained)
        return self.mean

    def _trained(self) -> list[torch.Tensor]:
        """The parameters of all prepared models and optimizers."""
        found = {id(parameter): parameter for model in self.models for parameter in model.parameters()}
        for optimizer in self.optimizers:
            found |= {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
        return list(found.values())

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        """Keep backward passes inside from exchanging gradients."""
        return self.engine.no_sync(model)

    def unscale_gradients(self, optimizers: Iterable[Any] | None = None) -> None:
        """Undo the loss scale in the gradients of some optimizers, or of all."""
        if self.scaling is not None:
            self.scaling.unscale(self.optimizers if optimizers is None else optimizers)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip by the global norm."""
        parameters = self.engine.current(parameters)
        if self.scaling is not None:
            parameters = self._unscaled(self.scaling, parameters)
        return self.engine.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip element by element."""
        parameters = self.engine.current(parameters)
        if self.scaling is not None:
            parameters = self._unscaled(self.scaling, parameters)
        from hasten.weights import gradients

        gradients.clip_grad_value_(parameters, clip_value)

    def _unscaled(self, scaling: LossScaling, parameters: Any) -> list[torch.Tensor]:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        scaling.unscale(scaling.owners(self.optimizers, parameters))
        return parameters

    def autocast(self, handler: Any) -> AbstractContextManager[Any]:
        """The precision of this session as a context."""
        from hasten.precision import autocast

        return autocast.autocast_context(
            self.world.device.type, self.dtype, handler or self.handlers["autocast_handler"]
        )

    @contextmanager
    def joining(self, joinables: Any, even_batches: bool | None) -> Iterator[None]:
        """Train although the ranks have different numbers of batches; see `Accelerator.join_uneven_inputs`."""
        if self.world.group is None:
            yield
            return
        uneven = nullcontext() if even_batches else self._join(joinables)
        preemption = None if even_batches else self.preemption
        with self._evened(even_batches), preemption.paused() if preemption else nullcontext(), uneven:
            yield

    @contextmanager
    def _evened(self, even_batches: bool | None) -> Iterator[None]:
        """Prepared map-style loaders with another `even_batches`."""
        before = [(loader, getattr(loader, "even_batches", None)) for loader in self.dataloaders]
        if even_batches is None:
            before = []
        elif any(value is None for _, value in before):
            warnings.warn(
                "Overriding even_batches is only supported for map-style datasets, yet some dataloaders given were iterable: these "
                "stay as they are.",
                stacklevel=5,
            )
        changed = [(loader, value) for loader, value in before if value is not None]
        try:
            for loader, _ in changed:
                loader.even_batches = even_batches
            yield
        finally:
            for loader, value in changed:
                loader.even_batches = value

    def _join(self, joinables: Any) -> AbstractContextManager[Any]:
        from torch.distributed.algorithms import Join, Joinable

        if self.engine.divides_state:
            raise ValueError(
                f"Rank {self.world.rank}: join_uneven_inputs works with replicated models (DDP) only: a sharded model needs all "
                "processes in each pass. Use even_batches=True, the default of DataLoaderConfiguration."
            )
        joinables = list(joinables) if isinstance(joinables, (list, tuple)) else [joinables]
        for item in joinables:
            if not isinstance(item, Joinable):
                raise ValueError(
                    f"Rank {self.world.rank}: join_uneven_inputs got a {type(item).__name__}, which can not join. Pass the "
                    "prepared models (`accelerator.prepare(model)` gives a DistributedDataParallel if it has something to train)."
                )
        if self.gradients.num_steps > 1:
            raise ValueError(
                f"Rank {self.world.rank}: join_uneven_inputs and {self.gradients.num_steps} accumulation steps do not go together: "
                "a rank with fewer batches ends its window earlier than the others. Use even_batches=True, the default of "
                "DataLoaderConfiguration, or accumulate 1 step."
            )
        if self.gradients.scale == "weight":
            raise ValueError(
                f'Rank {self.world.rank}: join_uneven_inputs and scale="weight" do not go together: a rank without batches '
                "could not tell its weight. Use even_batches=True, or weights of 0 for what is repeated."
            )
        return Join(joinables)

    def check_preemption(self) -> bool:
        """Whether a signal has come to any process; see `Accelerator.check_preemption`."""
        if self.preemption is None:
            raise ValueError(
                "check_preemption() answers for signals that were named: Accelerator(project_config=ProjectConfiguration("
                'project_dir=..., save_on_signal=("SIGTERM", "SIGUSR1"))).'
            )
        return self.preemption.check()

    def without_context_parallelism(self) -> AbstractContextManager[Any]:
        """A context that splits nothing, with one warning."""
        if CONTEXT.first_time("context parallelism is off"):
            warnings.warn(
                "maybe_context_parallel has no effect: context parallelism is off (it is not built yet).", stacklevel=3
            )
        return nullcontext()

    def load_weights(self, model: Any, path: Any, strict: bool, initialise: Any) -> tuple[list[str], list[str]]:
        """Load weights from files; see `Accelerator.load_weights`."""
        return self.engine.load_weights(self.own_module(model), path, strict=strict, initialise=initialise)

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool, keep_torch_compile: bool) -> Any:
        """The user's own module inside a prepared one, compiled or not."""
        compiled = hasattr(model, "_orig_mod")
        inner = self.engine.unwrap(model._orig_mod if compiled else model)
        if hasattr(inner, "_orig_mod") and not keep_torch_compile:  # compiled before it was prepared
            inner = inner._orig_mod
        if not keep_fp32_wrapper:
            from hasten.precision import autocast

            inner = autocast.restore_forward(inner)
        if compiled and keep_torch_compile:
            model._orig_mod = inner
            return model
        return inner

    def own_module(self, model: Any) -> Any:
        """The user's own module inside a prepared one, which torch.compile may have wrapped on either side."""
        inner = self.engine.unwrap(getattr(model, "_orig_mod", model))
        return getattr(inner, "_orig_mod", inner)

    def register_forward_method(self, model: Any, name: str) -> None:
        """Let a method run as `forward` does; see `Accelerator.register_forward_method`."""
        from hasten.parallel import methods

        around = None
        if self.dtype is not None:
            from hasten.precision import autocast

            around = autocast.AutocastForward(
                self.world.device.type, self.dtype, self.handlers["autocast_handler"]
            ).around
        methods.register_forward_method(model, name, around, roots=[self.own_module(each) for each in self.models])

    def explain(self, item: Any) -> Any:
        """The plans of the prepared models, or the plan or the epoch contract of `item`."""
        if item is not None and any(item is loader for loader in self.dataloaders):
            from hasten.data import contract

            return contract.describe(item)
        from hasten.parallel import plan

        found = [
            plan.describe(
                self.engine.unwrap(model), *self.recipes.get(id(model), (plan.Recipe(self.world, self.engine), []))
            )
            for model in self.models
            if item is None or item is model or item is self.engine.unwrap(model)
        ]
        if item is None:
            return plan.Plans(found)
        if not found:
            raise ValueError(
                f"explain({type(item).__name__}): this Accelerator has not prepared that object as a model or a data loader; it "
                f"has prepared {[type(self.engine.unwrap(model)).__name__ for model in self.models]} and {len(self.dataloaders)} "
                "data loaders."
            )
        return found[0]

    def axis_rank(self, axis: str, meaning: str) -> int:
        """This process's position along one axis of the mesh."""
        sizes = self.state.parallelism_config
        if sizes is None:
            raise RuntimeError(f"{meaning} is not configured. Set `parallelism_config` first.")
        from hasten.world import mesh

        return mesh.axis_rank(self.world, sizes, axis)

    def skip_first_batches(self, loader: Any, num_batches: int) -> Any:
        """A loader without its first batches."""
        from hasten.data import skip

        return skip.skip_first_batches(loader, num_batches=num_batches)

    # -- exchanging --------------------------------------------------------------------------------------------------

    def gather(self, tensor: Any, ragged: bool) -> Any:
        """All processes' tensors, concatenated; listed, if `ragged`."""
        from hasten.collectives import gather

        # What another library has put in its place may not know `ragged`.
        options = {"ragged": True} if ragged else {}
        return gather.gather(tensor, world=self.world, **options)

    def gather_for_metrics(self, data: Any, use_gather_object: bool) -> Any:
        """All processes' results, without padding."""
        from hasten.collectives import metrics

        return metrics.gather_for_metrics(data, CONTEXT.loaders.current, use_gather_object, world=self.world)

    def reduce(self, tensor: Any, reduction: str, scale: float) -> Any:
        """The tensors of all processes, combined."""
        from hasten.collectives import reduce

        return reduce.reduce(tensor, reduction, scale, world=self.world)

    def pad_across_processes(self, tensor: Any, dim: int, pad_index: int, pad_first: bool) -> Any:
        """Tensors of equal length on all processes."""
        from hasten.collectives import pad

        return pad.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first, world=self.world)

    def any_rank(self, raised: bool) -> bool:
        """Whether a flag is raised on any process."""
        if self.world.size == 1:
            return raised
        flag = torch.tensor(int(raised), device=self.world.device)
        return bool(self.reduce(flag, "sum", 1.0).item())

    # -- keeping and forgetting --------------------------------------------------------------------------------------

    def register_for_checkpointing(self, objects: tuple[Any, ...]) -> None:
        """Save and restore these objects with every checkpoint."""
        bad = [
            f"Item at index {index}, `{type(item).__name__}`"
            for index, item in enumerate(objects)
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict"))
        ]
        if bad:
            raise ValueError(
                "All `objects` must include a `state_dict` and `load_state_dict` function to be stored. The following inputs are "
                "invalid:\n\t- " + "\n\t- ".join(bad)
            )
        self.custom.extend(objects)

    def clear(self) -> None:
        """Forget every prepared object and collect what nobody else holds."""
        for held in (self.models, self.optimizers, self.schedulers, self.dataloaders, self.recipes):
            held.clear()
        if self.scaling is not None:
            self.scaling.leave_all()
        self.gradients.step = 0
        from hasten.world import memory

        memory.clear_device_cache(garbage_collection=True)


def _find(item: Any, held: list[Any], unwrap: Callable[[Any], Any]) -> Any:
    """What `item` was prepared as, or None; one that another Accelerator prepared is held from now on too."""
    for prepared in held:
        if item is prepared or item is unwrap(prepared):
            return prepared
    if not getattr(item, _PREPARED, False):
        return None
    held.append(item)
    return item


def _is_scheduler(item: Any) -> bool:
    if getattr(item, _PREPARED, False) is True and hasattr(item, "scheduler"):
        return True
    return isinstance(item, (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau))

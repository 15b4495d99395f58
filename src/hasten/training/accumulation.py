"""Gradient accumulation: when a window of micro-batches is complete."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

from hasten.protocols import Engine
from hasten.settings.accumulation import GradientAccumulationPlugin
from hasten.world.context import CONTEXT


class GradientState:
    """Where one Accelerator stands in its accumulation window, and in the loader that is being iterated.

    `GradientState()` is a view of the state of the newest Accelerator; each Accelerator has its own.

    Attributes:
        sync_gradients: whether the present micro-batch completes its window, so that optimizers step.
        step: micro-batches since the start of the run, or since the end of the last loader.
        plugin_kwargs: the accumulation settings that differ from their defaults; may be changed at any time.
        updates: steps of prepared optimizers since the start.
        micro_batches: micro-batches that have been counted since the start.
        window_start: how many of them were before the present window.
        running: how many `with accelerator.accumulate(...)` the program is in.
        local: how many contexts it is in that let each process train a copy of its own (LocalSGD, DiLoCo).
    """

    sync_gradients: bool
    step: int
    updates: int
    micro_batches: int
    window_start: int
    running: int
    local: int
    _counted: int  # `step` after the last micro-batch
    plugin_kwargs: dict[str, Any]

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        self.__dict__ = CONTEXT.gradient_state
        if not self.initialized:
            self.__dict__.update(sync_gradients=True, step=0, plugin_kwargs={}, _is_xla_gradients_synced=False)
            self.__dict__.update(updates=0, micro_batches=0, window_start=0, running=0, local=0, _counted=0)
        if gradient_accumulation_plugin is not None:
            self.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()

    @classmethod
    def for_accelerator(cls, plugin: GradientAccumulationPlugin) -> GradientState:
        """A state of its own, which `GradientState()` shows from now on."""
        CONTEXT.gradient_state = {}
        return cls(plugin)

    @property
    def initialized(self) -> bool:
        """Whether there is a state to look at."""
        return "sync_gradients" in self.__dict__

    @property
    def num_steps(self) -> int:
        """Micro-batches per update."""
        return self.plugin_kwargs.get("num_steps", 1)

    @property
    def adjust_scheduler(self) -> bool:
        """Whether a scheduler is to be adjusted to accumulation; it never needs to be."""
        return self.plugin_kwargs.get("adjust_scheduler", False)

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the end of the loader ends the window."""
        return self.plugin_kwargs.get("sync_with_dataloader", True)

    @property
    def sync_each_batch(self) -> bool:
        """Whether gradients are exchanged after every micro-batch."""
        return self.plugin_kwargs.get("sync_each_batch", False)

    @property
    def scale(self) -> str:
        """What losses are divided by: "num_steps", "window" or "weight"."""
        return self.plugin_kwargs.get("scale", "num_steps")

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch in the running loop is its loader's last."""
        loader = CONTEXT.loaders.current
        return loader is not None and loader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples in the loader's last global batch that are not padding; 0 for all, -1 where unknown or outside a loader."""
        loader = CONTEXT.loaders.current
        return -1 if loader is None else loader.remainder

    @property
    def active_dataloader(self) -> Any:
        """The prepared loader of the innermost running loop, or None."""
        return CONTEXT.loaders.current

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders that are being iterated, outermost first, after a leading None."""
        return [None, *CONTEXT.loaders.all()]

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return CONTEXT.loaders.current is not None

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Whether XLA has reduced the gradients already; there is no XLA support, so False."""
        return False

    def advance(self) -> bool:
        """Count one micro-batch; return whether it completes its window."""
        settings = self.plugin_kwargs
        # A `step` that was set from outside, by loading a checkpoint say, belongs to another window.
        if self.sync_gradients or self.step != self._counted:
            self.window_start = self.micro_batches
        self.micro_batches += 1
        loader = CONTEXT.loaders.innermost()
        if loader is not None and loader.end_of_dataloader and settings.get("sync_with_dataloader", True):
            self.step = 0
            self.sync_gradients = True
        else:
            self.step += 1
            self.sync_gradients = self.step % settings.get("num_steps", 1) == 0
        self._counted = self.step
        return self.sync_gradients

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    def _add_dataloader(self, loader: Any) -> None:
        CONTEXT.loaders.push(loader)

    def _remove_dataloader(self, loader: Any) -> None:
        CONTEXT.loaders.remove(loader)

    @staticmethod
    def _reset_state() -> None:
        """Forget the state that `GradientState()` shows."""
        CONTEXT.gradient_state.clear()

    def __getattr__(self, name: str) -> Any:
        if name in GradientState.__annotations__:
            raise AttributeError(
                f"`GradientState` object has no attribute `{name}`. This happens if `GradientState._reset_state()` was called and "
                "an `Accelerator` or `GradientState` was not reinitialized."
            )
        raise AttributeError(f"'GradientState' object has no attribute '{name}'")

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )


class Window(AbstractContextManager[None]):
    """One micro-batch of an accumulation window: entering counts it, and inside gradients are exchanged only if it is the last."""

    __slots__ = ("_engine", "_held", "_models", "_state")

    def __init__(self, state: GradientState, engine: Engine | None, models: tuple[Any, ...]) -> None:
        # `engine` is None where there is nobody to exchange gradients with; such a window may be entered again and again.
        self._state = state
        self._engine = engine
        self._models = models
        self._held: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        state = self._state
        state.running += 1
        if state.advance() or self._engine is None or state.plugin_kwargs.get("sync_each_batch", False):
            return
        try:
            for model in self._models:
                context = self._engine.no_sync(model)
                context.__enter__()
                self._held.append(context)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def __exit__(self, *error: Any) -> None:
        self._state.running -= 1
        # An ExitStack would do the same; this is done in every step, and without its calls the step is 2 % faster.
        while self._held:
            self._held.pop().__exit__(*error)

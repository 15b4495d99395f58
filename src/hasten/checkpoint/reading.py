"""Reading the states of a run from the files of a checkpoint into its objects."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hasten.checkpoint.contents import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, Contents, numbered
from hasten.weights.layout import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from hasten.weights.read import load_model
from hasten.weights.torch_file import read_torch, read_torch_into
from hasten.world.process import World

logger = logging.getLogger(__name__)


def read_shared(folder: Path, contents: Contents, device: Any, load_kwargs: dict[str, Any] | None) -> None:
    """What is the same on all processes, but for models and optimizers."""
    options = {"map_location": device, **(load_kwargs or {})}
    for index, scheduler in enumerate(contents.schedulers):
        path = _existing(folder, numbered(SCHEDULER_NAME, index), scheduler)
        scheduler.load_state_dict(read_torch(path, **options))
    if contents.scaler is not None:
        path = _existing(folder, SCALER_NAME, contents.scaler)
        contents.scaler.load_state_dict(read_torch(path, **options))
    for name, count in ((OPTIMIZER_NAME, len(contents.optimizers)), (SCHEDULER_NAME, len(contents.schedulers))):
        _warn_of_more(folder / numbered(name, count), count)


def _warn_of_more(following: Path, count: int) -> None:
    if count and following.exists():
        logger.warning("%s is not loaded: there are only %d such objects now.", following, count)


def read_whole(
    folder: Path,
    models: Sequence[torch.nn.Module],
    contents: Contents,
    device: Any,
    load_kwargs: dict[str, Any] | None,
    load_model_kwargs: dict[str, Any],
) -> None:
    """Models and optimizers that this process holds the whole of, also where they were divided when they were saved."""
    options = {"map_location": device, **(load_kwargs or {})}
    for index, model in enumerate(models):
        _read_model(folder, index, model, device, load_model_kwargs)
    for index, optimizer in enumerate(contents.optimizers):
        _read_optimizer(folder, index, optimizer, contents.models or models, options)
    _warn_of_more(folder / numbered(SAFE_WEIGHTS_NAME, len(models)), len(models))


def read_divided(
    folder: Path,
    models: Sequence[torch.nn.Module],
    contents: Contents,
    world: World,
    load_kwargs: dict[str, Any] | None,
    strict: bool = True,
) -> None:
    """Models and optimizers of which this process holds a part; every process calls it."""
    from hasten.checkpoint import sharded

    sharded.read_all(folder, models, contents.optimizers, contents.models, world, strict, load_kwargs)


def _read_model(folder: Path, index: int, model: torch.nn.Module, device: Any, options: dict[str, Any]) -> None:
    safe, other = folder / numbered(SAFE_WEIGHTS_NAME, index), folder / numbered(WEIGHTS_NAME, index)
    if safe.exists():
        load_model(model, safe, device=device, **options)
    elif not other.exists() and _was_divided(folder, "model", index):
        from hasten.checkpoint import sharded

        sharded.read_model(folder, index, model, None, **options)
    elif torch.device(device).type != "cpu" or options.get("assign"):
        path = _existing(folder, other.name, model, or_else=safe.name)
        model.load_state_dict(read_torch(path, device), **options)
    else:
        path = _existing(folder, other.name, model, or_else=safe.name)
        model.load_state_dict(read_torch_into(path, model.state_dict()), **options)


def _read_optimizer(folder: Path, index: int, optimizer: Any, models: Sequence[Any], options: dict[str, Any]) -> None:
    path = folder / numbered(OPTIMIZER_NAME, index)
    state = None
    if path.exists() or not _was_divided(folder, "optimizer", index):
        state = _read_state(_existing(folder, path.name, optimizer), optimizer, options)
        groups = state.get("param_groups", ()) if isinstance(state, Mapping) else ()
        if not any(isinstance(name, str) for group in groups for name in group["params"]):
            try:
                optimizer.load_state_dict(state)
            except ValueError as error:
                raise ValueError(
                    f"{path} does not fit optimizer number {index}, a {type(optimizer).__name__}: {error}. Prepare the same "
                    "optimizers over the same parameters, in the same order, as when the checkpoint was saved. Models have been "
                    "loaded already."
                ) from error
            return
    from hasten.checkpoint import sharded  # parameters are known by name

    sharded.read_optimizer(folder, index, optimizer, models, None, options)


def _read_state(path: Path, optimizer: Any, options: dict[str, Any]) -> Any:
    if options["map_location"] not in ("cpu", torch.device("cpu")):
        return read_torch(path, **options)
    options = {name: value for name, value in options.items() if name != "map_location"}
    # Tensors go straight into the memory that the optimizer has for them: of other ones torch's own check complains later.
    return read_torch_into(path, optimizer.state_dict(), **options)


def _was_divided(folder: Path, kind: str, index: int) -> bool:
    from hasten.checkpoint import sources

    return sources.find(folder, kind, index) is not None


def _existing(folder: Path, name: str, item: Any, or_else: str | None = None) -> Path:
    path = folder / name
    if not path.exists():
        names = name if or_else is None else f"{or_else} nor {name}"
        raise FileNotFoundError(
            f"There is no {names} in {folder}, which should hold the state of a {type(item).__name__}. Prepare the same objects in "
            "the same order as when the checkpoint was saved. If each machine has a disk of its own, save with "
            "`ProjectConfiguration(save_on_each_node=True)`."
        )
    return path

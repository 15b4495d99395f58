"""Taking the picture of a run that a checkpoint holds: the states of its objects at one moment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hasten.checkpoint import positions, random_states, sidecar
from hasten.checkpoint.contents import OPTIMIZER_NAME, Contents, numbered
from hasten.checkpoint.picture import Picture
from hasten.checkpoint.roles import Transaction
from hasten.checkpoint.shares import MemberShare
from hasten.weights.image import Image, safetensors_image, torch_image
from hasten.weights.layout import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from hasten.weights.names import without_shared
from hasten.weights.write import Serialized
from hasten.world.process import World

if TYPE_CHECKING:
    from hasten.checkpoint.sharded import Form

logger = logging.getLogger(__name__)


def topology_of_save(contents: Contents, form: Form | None) -> sidecar.Topology | None:
    """How this process holds parameters, if each one commits its own files."""
    if form is None:
        return None
    from hasten.checkpoint import own_file, sharded

    return own_file.topology_of(contents.models) if form is sharded.Form.RANKS else None


def take_shared(contents: Contents, weights: Sequence[Any], divided: bool = False) -> Picture:
    """What is the same on all processes."""
    return Picture(
        weights=list(weights),
        optimizers=[] if divided else [optimizer.state_dict() for optimizer in contents.optimizers],
        schedulers=[scheduler.state_dict() for scheduler in contents.schedulers],
        scaler=None if contents.scaler is None else contents.scaler.state_dict(),
        exchange_orders=list(contents.exchange_orders) if any(contents.exchange_orders) else [],
    )


def take_whole(
    writing: Transaction,
    contents: Contents,
    world: World,
    shared: bool,
    model_state: Callable[[Any], Mapping[str, Any]],
    hooks: Iterable[Callable[..., Any]],
) -> Picture:
    """What this process writes, where each holds whole models."""
    models, weights = list(contents.models), [model_state(model) for model in contents.models]
    for hook in hooks:
        hook(models, weights, str(writing.temporary))
    picture = take_shared(contents, weights) if shared else Picture()
    if isinstance(writing.share, MemberShare):
        picture.weights, picture.optimizers = list(weights), _known_states(contents.optimizers)
    return _with_own(picture, contents, world, shared)


def _known_states(optimizers: Iterable[Any]) -> list[Any]:
    """The states of optimizers on a process that need not have them: some have the whole of it on the main process only."""
    try:
        return [optimizer.state_dict() for optimizer in optimizers]
    except Exception as error:
        logger.debug("Not shared: %s", error)
        return []


def lent(share: MemberShare, picture: Picture, safe: bool, copy: bool) -> Picture:
    """Give the large states to this process's share; what is left of its picture."""
    share.take(partial(images, picture, safe), copy)
    return replace(picture, weights=[], optimizers=[])


def images(picture: Picture, safe: bool) -> dict[str, Image]:
    """The files of models and optimizers, as `_write_shared` writes them."""
    weights = {
        numbered(SAFE_WEIGHTS_NAME if safe else WEIGHTS_NAME, index): safetensors_image(without_shared(state)[0])
        if safe
        else torch_image(state)
        for index, state in enumerate(picture.weights)
        if not isinstance(state, Serialized)
    }
    states = {numbered(OPTIMIZER_NAME, index): state for index, state in enumerate(picture.optimizers)}
    return weights | {name: torch_image(state) for name, state in states.items() if not isinstance(state, Serialized)}


def take_divided(
    writing: Transaction,
    contents: Contents,
    world: World,
    shared: bool,
    form: Form,
    hooks: Iterable[Callable[..., Any]],
) -> Picture:
    """What this process writes, where each holds a part of the models."""
    from hasten.checkpoint import by_name, sharded
    from hasten.collectives.together import together

    models: list[Any] = list(contents.models)
    weights: list[Any] = []

    def prepare() -> None:
        weights.extend(by_name.model_state(model) for model in models)
        for hook in hooks:
            hook(models, weights, str(writing.temporary))

    what = f"{writing.place} was not saved"
    if form is sharded.Form.RANKS:
        prepare()
    else:
        sharded.check_one_folder(writing.temporary, world)
        together(world, what, prepare)
    picture = take_shared(contents, [], divided=True) if shared else Picture()
    picture.divided_weights = weights
    picture.buffers = [
        frozenset(by_name.buffers(models[index])) if index < len(models) else frozenset()
        for index in range(len(weights))
    ]
    picture.divided_optimizers = [
        sharded.optimizer_state(optimizer, contents.models, form, world, what) for optimizer in contents.optimizers
    ]
    return _with_own(picture, contents, world, shared)


def _with_own(picture: Picture, contents: Contents, world: World, shared: bool) -> Picture:
    """Add the registered objects, where they are written, and what each process has of its own."""
    wholes = _whole_states(contents, world)
    if shared:
        picture.custom = [wholes.get(index) or item.state_dict() for index, item in enumerate(contents.custom)]
    picture.random = random_states.states(contents.step, world)
    picture.positions = positions.states(contents.dataloaders)
    return picture


def staged(
    picture: Picture, form: Form | None, world: World, safe: bool, what: str
) -> tuple[Picture, Form | None, World]:
    """A copy that training does not change, and how it is written without meeting what training exchanges meanwhile."""
    if form is not None:
        from hasten.checkpoint import sharded

        if form is sharded.Form.FILES:
            picture = sharded.whole_picture(picture, world, what)
        world = sharded.world_of_background(form, world)
    return picture.copied(safe), form, world


def _whole_states(contents: Contents, world: World) -> dict[int, Any]:
    """The states of registered objects that are divided as the models are, put together; every process takes part."""
    if not contents.divided:
        return {}
    return {
        index: item.whole_state_dict(world)
        for index, item in enumerate(contents.custom)
        if hasattr(item, "whole_state_dict")
    }

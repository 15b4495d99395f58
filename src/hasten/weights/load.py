"""Weights from files into a model: whole, or each process its own part of each tensor."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hasten.weights.names import class_name
from hasten.weights.parts import own_part
from hasten.weights.source import Source

_SHOWN = 10


@dataclass
class Loading:
    """What goes where: found out before anything is changed.

    Args:
        pairs: each name in the files, and the tensor of the model that it fills.
        missing: the model's names that the files do not have, also under no tied name.
        unexpected: names in the files that the model does not have.
    """

    pairs: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def plan_loading(model: nn.Module, source: Source) -> Loading:
    """Match the names of a model's parameters and persistent buffers with those in files; tied names need to be there once.

    Raises:
        ValueError: shapes differ.
    """
    ties: dict[int, list[str]] = {}
    tensors = {name: each for name, each in model.state_dict(keep_vars=True).items() if isinstance(each, torch.Tensor)}
    for name, tensor in tensors.items():
        ties.setdefault(id(tensor), []).append(name)
    loading = Loading(unexpected=[name for name in source if name not in tensors])
    wrong = []
    for names in ties.values():
        tensor = tensors[names[0]]
        found = next((name for name in names if name in source), None)
        if found is None:
            loading.missing += names
        elif source.shape(found) != tensor.shape:
            wrong.append(f"{found}: {list(source.shape(found))} in the files, {list(tensor.shape)} in the model")
        else:
            loading.pairs.append((found, tensor))
    if wrong:
        raise ValueError(
            f"{source.path} does not fit into {class_name(model)}; its shapes differ:\n\t- " + "\n\t- ".join(wrong)
        )
    return loading


def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    strict: bool = True,
    initialise: Callable[[nn.Module], Any] | None = None,
    materialise: Callable[[nn.Module], Any] = lambda model: None,
) -> tuple[list[str], list[str]]:
    """Load weights from files; each process reads what it holds, and no more.

    Args:
        model: the module, whose tensors may be sharded.
        path: see `Source`.
        strict: raise if names are missing or unexpected.
        initialise: is called on modules of which some tensor has no value and is not in the files either.
        materialise: gives memory to the tensors of the model that have none.

    Returns:
        The missing and the unexpected names.

    Raises:
        FileNotFoundError: there are no weights at the path.
        RuntimeError: a file is damaged, or names differ under `strict`.
        ValueError: shapes differ, or tensors would be left without values.
    """
    with Source(path) as source:
        loading = plan_loading(model, source)
        empty = _empty(model, loading)
        if strict:
            _check_names(model, source, loading, initialised=empty if initialise else [])
        if empty and initialise is None:
            raise ValueError(
                f"{source.path} has no values for {_some(empty)} of {class_name(model)}, which is on the meta device. (Some "
                "buffers are not saved, for example.) Give a function that sets them, e.g. "
                "`initialise=lambda module: module.reset_parameters()` (in transformers `initialise=model._init_weights`), or "
                "build the model so that they have values."
            )
        materialise(model)
        if initialise is not None:
            _initialise(model, set(empty), initialise)
        with torch.no_grad():
            for name, tensor in loading.pairs:
                source.read_into(name, *own_part(tensor))
    return loading.missing, loading.unexpected


def _empty(model: nn.Module, loading: Loading) -> list[str]:
    """The names of tensors that have no values, and get none from the files."""
    filled = {id(tensor) for _, tensor in loading.pairs}
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return [name for name, tensor in tensors if tensor.is_meta and id(tensor) not in filled]


def _initialise(model: nn.Module, names: set[str], initialise: Callable[[nn.Module], Any]) -> None:
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names)
    with torch.no_grad():
        for owner in owners:
            initialise(model.get_submodule(owner))


def _check_names(model: nn.Module, source: Source, loading: Loading, initialised: list[str]) -> None:
    missing = [name for name in loading.missing if name not in initialised]
    if not (missing or loading.unexpected):
        return
    lines = [f"{source.path} does not fit into {class_name(model)}:"]
    lines += [f"\t- not in the files: {_some(missing)}"] if missing else []
    lines += [f"\t- not in the model: {_some(loading.unexpected)}"] if loading.unexpected else []
    raise RuntimeError(
        "\n".join([*lines, "Build the model as it was saved, or pass `strict=False` to load what fits."])
    )


def _some(names: list[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more

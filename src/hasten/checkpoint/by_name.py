"""States by qualified name: of models, and of optimizers, whose own states know parameters by number only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor, Replicate

from hasten.checkpoint.dcp import Place, leaves
from hasten.checkpoint.sources import Source

_OWNERS = "owners"  # in a state: which process owns a parameter, by name
K = TypeVar("K")  # a name, or a place in a nested state

# What wrappers put into names: FSDP version 1, its activation checkpointing, and torch.compile.
_WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")


def canonical(name: str) -> str:
    """A name without what wrappers have put into it."""
    return _WRAPPERS.sub("", name)


# -- models --------------------------------------------------------------------------------------------------------------


def model_state(model: torch.nn.Module) -> dict[str, Any]:
    """A model's state by name: DTensors where it is divided. Names of one tensor have one and the same object."""
    detached: dict[int, Any] = {}
    return {
        canonical(name): detached.setdefault(id(value), value.detach() if isinstance(value, torch.Tensor) else value)
        for name, value in model.state_dict(keep_vars=True).items()
    }


def buffers(model: torch.nn.Module) -> list[str]:
    """The names of a model's buffers, of which each process may have values of its own."""
    return [canonical(name) for name, _ in model.named_buffers(remove_duplicate=False)]


def apart(held: Mapping[K, Any]) -> tuple[dict[K, Any], dict[K, K]]:
    """A state by name or place with each tensor once, and for other names of the same tensors the one that it is under."""
    first: dict[int, K] = {}
    state, others = {}, {}
    for name, value in held.items():
        if isinstance(value, torch.Tensor) and id(value) in first:
            others[name] = first[id(value)]
        else:
            first[id(value)] = name
            state[name] = value
    return state, others


def load_model(model: torch.nn.Module, source: Source, strict: bool = True) -> Any:
    """Read a model's state in place; tied parameters may be saved under any of their names.

    Returns:
        The missing and the unexpected names, as `Module.load_state_dict` returns them.

    Raises:
        RuntimeError: shapes differ, or names do under `strict`.
    """
    state, others = apart(model_state(model))
    saved = {canonical(name): name for name in source.skeleton}
    places = {others.get(name, name): original for name, original in saved.items()}
    missing = [name for name in state if name not in places]
    unexpected = [name for name in places if name not in state]
    _check_model(model, source, state, places, (missing, unexpected) if strict else ([], []))
    found = {name: original for name, original in places.items() if name in state}
    values: dict[str, Any] = {name: source.skeleton[original] for name, original in found.items()}
    targets = {
        (found[name],): state[name]
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and value.is_meta
    }
    source.fill(targets)
    values |= {name: state[name] for name in values if (found[name],) in targets}
    live = {canonical(name): name for name in model.state_dict(keep_vars=True)}
    # What torch copies from is mostly what it copies to; but it runs the model's own hooks.
    loaded = model.load_state_dict({live[name]: value for name, value in values.items()}, strict=False)
    return loaded._replace(missing_keys=missing, unexpected_keys=unexpected)


def _check_model(
    model: torch.nn.Module,
    source: Source,
    state: Mapping[str, Any],
    places: Mapping[str, str],
    differing: tuple[list[str], list[str]],
) -> None:
    lines = [
        f"\t- {words}: {', '.join(names)}"
        for words, names in zip(("not in the checkpoint", "not in the model"), differing, strict=True)
        if names
    ]
    for name, original in places.items():
        saved, own = source.skeleton[original], state.get(name)
        if isinstance(saved, torch.Tensor) and isinstance(own, torch.Tensor) and saved.shape != own.shape:
            lines.append(
                f"\t- {name} has the shape {list(saved.shape)} in the checkpoint and {list(own.shape)} in the model"
            )
    if lines:
        raise RuntimeError(
            "\n".join(
                [
                    f"{source.path} does not fit into {type(model).__name__}:",
                    *lines,
                    "Build the model as it was saved, or pass `strict=False` to load the names that both have.",
                ]
            )
        )


# -- optimizers ----------------------------------------------------------------------------------------------------------


def names_of(optimizer: Any, models: Sequence[torch.nn.Module]) -> list[list[str]]:
    """The names of an optimizer's parameters, group by group.

    They are those in the model that has them. If several models have some, those of the second one begin with "1/" and so on; a
    parameter of no model is "loose/" and a number.
    """
    known: dict[int, tuple[int, str]] = {}
    for index, model in enumerate(models):
        for name, value in model.state_dict(keep_vars=True).items():
            known.setdefault(id(value), (index, canonical(name)))
    groups = [[known.get(id(each)) for each in group["params"]] for group in optimizer.param_groups]
    several = len({each[0] for group in groups for each in group if each is not None}) > 1
    loose = iter(range(sum(map(len, groups))))

    def named(each: tuple[int, str] | None) -> str:
        if each is None:
            return f"loose/{next(loose)}"
        return f"{each[0]}/{each[1]}" if several and each[0] > 0 else each[1]

    return [[named(each) for each in group] for group in groups]


def optimizer_state(optimizer: Any, models: Sequence[torch.nn.Module], divide: bool = True) -> dict[str, Any]:
    """An optimizer's state and groups, with names in the place of numbers.

    Args:
        optimizer: the optimizer.
        models: the models with its parameters.
        divide: turn whole matrices, each of which one process has, into DTensors, for which all processes must come. Otherwise
            the state is what this process holds, and beside it is said who owns which parameter.

    Raises:
        NotImplementedError: of a divided parameter it holds something that is not divided and no single number.
    """
    names = names_of(optimizer, models)
    if divide and hasattr(optimizer, "divide_state"):
        optimizer.divide_state()
    packed = optimizer.state_dict()
    by_number = {
        number: name
        for group, part in zip(packed["param_groups"], names, strict=True)
        for number, name in zip(group["params"], part, strict=True)
    }
    parameters = dict(zip(_flat(names), _parameters(optimizer), strict=True))
    state = {by_number.get(number, number): entries for number, entries in packed["state"].items()}
    for name, entries in state.items() if divide else ():
        _check_divided(optimizer, name, parameters.get(name), entries)
    groups = [{**group, "params": part} for group, part in zip(packed["param_groups"], names, strict=True)]
    owners = {} if divide else getattr(optimizer, "owners", {})
    owned = {name: owners[each] for name, each in parameters.items() if each in owners}
    return {"state": state, "param_groups": groups, **({_OWNERS: owned} if owned else {})}


def _check_divided(optimizer: Any, name: Any, parameter: Any, entries: Any) -> None:
    if not isinstance(parameter, DTensor):
        return
    for place, value in leaves(entries):
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.numel() > 1:
            raise NotImplementedError(
                f"{_kind(optimizer)} holds {'.'.join(map(str, place))} of {name} as a plain tensor of the shape "
                f"{list(value.shape)} on this process, although the parameter is divided over several: saving such a state is not "
                "built yet (area: checkpoints of sharded models). Use an optimizer whose state is divided as its parameters are."
            )


def load_optimizer(optimizer: Any, models: Sequence[torch.nn.Module], source: Source) -> None:
    """Read an optimizer's state and groups, in place where it has a state; saved by name or, by plain optimizers, by number.

    Raises:
        RuntimeError: other parameters were saved, or they are grouped otherwise; the message names them.
    """
    names = names_of(optimizer, models)
    numbers = {name: number for number, name in enumerate(_flat(names))}
    saved = _Saved.read(source.skeleton, names, models, source)
    groups = _match_groups(optimizer, source, names, saved)
    parameters = dict(zip(numbers, _parameters(optimizer), strict=True))
    filling = _Filling(parameters, getattr(optimizer, "state", {}), source.undivided)
    state = {numbers[name]: filling.entries(name, key, spec) for key, name, spec in saved.entries if name in numbers}
    source.fill(filling.targets)
    count = iter(range(len(numbers)))
    for group in groups:
        group["params"] = [next(count) for _ in group["params"]]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    if owned := source.skeleton.get(_OWNERS):
        optimizer.give({parameters[name]: owner for name, owner in owned.items() if name in parameters})


@dataclass(frozen=True)
class _Saved:
    """What a file says: names of the parameters by group, and for each state its key in the file, its name and its form."""

    groups: list[dict[str, Any]]
    entries: list[tuple[Any, str, Any]]

    @classmethod
    def read(cls, skeleton: Any, names: list[list[str]], models: Sequence[Any], source: Source) -> _Saved:
        if not isinstance(skeleton, dict) or not isinstance(skeleton.get("param_groups"), list):
            raise RuntimeError(f"{source.path} is no state of an optimizer: it has no groups of parameters.")
        ties: dict[str, str] = {}
        for model in models:
            ties |= apart(model_state(model))[1]
        keys = [key for group in skeleton["param_groups"] for key in group["params"]]
        if any(isinstance(key, int) for key in keys):  # a plain optimizer's: the order tells
            by_key = dict(zip(keys, _flat(names), strict=False))
        else:
            by_key = {key: ties.get(canonical(key), canonical(key)) for key in keys}
        groups = [
            {**group, "params": [by_key.get(key, str(key)) for key in group["params"]]}
            for group in skeleton["param_groups"]
        ]
        state = skeleton.get("state") or {}
        pairs = state.items() if isinstance(state, dict) else enumerate(state)
        return cls(groups, [(key, by_key.get(key, str(key)), spec) for key, spec in pairs])


def _match_groups(optimizer: Any, source: Source, names: list[list[str]], saved: _Saved) -> list[dict[str, Any]]:
    """The saved groups in the order of the optimizer's."""
    home = {name: group for group in saved.groups for name in group["params"]}
    wanted = set(_flat(names))
    missing, unexpected = sorted(wanted - home.keys()), sorted(home.keys() - wanted)
    lines = [f"\t- not in the checkpoint: {', '.join(missing)}"] if missing else []
    lines += [f"\t- not in the optimizer: {', '.join(unexpected)}"] if unexpected else []
    matched = []
    for index, part in enumerate(names):
        homes = {id(home[name]): home[name] for name in part if name in home}
        if not part and index < len(saved.groups):
            homes = {0: saved.groups[index]}
        if len(homes) > 1:
            lines.append(f"\t- the parameters of group {index} were in {len(homes)} groups: {', '.join(part[:3])}, ...")
        matched += [{**group, "params": part} for group in list(homes.values())[:1]]
    if lines or len(matched) != len(names):
        lines = lines or [f"\t- it has {len(saved.groups)} groups of parameters, the optimizer {len(names)}"]
        raise RuntimeError(
            "\n".join(
                [
                    f"{source.path} does not fit into this {_kind(optimizer)}:",
                    *lines,
                    "Give the optimizer the same parameters in the same groups as when the checkpoint was saved.",
                ]
            )
        )
    return matched


@dataclass
class _Filling:
    """Makes the tensors that a state is read into: those that the optimizer has, or new ones divided as their parameter is."""

    parameters: Mapping[str, torch.Tensor]
    present: Mapping[Any, Any]
    undivided: frozenset[Place] = frozenset()
    targets: dict[Place, torch.Tensor] = field(default_factory=dict)

    def entries(self, name: str, key: Any, spec: Any) -> Any:
        parameter = self.parameters[name]
        there = self.present.get(parameter) if len(self.present) else None
        return self._build(spec, there, parameter, ("state", key))

    def _build(self, spec: Any, there: Any, parameter: torch.Tensor, place: Place) -> Any:
        if isinstance(spec, dict):
            parts = there if isinstance(there, dict) else {}
            return {key: self._build(value, parts.get(key), parameter, (*place, key)) for key, value in spec.items()}
        if isinstance(spec, list):
            return [self._build(value, None, parameter, (*place, index)) for index, value in enumerate(spec)]
        if not (isinstance(spec, torch.Tensor) and spec.is_meta):
            return spec
        divided = place not in self.undivided and _is_divided(spec, parameter)
        self.targets[place] = target = there if _is_alike(there, spec, divided) else _new(spec, parameter, divided)
        return target


def _is_alike(there: Any, spec: torch.Tensor, divided: bool) -> bool:
    return (
        isinstance(there, torch.Tensor)
        and (there.shape, there.dtype) == (spec.shape, spec.dtype)
        and isinstance(there, DTensor) == divided
        and there.is_contiguous()
    )


def _is_divided(spec: torch.Tensor, parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and (spec.shape == parameter.shape or spec.numel() > 1)


def _new(spec: torch.Tensor, parameter: torch.Tensor, divided: bool) -> torch.Tensor:
    if not isinstance(parameter, DTensor) or not divided:
        device = "cpu" if spec.dim() == 0 else parameter.device
        return torch.empty(spec.shape, dtype=spec.dtype, device=device)
    if spec.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=spec.dtype, requires_grad=False)
    mesh = parameter.device_mesh
    whole = torch.empty(spec.shape, dtype=spec.dtype, device=parameter.to_local().device)
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _parameters(optimizer: Any) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _flat(names: Iterable[Iterable[str]]) -> list[str]:
    return [name for part in names for name in part]


def _kind(optimizer: Any) -> str:
    return type(getattr(optimizer, "optimizer", optimizer)).__name__

"""Which parts of a model are sharded, gathered and freed together: a plan that can be read before anything is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

Choose = Callable[[nn.Module], bool]


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered together, before the first of them runs.

    Args:
        modules: their qualified names, in the order in which they run; "" is the model itself.
        parameters: the parameters of the unit, by the name under which each is first found.
        frees: whether the whole parameters are freed after the forward pass; None leaves it to the settings.
        reason: why this is a unit of its own.
    """

    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    frees: bool | None = None
    reason: str = ""

    def __str__(self) -> str:
        names = " + ".join(name or "the rest" for name in self.modules)
        return f"{names}: {len(self.parameters)} parameters ({self.reason})"


@dataclass
class _Tree:
    """A model's modules by name, and who owns which parameter."""

    model: nn.Module
    ignored: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.modules: dict[str, nn.Module] = dict(self.model.named_modules())
        self.owners: dict[int, list[str]] = {}
        self.names: dict[int, str] = {}
        for name, module in self.modules.items():
            for part, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in self.ignored:
                    self.owners.setdefault(id(parameter), []).append(name)
                    self.names.setdefault(id(parameter), f"{name}.{part}".lstrip("."))

    def within(self, name: str) -> Iterator[tuple[str, nn.Module]]:
        """A module and everything beneath it."""
        prefix = f"{name}." if name else ""
        return ((other, module) for other, module in self.modules.items() if other == name or other.startswith(prefix))

    def parameters(self, name: str) -> dict[int, str]:
        """The parameters in a module and beneath it."""
        found = {}
        for _, module in self.within(name):
            for parameter in module.parameters(recurse=False):
                if id(parameter) in self.names:
                    found[id(parameter)] = self.names[id(parameter)]
        return found


def plan_units(model: nn.Module, choose: Choose | None, ignored: Iterable[torch.Tensor] = ()) -> list[Unit]:
    """Divide a model into units, inner ones first; the model itself, with what is left, comes last.

    Modules that `choose` picks are units. Outside of them, each embedding is one, because it is needed first only; the last module
    with parameters before the output and the output itself are one that stays gathered, because backward begins there. Modules that
    share a parameter across these borders are in one unit, so that the parameter is one.

    Args:
        choose: says of each module whether it is a unit; None for the model as a whole.
        ignored: parameters that are not sharded.
    """
    tree = _Tree(model, {id(parameter) for parameter in ignored})
    if choose is None:
        return [Unit(("",), tuple(tree.parameters("").values()), reason="the whole model")]
    layers = [name for name, module in tree.modules.items() if name and choose(module) and tree.parameters(name)]
    groups = [_Group([name], f"chosen, {type(tree.modules[name]).__name__}") for name in layers]
    outside = [
        name
        for name, module in tree.modules.items()
        if _owns(module, tree) and not any(name == layer or name.startswith(f"{layer}.") for layer in layers)
    ]
    if layers:
        groups += _ends(tree, outside, layers[-1])
    groups = _join_ties(tree, groups)
    return _units(tree, groups)


@dataclass
class _Group:
    modules: list[str]
    reason: str
    frees: bool | None = None


def _owns(module: nn.Module, tree: _Tree) -> bool:
    return any(id(parameter) in tree.names for parameter in module.parameters(recurse=False))


def _ends(tree: _Tree, outside: Sequence[str], last_layer: str) -> list[_Group]:
    """The embeddings, and what comes after the last layer: usually a norm and the output."""
    place = {name: index for index, name in enumerate(tree.modules)}
    embeddings = [name for name in outside if isinstance(tree.modules[name], nn.Embedding)]
    after = [name for name in outside if place[name] > place[last_layer] and name not in embeddings]
    groups = [_Group([name], "an embedding") for name in embeddings]
    if after:
        # The last two: what comes before, a pooler or another head, has no claim to stay gathered.
        groups.append(_Group(after[-2:], "the end of the model", frees=False))
    return groups


def _join_ties(tree: _Tree, groups: list[_Group]) -> list[_Group]:
    """Put modules that share a parameter, and are not within one unit already, into one unit."""
    for owners in [names for names in tree.owners.values() if len(names) > 1]:
        homes = [_home(groups, name) for name in owners]
        if all(home is homes[0] for home in homes) and homes[0] is not None:
            continue
        if all(home is None for home in homes):
            continue  # the model itself holds them
        # Whole units that consist of the owner alone are joined; from larger ones the owner is taken out.
        own = [home for home, name in zip(homes, owners, strict=True) if home is not None and name in home.modules]
        joined = [module for home in own for module in home.modules]
        modules = [name for name in tree.modules if name in {*owners, *joined}]
        frees = False if any(home.frees is False for home in own) else None
        gone = {id(home) for home in own}
        groups = [group for group in groups if id(group) not in gone]
        groups.append(_Group(_embeddings_first(tree, modules), "they share a parameter", frees))
    return groups


def _embeddings_first(tree: _Tree, names: list[str]) -> list[str]:
    # The one that runs first must be the one that gathers.
    return sorted(names, key=lambda name: not isinstance(tree.modules[name], nn.Embedding))


def _home(groups: Sequence[_Group], name: str) -> _Group | None:
    """The innermost group that a module is in; None for the model itself."""
    best: tuple[int, _Group] | None = None
    for group in groups:
        for module in group.modules:
            inside = name == module or name.startswith(f"{module}.")
            if inside and (best is None or len(module) > best[0]):
                best = len(module), group
    return None if best is None else best[1]


def _units(tree: _Tree, groups: list[_Group]) -> list[Unit]:
    """Inner groups first: each takes what no inner one has taken."""
    taken: set[int] = set()
    units = []
    for group in sorted(groups, key=lambda group: -max(name.count(".") for name in group.modules)):
        found: dict[int, str] = {}
        for name in group.modules:
            found |= {key: value for key, value in tree.parameters(name).items() if key not in taken}
        if found:
            taken |= found.keys()
            units.append(Unit(tuple(group.modules), tuple(found.values()), group.frees, group.reason))
    rest = tuple(name for key, name in tree.parameters("").items() if key not in taken)
    return [*units, Unit(("",), rest, reason="what is left")]


def by_class(model: nn.Module, names: Iterable[str]) -> Choose:
    """Choose modules by the names of their classes, or of those that these derive from.

    Raises:
        ValueError: the model has no module of one of these classes.
    """
    wanted = set(names)
    present = {type(module).__name__ for module in model.modules()}
    inherited = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    missing = sorted(wanted - inherited)
    if missing:
        raise ValueError(
            f"Could not find the transformer layer class{'es' if len(missing) > 1 else ''} {', '.join(missing)} in "
            f"{type(model).__name__}. Its modules are of the classes {', '.join(sorted(present))}."
        )
    return lambda module: any(kind.__name__ in wanted for kind in type(module).__mro__)


def by_size(model: nn.Module, least: int) -> Choose:
    """Choose the modules that hold at least `least` parameters, without what chosen ones within them hold."""
    chosen: set[int] = set()

    def visit(module: nn.Module) -> int:
        """Count what is left for the enclosing module."""
        left = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        left += sum(visit(child) for child in module.children())
        if left < least or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            return left
        chosen.add(id(module))
        return 0

    visit(model)
    chosen.discard(id(model))
    return lambda module: id(module) in chosen

"""Which parts of a model are sharded, gathered and freed together: a plan that can be read before anything is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from hasten.settings.values import nearest
from hasten.weights.names import class_name

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
    """A model's modules by name, and who holds which parameter."""

    model: nn.Module
    ignored: set[int] = field(default_factory=set)
    upcast: bool = False

    def __post_init__(self) -> None:
        self.modules: dict[str, nn.Module] = dict(self.model.named_modules())
        self.tensors: dict[int, nn.Parameter] = {}
        self.names: dict[int, str] = {}
        self.holders: dict[int, list[str]] = {}  # the modules that must run for a parameter to be gathered
        self.parents: dict[str, list[str]] = {}  # several, if a module stands in several places
        self.rooted: set[int] = set()  # parameters that the model itself must gather
        names = {id(module): name for name, module in self.modules.items()}
        for name, module in self.modules.items():
            for child in {id(child): child for child in module.children()}.values():
                self.parents.setdefault(names[id(child)], []).append(name)
        for name, module in self.modules.items():
            for part, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in self.ignored:
                    self.tensors[id(parameter)] = parameter
                    self.names.setdefault(id(parameter), f"{name}.{part}".lstrip("."))
                    holders = self.holders.setdefault(id(parameter), [])
                    holders += [holder for holder in self.running(name) if holder not in holders]

    def runs(self, name: str) -> bool:
        """Whether a module has a forward pass: a list of modules or of parameters has none, so that nothing would gather it."""
        return getattr(self.modules[name].forward, "__func__", None) is not nn.Module.forward

    def running(self, name: str) -> list[str]:
        """The module itself, or those around it that have a forward pass: several, if it stands in several places."""
        if not name or self.runs(name):
            return [name]
        return [holder for parent in self.parents[name] for holder in self.running(parent)]

    def formats(self, found: Iterable[int]) -> dict[int, torch.dtype]:
        """The formats in which trained parameters are stored."""
        small = (torch.bfloat16, torch.float16) if self.upcast else ()
        tensors = {key: self.tensors[key] for key in found if self.tensors[key].requires_grad}
        return {key: torch.float32 if each.dtype in small else each.dtype for key, each in tensors.items()}

    def within(self, name: str) -> Iterator[tuple[str, nn.Module]]:
        """A module and everything beneath it."""
        return ((other, module) for other, module in self.modules.items() if _beneath(other, name))

    def parameters(self, name: str) -> dict[int, str]:
        """The parameters in a module and beneath it."""
        return {
            id(parameter): self.names[id(parameter)]
            for _, module in self.within(name)
            for parameter in module.parameters(recurse=False)
            if id(parameter) in self.names
        }


def _beneath(name: str, other: str) -> bool:
    return not other or name == other or name.startswith(f"{other}.")


def plan_units(
    model: nn.Module, choose: Choose | None, ignored: Iterable[torch.Tensor] = (), upcast: bool = False
) -> list[Unit]:
    """Divide a model into units, inner ones first; the model itself, with what is left, comes last.

    Modules that `choose` picks are units. Outside of them, each embedding is one, because it is needed first only; the last module
    with parameters before the output and the output itself are one that stays gathered, because backward begins there. Modules that
    share a parameter across these borders are in one unit, so that the parameter is one. The gradients of a unit are reduced
    together, so modules whose trained parameters have another format than those around them are units of their own.

    Args:
        choose: says of each module whether it is a unit; None for the model as a whole.
        ignored: parameters that are not sharded.
        upcast: those that are trained in 16 bits will be stored in fp32.

    Raises:
        ValueError: a module holds trained parameters of several formats itself.
    """
    tree = _Tree(model, {id(parameter) for parameter in ignored}, upcast)
    if choose is None:
        return _units(tree, [_Group([""], "the whole model")])
    layers = [
        name
        for name, module in tree.modules.items()
        if name and choose(module) and tree.runs(name) and tree.parameters(name)
    ]
    groups = [_Group([name], f"chosen, {class_name(tree.modules[name])}") for name in layers]
    if layers:
        holders = {name for names in tree.holders.values() for name in names}
        outside = [
            name for name in tree.modules if name in holders and not any(_beneath(name, layer) for layer in layers)
        ]
        groups += _ends(tree, outside, layers[-1])
    groups = _join_ties(tree, _take_out_shared(tree, groups))
    return _units(tree, [*groups, _Group([""], "what is left")])


@dataclass
class _Group:
    modules: list[str]
    reason: str
    frees: bool | None = None


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


def _take_out_shared(tree: _Tree, groups: list[_Group]) -> list[_Group]:
    """Give a module that stands in several places, which are not in one unit, a unit of its own."""
    own = {name for group in groups for name in group.modules}
    for name, parents in tree.parents.items():
        homes = {id(_home(groups, parent)) for parent in parents}
        if len(homes) > 1 and name not in own and tree.runs(name) and tree.parameters(name):
            groups = [*groups, _Group([name], "it stands in several places")]
    return groups


def _join_ties(tree: _Tree, groups: list[_Group]) -> list[_Group]:
    """Put modules that share a parameter, and are not within one unit already, into one unit."""
    for key, holders in [(key, names) for key, names in tree.holders.items() if len(names) > 1]:
        homes = [_home(groups, name) for name in holders]
        if all(home is homes[0] for home in homes):
            continue  # one unit, or the model itself, holds them
        if "" in holders:
            tree.rooted.add(key)
            continue
        # Whole units that consist of the holder alone are joined; from larger ones the holder is taken out.
        own = [home for home, name in zip(homes, holders, strict=True) if home is not None and name in home.modules]
        joined = {*holders, *(module for home in own for module in home.modules)}
        modules = [name for name in tree.modules if name in joined]
        modules = [name for name in modules if not any(_beneath(name, other) for other in joined - {name})]
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
    found = [(len(module), group) for group in groups for module in group.modules if _beneath(name, module)]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _units(tree: _Tree, groups: list[_Group]) -> list[Unit]:
    """Inner groups first, the model itself last: each takes what no inner one has taken."""
    taken: set[int] = set()
    units = []
    waiting = sorted(groups, key=_depth)
    while waiting:
        group = waiting.pop(0)
        found: dict[int, str] = {}
        for name in group.modules:
            found |= {key: value for key, value in tree.parameters(name).items() if key not in taken}
        if group.modules != [""]:
            found = {key: value for key, value in found.items() if key not in tree.rooted}
        if others := _of_other_formats(tree, group, found):
            waiting = sorted([*others, group, *waiting], key=_depth)
        elif found or group.modules == [""]:
            taken |= found.keys()
            units.append(Unit(tuple(group.modules), tuple(found.values()), group.frees, group.reason))
    return units


def _depth(group: _Group) -> tuple[bool, int]:
    return group.modules == [""], -max(name.count(".") for name in group.modules)


def _of_other_formats(tree: _Tree, group: _Group, found: Iterable[int]) -> list[_Group]:
    """Take the modules out of a group whose trained parameters differ in format from the others; gives them their own groups."""
    formats = tree.formats(found)
    if len(set(formats.values())) < 2:
        return []
    # What a group's own modules hold can not be taken out from beneath them.
    own = [key for key in formats if set(tree.holders[key]) & set(group.modules)]
    sizes = dict.fromkeys(formats.values(), 0)
    for key in own or formats:
        sizes[formats[key]] += tree.tensors[key].numel()
    stays = max(sizes, key=lambda each: sizes[each])
    fixed = {name for key in formats if formats[key] is stays for name in tree.holders[key]}
    others: dict[tuple[str, ...], _Group] = {}
    for key in [key for key in formats if formats[key] is not stays]:
        holders = tree.holders[key]
        if mixed := [name for name in holders if name in fixed or not name]:
            raise ValueError(
                f"{mixed[0] or type(tree.model).__name__!r} trains parameters of the formats {stays} and {formats[key]} "
                f"({tree.names[key]!r}): the gradients of one module are reduced together. Give them one format, put them into "
                "modules of their own, or name the module in `ignored_modules`."
            )
        group.modules = [name for name in group.modules if name not in holders]
        reason = f"trained in {str(formats[key]).removeprefix('torch.')}"
        others.setdefault(tuple(holders), _Group(list(holders), reason, group.frees))
    return list(others.values())


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
            f"{type(model).__name__}{nearest(missing[0], present)}. Its modules are of the classes {', '.join(sorted(present))}."
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

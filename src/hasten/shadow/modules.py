"""Modules that show names whose home is elsewhere, and the finder that makes them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hasten.shadow.table import MODULES, ROOT, VERSION


class AliasModule(ModuleType):
    """A module of the reference: every name is read from its home in hasten, and written there too.

    Other libraries replace functions of the reference at run time. Written through, a replacement is seen by hasten's own
    callers, and by every other alias of the same name.
    """

    def __getattr__(self, name: str) -> Any:
        home = _home(self, name)
        if home is not None:
            return getattr(*home)
        submodule = f"{self.__name__}.{name}"
        if submodule in MODULES:
            return import_module(submodule)
        raise AttributeError(
            f"module {self.__name__!r} (by hasten) has no attribute {name!r}. If Hugging Face accelerate {VERSION[:6]} has it, it "
            "is not built yet."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        home = _home(self, name)
        if home is None:
            super().__setattr__(name, value)
            return
        self.__dict__.setdefault("_replaced", {}).setdefault(name, []).append(getattr(*home))
        setattr(*home, value)

    def __delattr__(self, name: str) -> None:
        # unittest.mock and pytest find a name that is not in `__dict__`, so they end a replacement by deleting it.
        home = _home(self, name)
        if home is None:
            super().__delattr__(name)
            return
        replaced = self.__dict__.get("_replaced", {}).get(name)
        if not replaced:
            raise AttributeError(f"{self.__name__}.{name} belongs to hasten and cannot be deleted, only replaced.")
        setattr(*home, replaced.pop())

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *MODULES[self.__name__]})


def _home(alias: AliasModule, name: str) -> tuple[ModuleType, str] | None:
    home = MODULES.get(alias.__name__, {}).get(name)
    if home is None:
        return None
    module, _, attribute = home.partition(":")
    return import_module(module), attribute or name


class _AliasLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return AliasModule(spec.name, f"Hugging Face accelerate's names ({spec.name}), by hasten.")

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__all__"] = [name for name in MODULES[module.__name__] if not name.startswith("_")]
        if module.__name__ == ROOT:
            module.__dict__["__version__"] = VERSION


class AliasFinder(MetaPathFinder):
    """Finds the modules of the table, before whatever else is installed under their names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of an alias module, or None for every other name."""
        if fullname not in MODULES:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in MODULES)
        return ModuleSpec(fullname, _AliasLoader(), origin="hasten", is_package=is_package)


def install() -> None:
    """From now on `import accelerate` resolves to hasten in this process.

    Raises:
        RuntimeError: another `accelerate` has been imported already.
    """
    present = sys.modules.get(ROOT)
    if present is not None and not isinstance(present, AliasModule):
        raise RuntimeError(
            f"{ROOT} was already imported from {getattr(present, '__file__', '?')}; call hasten.shadow.install() before anything "
            "imports it."
        )
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, AliasFinder())


def uninstall() -> None:
    """Undo `install`, and forget the alias modules."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, AliasFinder)]
    for name in [name for name, module in sys.modules.items() if isinstance(module, AliasModule)]:
        del sys.modules[name]


def become(name: str) -> None:
    """Put the alias module in the place of the module `name` that is being imported: the drop-in distribution calls this."""
    real = sys.modules.pop(name)
    install()
    alias = import_module(name)
    for attribute in ("__file__", "__path__"):
        alias.__dict__[attribute] = getattr(real, attribute)

"""The names that loops import beside `Accelerator`: `from hasten.utils import set_seed, gather, broadcast, ...`.

The same names as in `accelerate.utils`, as far as they are built, each imported from its home when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hasten.shadow.table import MODULES

_HOMES = MODULES["accelerate.utils"]

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(
            f"module 'hasten.utils' has no attribute {name!r}. If `accelerate.utils` has it, it is not built yet."
        )
    module, _, attribute = home.partition(":")
    return getattr(import_module(module), attribute or name)


def __dir__() -> list[str]:
    return __all__

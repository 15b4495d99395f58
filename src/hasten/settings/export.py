"""The only writer of environment variables: a contract that other libraries read in the same process."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hasten.settings.schema import BY_NAME
from hasten.settings.values import convert, write

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# What each variable held before we first wrote it. The environment belongs to the whole process, so must its journal.
_before: dict[str, str | None] = {}
# Variables that tell other libraries what one of our objects does, with the text before, which is the setting for the next object.
_told: dict[str, str | None] = {}


def export(name: str, value: Any) -> None:
    """Write the setting `name` to its environment variable; None unsets it.

    Raises:
        ValueError: `value` is not legal for the setting.
    """
    setting = BY_NAME[name]
    variables({setting.env: None if value is None else write(setting, convert(setting, value))})


def tell(name: str, value: Any) -> None:
    """Write the setting `name` to its variable for other libraries to read; `said` does not find it."""
    text = said(name)
    export(name, value)
    _told[BY_NAME[name].env] = text


def said(name: str) -> str | None:
    """The text of a setting's variable as the user, a launcher or `export` has set it, and not `tell`."""
    variable = BY_NAME[name].env
    return _told[variable] if variable in _told else os.environ.get(variable)


def is_told(name: str) -> bool:
    """Whether the variable of a setting holds what `tell` has written."""
    return BY_NAME[name].env in _told


def variables(changes: Mapping[str, str | None]) -> None:
    """Write environment variables; None unsets one."""
    for variable, text in changes.items():
        _told.pop(variable, None)
        _before.setdefault(variable, os.environ.get(variable))
        _put(variable, text)


def undo(*names: str) -> None:
    """Give the variables of these settings the values that they had before they were written here."""
    for variable in (BY_NAME[name].env for name in names):
        if variable in _before:
            _told.pop(variable, None)
            _put(variable, _before.pop(variable))


def before(name: str) -> str | None:
    """The text that a setting's variable has, or had before it was written here: what the user or a launcher has set."""
    variable = BY_NAME[name].env
    return _before.get(variable) if variable in _before else os.environ.get(variable)


def reset() -> None:
    """Give every variable that was written here the value that it had before."""
    _told.clear()
    while _before:
        _put(*_before.popitem())


@contextmanager
def exported(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Write environment variables for the length of a `with` block."""
    before = {variable: os.environ.get(variable) for variable in changes}
    try:
        for variable, text in changes.items():
            _put(variable, text)
        yield
    finally:
        for variable, text in before.items():
            _put(variable, text)


def _put(variable: str, text: str | None) -> None:
    if text is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = text

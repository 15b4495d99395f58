"""The value of each setting and where it came from: argument > flag > environment > file > default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from hasten.settings import environment
from hasten.settings.schema import BY_NAME
from hasten.settings.values import convert

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hasten.settings.files import ConfigFile

ARGUMENT = "argument"
FLAG = "flag"
ENVIRONMENT = "environment"
FILE = "file"
DEFAULT = "default"


class Value(NamedTuple):
    """An effective setting.

    Attributes:
        value: its typed value.
        origin: ARGUMENT, FLAG, ENVIRONMENT, FILE or DEFAULT.
        where: the same in words, with the flag, variable, or path and key.
    """

    value: Any
    origin: str = DEFAULT
    where: str = "the default"

    @property
    def chosen(self) -> bool:
        """Whether somebody set it, be it to its default value."""
        return self.origin != DEFAULT


def resolve(
    names: Iterable[str],
    *,
    arguments: Mapping[str, Any] | None = None,
    flags: Mapping[str, Any] | None = None,
    file: ConfigFile | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Value]:
    """Decide each named setting.

    Args:
        names: rows of the table.
        arguments: values given in Python, by name; None means not given.
        flags: values given on the command line, by name; None means not given.
        file: the configuration file that applies, if any.
        environ: environment variables; the process's own by default.

    Raises:
        ValueError: a value is not legal; the message names its origin.
    """
    return {name: _resolve_one(name, arguments or {}, flags or {}, file, environ) for name in names}


def _resolve_one(
    name: str,
    arguments: Mapping[str, Any],
    flags: Mapping[str, Any],
    file: ConfigFile | None,
    environ: Mapping[str, str] | None,
) -> Value:
    setting = BY_NAME[name]
    if arguments.get(name) is not None:
        return _checked(name, arguments[name], ARGUMENT, f"the argument {name}")
    if flags.get(name) is not None:
        return _checked(name, flags[name], FLAG, setting.flags[0])
    if setting.env and (text := environment.raw(setting.env, environ)) is not None:
        return _checked(name, text, ENVIRONMENT, f"the environment variable {setting.env}")
    if file is not None and name in file.values:
        return Value(file.values[name], FILE, f"{file.path}: {file.keys[name]}")
    return Value(setting.default)


def _checked(name: str, given: Any, origin: str, where: str) -> Value:
    try:
        return Value(convert(BY_NAME[name], given), origin, where)
    except ValueError as error:
        raise ValueError(f"{where} {error}.") from None

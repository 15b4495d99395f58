"""The settings as the process's environment holds them. Read when asked, never at import."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hasten.settings.schema import BY_NAME
from hasten.settings.values import parse

if TYPE_CHECKING:
    from collections.abc import Mapping


def get(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """The typed value of the setting `name` in the environment; None if its variable is unset or empty.

    Args:
        name: a row of `hasten.settings.schema.TABLE`.
        environ: variables to read instead of the process's own.

    Raises:
        ValueError: the variable's text is not legal.
    """
    setting = BY_NAME[name]
    text = raw(setting.env, environ)
    if text is None:
        return None
    try:
        return parse(setting, text)
    except ValueError as error:
        raise ValueError(f"The environment variable {setting.env} {error}.") from None


def origin(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The variable that sets `name`, or None if none does."""
    variable = BY_NAME[name].env
    return variable if raw(variable, environ) is not None else None


def raw(variable: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The text of any environment variable; None if it is unset, empty or blank."""
    text = (os.environ if environ is None else environ).get(variable, "")
    return text if text.strip() else None


def snapshot() -> dict[str, str]:
    """A copy of the process's environment, to hand to a child process."""
    return dict(os.environ)

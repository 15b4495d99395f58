"""How each kind of setting is read from text and written as text; flags, variables and files share it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hasten.settings.schema import Setting

TRUE = ("true", "yes", "on", "1", "t", "y")
FALSE = ("false", "no", "off", "0", "f", "n")


def parse(setting: Setting, text: str) -> Any:
    """The value that `text` means for `setting`.

    Raises:
        ValueError: `text` is not legal; the message says what is, and names the nearest legal value where there is one.
    """
    text = text.strip()
    if not text:
        raise ValueError(f"is empty, but must be {describe(setting)}")
    return _READERS[setting.kind](setting, text)


def write(setting: Setting, value: Any) -> str:
    """The text that `parse` reads back as `value`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if setting.kind == "range":
        low, high = value
        return str(low) if low == high else f"{low}:{high}"
    if setting.kind == "pairs":
        return ",".join(f"{key}={item}" for key, item in value)
    if setting.kind in ("names", "ints"):
        return ",".join(str(item) for item in value)
    return str(value)


def convert(setting: Setting, given: Any) -> Any:
    """Check a value that came from Python: already typed, or text.

    Raises:
        ValueError: it is not legal.
    """
    if isinstance(given, str):
        return parse(setting, given)
    if isinstance(given, bool) and setting.kind == "choice":
        given = "no" if given is False else "yes"  # YAML 1.1 reads a bare `no` as false
    elif isinstance(given, (bool, int, float)):
        given = str(given)
    elif isinstance(given, (list, tuple)):
        given = write(setting, given)
    return parse(setting, str(getattr(given, "value", given)))


def describe(setting: Setting) -> str:
    """What is legal, in words: `a whole number of at least 1`."""
    if setting.kind == "choice":
        return _one_of(setting.choices)
    if setting.kind == "amount" and setting.choices:
        return f"true, false, a whole number{_bounds(setting)}, or {_one_of(setting.choices)}"
    return _WORDS[setting.kind] + _bounds(setting)


def nearest(word: str, among: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the closest of `among`, or nothing."""
    import difflib  # only on the way to an error

    spelled = {option.lower(): option for option in among}
    close = difflib.get_close_matches(word.lower(), spelled, n=1, cutoff=0.5)
    return f" (did you mean {spelled[close[0]]!r}?)" if close else ""


def _one_of(choices: Iterable[str]) -> str:
    return "one of " + ", ".join(choice.lower() for choice in choices)


def _bounds(setting: Setting) -> str:
    if setting.high is not None:
        return f" from {setting.low:g} to {setting.high:g}"
    return f" of at least {setting.low:g}" if setting.low is not None else ""


def _bool(setting: Setting, text: str) -> bool:
    word = text.lower()
    if word in TRUE:
        return True
    if word in FALSE:
        return False
    raise ValueError(f"is {text!r}, but must be {describe(setting)}{nearest(word, TRUE[:3] + FALSE[:3])}")


def _choice(setting: Setting, text: str) -> str:
    choice = _chosen(setting, text)
    if choice is None:
        low = [choice.lower() for choice in setting.choices]
        raise ValueError(f"is {text!r}, but must be {describe(setting)}{nearest(text, low)}")
    return choice


def _chosen(setting: Setting, text: str) -> str | None:
    """The choice that `text` names, in any case or in an old spelling."""
    word = dict(setting.old_values).get(text, text).lower()
    return next((choice for choice in setting.choices if choice.lower() == word), None)


def _amount(setting: Setting, text: str) -> bool | int | str:
    choice, word = _chosen(setting, text), text.lower()
    if choice is not None:
        return choice
    if word in TRUE or word in FALSE:
        return word in TRUE
    if not re.fullmatch(r"[+-]?\d+", text):
        options = [*TRUE[:3], *FALSE[:3], *(choice.lower() for choice in setting.choices)]
        raise ValueError(f"is {text!r}, but must be {describe(setting)}{nearest(text, options)}")
    number: int = _bounded(setting, text, int(text))
    return number


def _bounded(setting: Setting, text: str, number: Any) -> Any:
    for bound, outside in ((setting.low, "__lt__"), (setting.high, "__gt__")):
        if bound is not None and getattr(number, outside)(type(number)(bound)):
            raise ValueError(f"is {text}, but must be {describe(setting)}; the nearest legal value is {bound:g}")
    return number


def _int(setting: Setting, text: str) -> int:
    if not re.fullmatch(r"[+-]?\d+", text):
        raise ValueError(f"is {text!r}, but must be {describe(setting)}")
    return _bounded(setting, text, int(text))


def _float(setting: Setting, text: str) -> float:
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text):  # neither nan nor inf
        raise ValueError(f"is {text!r}, but must be {describe(setting)}")
    return _bounded(setting, text, float(text))


def _ints(setting: Setting, text: str) -> tuple[int, ...]:
    return tuple(_int(setting, part.strip()) for part in text.split(","))


def _range(setting: Setting, text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    first = _int(setting, low)
    last = _int(setting, high) if high else first
    if last < first:
        raise ValueError(f"is {text!r}, but must be fewest:most (did you mean {last}:{first}?)")
    return first, last


def _names(setting: Setting, text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if "" in names or len(set(names)) < len(names):
        raise ValueError(f"is {text!r}, but must be {describe(setting)}, each once")
    return names


def _pairs(setting: Setting, text: str) -> tuple[tuple[str, str], ...]:
    pairs = [part.strip().partition("=") for part in text.split(",")]
    if not all(key and equals for key, equals, _ in pairs):
        raise ValueError(f"is {text!r}, but must be {describe(setting)}")
    return tuple((key.strip(), item.strip()) for key, _, item in pairs)


def _streams(setting: Setting, text: str) -> str:
    if not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text):
        raise ValueError(f"is {text!r}, but must be {describe(setting)}")
    return text


def _text(setting: Setting, text: str) -> str:
    return text


_READERS: dict[str, Callable[[Setting, str], Any]] = {
    "bool": _bool,
    "truth": _bool,
    "amount": _amount,
    "choice": _choice,
    "int": _int,
    "ints": _ints,
    "float": _float,
    "range": _range,
    "names": _names,
    "pairs": _pairs,
    "streams": _streams,
    "path": _text,
    "str": _text,
}

_WORDS = {
    "bool": "true or false",
    "truth": "true or false",
    "amount": "true, false, or a whole number",
    "int": "a whole number",
    "ints": "a whole number (or several, with commas)",
    "float": "a number",
    "range": "a whole number (or fewest:most)",
    "names": "a list of names or numbers with commas",
    "pairs": "a list key=value,key=value",
    "streams": "0, 1, 2 or 3 (or rank:stream with commas)",
    "path": "a path",
    "str": "some text",
}

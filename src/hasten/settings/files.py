"""Configuration files: ours, and accelerate's, YAML or JSON. Every leaf is read as text, by the readers of `values`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from hasten.settings import environment
from hasten.settings.schema import TABLE, Setting
from hasten.settings.unbuilt import is_off, key_areas
from hasten.settings.values import nearest, parse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class ConfigFile(NamedTuple):
    """A configuration file that was read.

    Attributes:
        path: where it lies.
        values: typed values by the setting's name.
        keys: the dotted key that set each of them.
    """

    path: str
    values: dict[str, Any]
    keys: dict[str, str]


def home(environ: Mapping[str, str] | None = None) -> str:
    """The folder of our default file: `$HASTEN_HOME`, or `~/.cache/hasten`."""
    return os.path.expanduser(environment.get("home", environ) or os.path.join("~", ".cache", "hasten"))


def default_file(use_cpu: bool = False, environ: Mapping[str, str] | None = None) -> str | None:
    """The path of the file to use when none is named: ours, else accelerate's, else None.

    Like accelerate, a run that is forced onto the CPU does not read accelerate's file, which describes the accelerators.
    """
    ours = os.path.join(home(environ), "config.yaml")
    candidates = [ours] if use_cpu else [ours, *_accelerate_files(environ)]
    return next((path for path in candidates if os.path.isfile(path)), None)


def load(path: str) -> ConfigFile:
    """Read a configuration file.

    Raises:
        ValueError: it does not exist, is not YAML or JSON, has an unknown key, or a value that is not legal.
        NotImplementedError: it turns on a feature that hasten does not have yet.
    """
    content = _read(path)
    content = _translate(path, content)
    _refuse_unbuilt(path, content)
    rows = {key: row for row in TABLE for key in (row.key, *row.old_keys) if key}
    leaves = dict(_leaves(content, {row.key.partition(".")[0] for row in TABLE if "." in row.key}))
    unknown = [key for key in leaves if key not in rows]
    if unknown:
        said = "; ".join(f"unknown key {key!r}{nearest(key, rows)}" for key in unknown)
        raise ValueError(f"{path}: {said}. docs/settings.md lists every key.")
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, text in leaves.items():
        name = rows[key].name
        if text is None:
            continue
        value = _value(path, key, rows[key], text)
        if name in values and values[name] != value:
            raise ValueError(
                f"{path}: {keys[name]} and {key} set the same thing to different values; keep one of them."
            )
        values[name], keys[name] = value, key
    return ConfigFile(path, values, keys)


def _accelerate_files(environ: Mapping[str, str] | None) -> list[str]:
    cache = environment.raw("XDG_CACHE_HOME", environ) or os.path.join("~", ".cache")
    folder = environment.raw("HF_HOME", environ) or os.path.join(cache, "huggingface")
    folder = os.path.join(os.path.expanduser(folder), "accelerate")
    return [os.path.join(folder, f"default_config.{suffix}") for suffix in ("yaml", "json")]


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read()
    except OSError as error:
        raise ValueError(f"The configuration file {path} cannot be read: {error.strerror}.") from None
    try:
        content = _from_json(text) if path.endswith(".json") else _from_yaml(text)
    except ValueError as error:
        raise ValueError(f"The configuration file {path} is not valid: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"The configuration file {path} must hold keys and values, not a {type(content).__name__}.")
    return content


def _from_json(text: str) -> Any:
    import json

    return json.loads(text, parse_int=str, parse_float=str)


def _from_yaml(text: str) -> Any:
    import yaml

    # The base loader leaves every scalar as text: `no` stays "no", and 1:4 does not become 64.
    try:
        return yaml.load(text, getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _leaves(content: dict[str, Any], sections: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their texts; None for a key without a value. An empty known section holds nothing."""
    for key, value in content.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _leaves(value, sections, f"{dotted}.")
        elif dotted in sections and is_off(value):
            continue
        elif value is None or (isinstance(value, str) and value.lower() in ("", "null", "~")):
            yield dotted, None
        elif isinstance(value, list):
            yield dotted, ",".join(str(item) for item in value)
        else:
            yield dotted, str(value)


def _translate(path: str, content: dict[str, Any]) -> dict[str, Any]:
    """Accelerate's keys that say in another way what a key of ours says."""
    content = dict(content)
    kind = str(content.pop("distributed_type", None) or "").upper()
    machine = str(content.pop("compute_environment", None) or "LOCAL_MACHINE").upper()
    if machine != "LOCAL_MACHINE":
        raise NotImplementedError(f"{path}: compute_environment {machine} (SageMaker) is not built yet.")
    if kind == "NO":
        content["num_processes"] = "1"
    elif kind == "MULTI_CPU":
        content.setdefault("use_cpu", "true")
    elif kind == "FSDP":
        content.setdefault("use_fsdp", "true")
    elif kind and not kind.startswith("MULTI_"):
        raise NotImplementedError(
            f"{path}: distributed_type {kind} is not built yet. Use another file with --config_file, or --no-config."
        )
    half = content.pop("fp16", None)
    if half is not None:
        content.setdefault("mixed_precision", "no" if is_off(half) else "fp16")
    if str(content.get("num_processes")) == "-1":
        raise ValueError(f"{path}: num_processes is -1; write the number of processes, or leave the key out.")
    return content


def _refuse_unbuilt(path: str, content: dict[str, Any]) -> None:
    """Drop the keys of features that are off; refuse those of features that are on and not there yet."""
    for key, area in key_areas().items():
        if not is_off(content.pop(key, None)):
            raise NotImplementedError(
                f"{path}: {key} asks for {area}, which is not built yet. Use another file with --config_file, or --no-config."
            )


def _value(path: str, key: str, row: Setting, text: str) -> Any:
    try:
        return parse(row, text)
    except ValueError as error:
        raise ValueError(f"{path}: {key} {error}.") from None

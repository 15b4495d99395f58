"""`hasten to-fsdp2`: a configuration file for version 1 of FSDP, rewritten for version 2."""

from __future__ import annotations

import argparse
import os
import sys
from enum import Enum
from typing import TYPE_CHECKING, Any

from hasten.settings.schema import BY_NAME
from hasten.settings.unbuilt import is_off
from hasten.settings.values import TRUE, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class ConversionStatus(Enum):
    """Why a key of version 1 has no place in version 2."""

    NOT_YET_IMPLEMENTED = 0
    REMOVED = -1


ARGUMENT_KEY_MAPPING: dict[str, str | ConversionStatus] = {
    "fsdp_version": "fsdp_version",
    "fsdp_reshard_after_forward": "fsdp_reshard_after_forward",
    "fsdp_auto_wrap_policy": "fsdp_auto_wrap_policy",
    "fsdp_backward_prefetch": ConversionStatus.REMOVED,
    "fsdp_forward_prefetch": ConversionStatus.NOT_YET_IMPLEMENTED,
    "fsdp_cpu_ram_efficient_loading": "fsdp_cpu_ram_efficient_loading",
    "fsdp_offload_params": "fsdp_offload_params",
    "fsdp_sharding_strategy": "fsdp_reshard_after_forward",
    "fsdp_state_dict_type": "fsdp_state_dict_type",
    "fsdp_sync_module_states": ConversionStatus.REMOVED,
    "fsdp_transformer_layer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_min_num_params": "fsdp_min_num_params",
    "fsdp_use_orig_params": ConversionStatus.REMOVED,
    "fsdp_activation_checkpointing": "fsdp_activation_checkpointing",
}
_STRATEGIES = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": False,
}
ARGUMENT_VALUE_MAPPING: dict[str, dict[str, Any]] = {
    "fsdp_sharding_strategy": _STRATEGIES,
    "fsdp_reshard_after_forward": _STRATEGIES,
}
# What a strategy meant that a truth value cannot say.
_LOST = {
    "HYBRID_SHARD": "copies of the model on several machines, each divided within its machine",
    "HYBRID_SHARD_ZERO2": "copies of the model on several machines, each divided within its machine",
    "NO_SHARD": "parameters that are not divided at all",
}
_REASONS = {
    ConversionStatus.REMOVED: "has no meaning in version 2",
    ConversionStatus.NOT_YET_IMPLEMENTED: "has no counterpart of its form in version 2",
}


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `hasten to-fsdp2`; as a command of `subparsers`, if given."""
    description = (
        "Rewrite a configuration file for version 1 of FSDP for version 2. Keys that it does not know are kept."
    )
    if subparsers is None:
        parser = argparse.ArgumentParser("hasten to-fsdp2", description=description, allow_abbrev=False)
    else:
        parser = subparsers.add_parser("to-fsdp2", description=description)
        parser.set_defaults(func=to_fsdp2_command)
    parser.add_argument("--config_file", "--config-file", required=True, help="the file to convert, YAML or JSON")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is already there")
    parser.add_argument(
        "--output_file", "--output-file", help="the file to write (JSON if it ends in .json); by default the given one"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Convert the file; returns the exit code."""
    try:
        to_fsdp2_command(to_fsdp2_command_parser().parse_args(arguments))
    except (OSError, ValueError) as error:
        print(f"hasten to-fsdp2: {error}", file=sys.stderr)
        return 1
    return 0


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Convert what `to_fsdp2_command_parser` has parsed. The old file is replaced in one step, when the new one is complete.

    Raises:
        FileNotFoundError: there is no such file.
        FileExistsError: the output exists and may not be overwritten.
        ValueError: nothing says where to write to, or the file cannot be converted.
    """
    source, target = args.config_file, args.output_file or args.config_file
    if not os.path.isfile(source):
        raise FileNotFoundError(f"The configuration file {source} does not exist.")
    if not args.overwrite and args.output_file is None:
        raise ValueError(f"Give --output_file PATH, or --overwrite to replace {source} itself.")
    if not args.overwrite and os.path.exists(target):
        raise FileExistsError(f"{target} exists already. Give another --output_file, or --overwrite to replace it.")
    converted = convert_config_to_fsdp2(load_config(source))
    _replace(target, _as_json(converted) if target.endswith(".json") else _as_yaml(converted))
    print(f"hasten to-fsdp2: {target} is written")


def load_config(config_file: str) -> dict[str, Any]:
    """The keys and values of a configuration file. Bare words of YAML are text here: `no` is "no".

    Raises:
        ValueError: it is empty or cannot be read.
    """
    with open(config_file, encoding="utf-8") as stream:
        text = stream.read()
    try:
        content = _from_json(text) if config_file.endswith(".json") else _from_yaml(text)
    except ValueError as error:
        raise ValueError(f"The configuration file {config_file} is not valid: {error}") from None
    if not content:
        raise ValueError(f"The configuration file {config_file} is empty.")
    if not isinstance(content, dict):
        raise ValueError(f"{config_file} must hold keys and values, not a {type(content).__name__}.")
    return content


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with its section `fsdp_config` in the words of version 2; what changes its meaning is told on stderr.

    Without such a section, or if it is of version 2 already, it is returned as it is.

    Raises:
        ValueError: a strategy is unknown, or two keys contradict each other.
    """
    section = config.get("fsdp_config")
    if not section or (not isinstance(section, dict) and is_off(section)):
        _say("there is no section fsdp_config, so there is nothing to convert")
        return config
    if not isinstance(section, dict):
        raise ValueError(f"fsdp_config must hold keys and values, but is {section!r}.")
    if str(section.get("fsdp_version", section.get("version"))).strip() == "2":
        _say(
            "fsdp_version is 2 already, so nothing is converted. If the other keys are of version 1, set it to 1 first"
        )
        return config
    converted: dict[str, Any] = {}
    for key, value in section.items():
        for name, new in _converted(_full_name(key), value):
            if name in converted and converted[name] != new:
                raise ValueError(
                    f"fsdp_config: two keys set {name} to different values; remove {key} or the other one."
                )
            converted[name] = new
    return {**config, "fsdp_config": {**converted, "fsdp_version": 2}}


def _converted(name: str, value: Any) -> list[tuple[str, Any]]:
    """What a key of version 1 becomes: one key and value, or none."""
    place = ARGUMENT_KEY_MAPPING.get(name, name)
    if name == "fsdp_version":
        return []
    if isinstance(place, ConversionStatus):
        _say(f"{name} {_REASONS[place]} and is left out")
        return []
    if name == "fsdp_state_dict_type" and str(value).upper() in ("LOCAL_STATE_DICT", "2"):
        _say("LOCAL_STATE_DICT does not exist in version 2; SHARDED_STATE_DICT takes its place")
        return [(place, "SHARDED_STATE_DICT")]
    if name in ARGUMENT_VALUE_MAPPING and not is_off(value):
        return [(place, _reshards(name, value))]
    return [(place, value)]


def _reshards(name: str, value: Any) -> Any:
    """Whether whole parameters are freed after the forward pass, by a strategy's name or number, or a truth value."""
    text = str(value).strip()
    if name == "fsdp_reshard_after_forward" and text.lower() in ("true", "false"):
        return text.lower() in TRUE
    numbers = dict(BY_NAME["fsdp_sharding_strategy"].old_values)
    strategy = numbers.get(text, text.upper().lstrip("_"))
    if strategy not in _STRATEGIES:
        raise ValueError(
            f"{name} is {text!r}, but must be one of {', '.join(_STRATEGIES)}, or its number{nearest(text, _STRATEGIES)}."
        )
    if strategy in _LOST:
        _say(
            f"{strategy} meant {_LOST[strategy]}; version 2 has no word for it here, and the converted file divides parameters "
            "over all processes"
        )
    return _STRATEGIES[strategy]


def _full_name(key: str) -> str:
    """The name of a key that may be in one of its old spellings."""
    for row in BY_NAME.values():
        if f"fsdp_config.{key}" in (row.key, *row.old_keys):
            return row.name
    return key


def _say(text: str) -> None:
    print(f"hasten to-fsdp2: {text}.", file=sys.stderr)


def _replace(target: str, text: str) -> None:
    """Write a file beside its place, then put it there, so that one of the two versions is there at every moment."""
    target = os.path.realpath(target)  # a link stays one
    partial = f"{target}.partial-{os.getpid()}"
    try:
        with open(partial, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        if os.path.exists(target):
            os.chmod(partial, os.stat(target).st_mode & 0o7777)
        os.replace(partial, target)
    except OSError:
        if os.path.exists(partial):
            os.unlink(partial)
        raise


# -- reading and writing ---------------------------------------------------------------------------------------------


class _Bare(str):
    """A scalar that stands in a YAML file without quotes; it is written back as it was."""


def _from_json(text: str) -> Any:
    import json

    return json.loads(text) if text.strip() else None


def _from_yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def scalar(loader: Any, node: Any) -> str:
        return _Bare(node.value) if node.style is None else str(node.value)

    Loader.yaml_implicit_resolvers = {}  # else `no` is a truth value, and 1:4 the number 64
    Loader.add_constructor("tag:yaml.org,2002:str", scalar)
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _as_yaml(config: Mapping[str, Any]) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def bare(dumper: Any, text: _Bare) -> Any:
        return yaml.ScalarNode(dumper.resolve(yaml.ScalarNode, str(text), (True, False)), str(text))

    Dumper.add_representer(_Bare, bare)
    written: str = yaml.dump(config, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return written


def _as_json(config: Mapping[str, Any]) -> str:
    import json

    return json.dumps(_mapped(config, _typed), indent=2) + "\n"


def _typed(item: Any) -> Any:
    """A bare scalar as JSON has it; words such as `no` stay text."""
    if not isinstance(item, _Bare):
        return item
    if item.lower() in ("", "~", "null"):
        return None
    if item.lower() in ("true", "false"):
        return item.lower() == "true"
    for number in (int, float):
        try:
            return number(item)
        except ValueError:
            pass
    return str(item)


def _mapped(item: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(item, dict):
        return {str(key): _mapped(value, change) for key, value in item.items()}
    return [_mapped(value, change) for value in item] if isinstance(item, list) else change(item)

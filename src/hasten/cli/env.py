"""`hasten env`: versions, machine, devices and settings in one block, to put into a report of a problem."""

from __future__ import annotations

import argparse
import platform
import sys
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from hasten.world.devices import Device

NOT_FOUND = "Not found"
_PACKAGES = (
    "accelerate",
    "safetensors",
    "transformers",
    "huggingface_hub",
    "peft",
    "trl",
    "diffusers",
    "timm",
    "torchao",
)
_UNKNOWN_CHIP = "Apple Silicon"


def env_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `hasten env`; as a command of `subparsers`, if given."""
    description = "Print versions, machine, devices and the default settings, to copy into a report of a problem."
    if subparsers is None:
        parser = argparse.ArgumentParser("hasten env", description=description, allow_abbrev=False)
    else:
        parser = subparsers.add_parser("env", description=description)
        parser.set_defaults(func=env_command)
    parser.add_argument(
        "--config_file", "--config-file", help="the configuration file to show; by default the one that is found"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Print the block; returns the exit code."""
    env_command(env_command_parser().parse_args(arguments))
    return 0


def env_command(args: argparse.Namespace) -> dict[str, Any]:
    """Print what `hasten env` shows, and return it by name. What cannot be found out is said in its place."""
    info: dict[str, Any] = {
        "`hasten` version": _asked(_version),
        "Platform": _asked(platform.platform),
        "`hasten` bash location": _asked(_location),
        "Python version": platform.python_version(),
        "Numpy version": _asked(lambda: _module_version("numpy")),
        "PyTorch version": _asked(lambda: _module_version("torch")),
        "PyTorch accelerator": _asked(_accelerator),
        "System RAM": _asked(_memory),
        "Processor cores": _asked(_cores),
    }
    info |= _asked_rows(_types)
    devices = _asked_rows(_devices)
    packages = {name: version for name in _PACKAGES if (version := _installed(name))}
    variables = _variables()
    path, config = _config(args.config_file)
    print("\nCopy and paste the text below into your report\n")
    print("\n".join(f"- {name}: {value}" for name, value in info.items()))
    for title, rows in (("Devices", devices), ("Other packages", packages), ("Variables that are set", variables)):
        _print_section(title, rows)
    named = "config passed" if args.config_file else "default config"
    _print_section(f"`hasten` {named}{f' ({path})' if path else ''}", config)
    return {
        **info, "Devices": devices, "Other packages": packages, "Variables": variables, "`hasten` configs": config
    }  # fmt: skip


def mps_chip() -> str:
    """The name of an Apple chip: by sysctl, else as Python knows it, else in general."""
    import subprocess

    try:
        found = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        found = ""
    return found or platform.processor() or _UNKNOWN_CHIP


def _print_section(title: str, rows: Any) -> None:
    print(f"- {title}:")
    if not isinstance(rows, dict):
        print(f"\t{rows}")
    elif not rows:
        print("\tNone")
    else:
        print("\n".join(f"\t- {name}: {value}" for name, value in rows.items()))


def _asked(question: Callable[[], Any]) -> Any:
    """An answer, or why there is none: a broken installation is what such reports are about."""
    try:
        return question()
    except Exception as error:
        return f"{NOT_FOUND} ({type(error).__name__}: {error})".splitlines()[0]


def _asked_rows(question: Callable[[], dict[str, str]]) -> dict[str, str]:
    answer = _asked(question)
    return answer if isinstance(answer, dict) else {}


def _version() -> str:
    from hasten.version import __version__

    return __version__


def _location() -> str:
    from shutil import which

    return which("hasten") or NOT_FOUND


def _module_version(name: str) -> str:
    from importlib import import_module

    return str(import_module(name).__version__)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _memory() -> str:
    import psutil

    return f"{psutil.virtual_memory().total / 2**30:.2f} GB"


def _cores() -> int:
    from hasten.launch.machine import core_count

    return core_count()


def _available() -> Device | None:
    from hasten.world.devices import DEVICES

    return next((row for row in DEVICES.values() if not row.is_cpu and row.is_available), None)


def _accelerator() -> str:
    present = _available()
    return "N/A" if present is None else present.type.upper()


def _types() -> dict[str, str]:
    """`GPU type` and the like of the accelerator that is used."""
    present = _available()
    if present is None:
        return {}
    kind = "GPU" if present.type == "cuda" else present.type.upper()
    return {f"{kind} type": _asked(lambda: _name(present))}


def _name(row: Device) -> str:
    if row.type == "mps":
        return mps_chip()
    if row.is_cpu:
        return platform.processor() or platform.machine()
    return str(row.module.get_device_name())


def _devices() -> dict[str, str]:
    from hasten.world.devices import DEVICES

    return {kind: _asked(partial(_described, row)) for kind, row in DEVICES.items()}


def _described(row: Device) -> str:
    if not row.is_available:
        return "not available"
    import torch.distributed

    _, total = row.memory()
    has_backend = torch.distributed.is_available() and torch.distributed.is_backend_available(row.backend)
    backend = row.backend if has_backend else f"{row.backend} (not available)"
    return f"{row.count} x {_name(row)}, {total / 2**30:.2f} GB, {backend}"


def _variables() -> dict[str, str]:
    from hasten.settings import environment
    from hasten.settings.schema import TABLE

    return {row.env: text for row in TABLE if row.env and (text := environment.raw(row.env)) is not None}


def _config(given: str | None) -> tuple[str | None, Any]:
    """The path of the configuration file that applies, and its content, or what is wrong with it."""
    from hasten.cli.to_fsdp2 import load_config
    from hasten.settings import files

    path = given or files.default_file()
    if path is None:
        return None, NOT_FOUND
    try:
        content = load_config(path)
    except (OSError, ValueError) as error:
        return path, f"cannot be read: {error}"
    try:
        files.load(path)
    except (ValueError, NotImplementedError) as error:
        print(f"hasten env: `hasten launch` cannot use {error}", file=sys.stderr)
    return path, content

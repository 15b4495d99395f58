"""`hasten <command>`: finds the command and runs it. Nothing else is imported before that."""

from __future__ import annotations

import sys
from importlib import import_module

# command: one line of help. Each lives in the module of its name here (`-` is `_`), as `main(arguments) -> exit code`.
COMMANDS = {
    "launch": "start a script on one process or many",
    "test": "check on every process that a job with your settings works",
    "env": "print versions, devices and settings, for a report of a problem",
    "estimate-memory": "print how much memory a model needs to be loaded and trained",
    "merge-weights": "write one file of plain weights from a folder of shards",
    "to-fsdp2": "rewrite a configuration file of FSDP version 1 for version 2",
    "settings": "print every setting with its flag, environment variable and file key, as Markdown",
}


def main(arguments: list[str] | None = None) -> int:
    """Run `hasten` with the given arguments, by default the process's own; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        print(_usage())
        return 1
    first, *rest = arguments
    if first in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if first in ("-V", "--version"):
        from hasten.version import __version__

        print(f"hasten {__version__}")
        return 0
    if first not in COMMANDS:
        from hasten.settings.values import nearest

        print(
            f"hasten: there is no command {first!r}{nearest(first, COMMANDS)}. `hasten --help` lists them.",
            file=sys.stderr,
        )
        return 2
    code: int = import_module(f"hasten.cli.{first.replace('-', '_')}").main(rest)
    return code


def launch() -> int:
    """The console script `accelerate-launch`: `hasten launch` with this process's arguments."""
    return main(["launch", *sys.argv[1:]])


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {line}" for name, line in COMMANDS.items())
    return (
        f"usage: hasten <command> [options]\n\n{lines}\n\n"
        "`hasten <command> --help` explains a command; `hasten --version` prints the version."
    )


if __name__ == "__main__":
    raise SystemExit(main())

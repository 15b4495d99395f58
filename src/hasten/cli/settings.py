"""`hasten settings`: the table of settings as Markdown, which is also docs/settings.md."""

from __future__ import annotations

from hasten.settings.schema import ELASTIC, TABLE, Setting
from hasten.settings.values import describe, write

_HEAD = """# Settings

Made by `hasten settings` from the table in `src/hasten/settings/schema.py`; do not edit.

A setting may come from an argument in Python, a flag of `hasten launch`, an environment variable, a configuration file, or
its default, in this order of precedence (but for gradient accumulation, where the variable wins over `Accelerator`'s argument,
as in accelerate). Flags are written with `_` or `-`; a switch `--x` is turned off by `--no_x`. Truth
values in variables and files are `true`/`false`, `yes`/`no`, `on`/`off` or `1`/`0`, in any case. Keys with a dot belong to a
section: `dynamo_config.dynamo_mode` is `dynamo_mode` under `dynamo_config`.
"""


def main(arguments: list[str]) -> int:
    """Print the table."""
    if arguments and arguments != ["--help"] and arguments != ["-h"]:
        import sys

        print(f"hasten settings: takes no arguments, was given {' '.join(arguments)}", file=sys.stderr)
        return 2
    print("usage: hasten settings" if arguments else markdown(), end="\n" if arguments else "")
    return 0


def markdown() -> str:
    """The whole table, by group."""
    groups: dict[str, list[Setting]] = {}
    for row in TABLE:
        groups.setdefault(row.group, []).append(row)
    return _HEAD + "".join(_group(title, rows) for title, rows in groups.items())


def _group(title: str, rows: list[Setting]) -> str:
    lines = [
        f"\n## {title}\n",
        "| flag | variable | file key | value | default | what it does |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + [_row(row) for row in rows]) + "\n"


def _row(row: Setting) -> str:
    default = "" if row.default in (None, ()) else f"`{write(row, row.default).lower()}`"
    notes = row.help + (
        " (through torch.distributed.run)" if row.applies == ELASTIC and row.name != "same_network" else ""
    )
    if row.old_keys:
        notes += f"; also read from {', '.join(f'`{key}`' for key in row.old_keys)}"
    cells = [
        ", ".join(f"`{flag}`" for flag in row.flags),
        f"`{row.env}`" if row.env else "",
        f"`{row.key}`" if row.key else "",
        describe(row),
        default,
        notes,
    ]
    return "| " + " | ".join(cells) + " |"

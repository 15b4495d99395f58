"""`hasten launch`: the parser made from the settings table, and the command."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from hasten.launch.spec import DISTRIBUTED, REPLACE, LaunchSpec, plan
from hasten.settings.resolve import resolve
from hasten.settings.schema import TABLE, Setting
from hasten.settings.unbuilt import flag_area, used
from hasten.settings.values import nearest, parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from hasten.settings.files import ConfigFile

USAGE = "hasten launch [options] script [script's own options]"
DESCRIPTION = (
    "Start a script on one process or many. Options are written with _ or -, and come before the script; everything after the "
    "script is handed to it untouched. --no_X turns a switch --X off that a file or variable has turned on."
)
_METAVARS = {
    "truth": "{true,false}",
    "amount": "{true,false,N}",
    "int": "N",
    "ints": "N",
    "range": "N",
    "float": "X",
    "path": "PATH",
    "names": "LIST",
    "pairs": "LIST",
}
FAILED = 2  # exit code when nothing could be started


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `hasten launch`; as a command of `subparsers`, if given. What the user left out parses as None."""
    options: dict[str, Any] = {
        "usage": USAGE,
        "description": DESCRIPTION,
        "allow_abbrev": False,
        "formatter_class": _Formatter,
    }
    if subparsers is None:
        parser: argparse.ArgumentParser = _Parser("hasten launch", **options)
    else:
        parser = subparsers.add_parser("launch", help="start a script on one process or many", **options)
        parser.set_defaults(func=launch_command)
    groups: dict[str, Any] = {}
    for row in TABLE:
        if row.flags:
            if row.group not in groups:
                groups[row.group] = parser.add_argument_group(row.group)
            _add_flag(groups[row.group], row)
    parser.add_argument("training_script", metavar="script", help="path of the script, or module with -m")
    parser.add_argument("training_script_args", metavar="...", nargs=argparse.REMAINDER, help="handed to the script")
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """Launch what `launch_command_parser` has parsed; returns when the job has succeeded.

    Raises:
        SystemExit: with the job's exit code if it failed, or 2 if nothing could be started.
    """
    code = _launch(args, in_place=False)
    if code:
        raise SystemExit(code)


def main(arguments: list[str]) -> int:
    """`hasten launch` with these arguments; returns the exit code, unless the script takes this process's place."""
    return _launch(launch_command_parser().parse_args(arguments), in_place=True)


def make_spec(args: argparse.Namespace) -> LaunchSpec:
    """The plan of a parsed command line, with file and environment. Prints which default file it uses, if any.

    Raises:
        ValueError: the settings cannot be obeyed; the message says which and why.
        NotImplementedError: they ask for something that hasten does not have yet.
    """
    unbuilt = dict(used(vars(args)))
    if unbuilt:
        raise NotImplementedError(_not_built(unbuilt))
    flags = {row.name: getattr(args, row.dest, None) for row in TABLE if row.flags}
    file = _config_file(flags)
    names = [row.name for row in TABLE if row.flags]
    return plan(resolve(names, flags=flags, file=file), args.training_script, args.training_script_args)


def _launch(args: argparse.Namespace, in_place: bool) -> int:
    try:
        spec = make_spec(args)
    except (ValueError, NotImplementedError) as error:
        print(f"hasten launch: {error}", file=sys.stderr)
        return FAILED
    try:
        return _run(spec, in_place)
    except ValueError as error:
        print(f"hasten launch: {error}", file=sys.stderr)
        return FAILED
    except OSError as error:
        print(f"hasten launch: {spec.command()[0]} cannot be started: {error.strerror}.", file=sys.stderr)
        return FAILED


def _run(spec: LaunchSpec, in_place: bool) -> int:
    if spec.engine == DISTRIBUTED:
        from hasten.launch.elastic import run_distributed

        return run_distributed(spec)
    if spec.engine == REPLACE and in_place:
        from hasten.launch.single import replace_process

        return replace_process(spec)
    from hasten.launch.local import run_local

    return run_local(spec)


def _config_file(flags: dict[str, Any]) -> ConfigFile | None:
    """The configuration file that applies: the named one, or a default one, which is announced."""
    early = resolve(("config_file", "no_config", "quiet", "use_cpu"), flags=flags)
    from hasten.settings import files

    if early["config_file"].value is not None:
        return files.load(early["config_file"].value)
    path = None if early["no_config"].value else files.default_file(bool(early["use_cpu"].value))
    if path is None:
        return None
    if not early["quiet"].value:
        print(f"hasten: settings from {path} (--no_config ignores it)", file=sys.stderr)
    return files.load(path)


def _not_built(areas: dict[str, str]) -> str:
    """Flags and their areas, in one sentence."""
    flags, named = ", ".join(areas), ", ".join(dict.fromkeys(areas.values()))
    return f"{flags} ({named}): not built yet, so it could not be obeyed. Leave it out."


def _add_flag(group: Any, row: Setting) -> None:
    hyphens = [f"--{flag[2:].replace('_', '-')}" for flag in row.flags if "_" in flag]
    spellings = [*row.flags, *hyphens]
    if row.kind != "bool":
        group.add_argument(
            *spellings, dest=row.dest, default=None, type=_reader(row), metavar=_metavar(row), help=_help(row)
        )
        return
    group.add_argument(*spellings, dest=row.dest, default=None, action="store_true", help=_help(row))
    if not row.dest.startswith("no_"):
        off = (f"--no_{row.dest}", f"--no-{row.dest.replace('_', '-')}")
        group.add_argument(*off, dest=row.dest, default=None, action="store_false", help=argparse.SUPPRESS)


def _reader(row: Setting) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return parse(row, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _metavar(row: Setting) -> str:
    if row.kind == "choice" and len(row.choices) < 6:
        return "{" + ",".join(choice.lower() for choice in row.choices) + "}"
    return _METAVARS.get(row.kind, "NAME")


def _help(row: Setting) -> str:
    unshown = row.kind != "choice" or len(row.choices) >= 6
    listed = f": {', '.join(choice.lower() for choice in row.choices)}" if row.choices and unshown else ""
    return f"{row.help}{listed}".replace("%", "%%")


class _Parser(argparse.ArgumentParser):
    """Says what an unknown flag may have meant, or that it is not built yet."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            message = self._explain([word for word in unknown.split() if word.startswith("-")])
        elif message.startswith("the following arguments are required"):
            message = f"no script is given. usage: {USAGE}"
        elif message.startswith("argument "):  # argument --a_b/--a-b: is 0, but ...
            flags, _, rest = message.removeprefix("argument ").partition(": ")
            message = f"{flags.partition('/')[0]} {rest}"
        self.exit(FAILED, f"hasten launch: {message}\n")

    def _explain(self, words: list[str]) -> str:
        areas = {word: flag_area(word) for word in words}
        for word, area in areas.items():
            if area is None:
                known = [flag for flag in self._option_string_actions if "-" not in flag[2:]]
                return (
                    f"unknown option {word}{nearest(word.partition('=')[0], known)}. `hasten launch --help` lists all."
                )
        return _not_built(areas)  # type: ignore[arg-type]


class _Formatter(argparse.HelpFormatter):
    """Shows one spelling of each flag."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        spelling = next((flag for flag in action.option_strings if flag.startswith("--")), action.option_strings[0])
        short = [flag for flag in action.option_strings if not flag.startswith("--")]
        value = f" {action.metavar}" if action.nargs != 0 and isinstance(action.metavar, str) else ""
        return ", ".join([*short, spelling]) + value

"""`hasten test`: starts a job with the settings that apply, checks it on every process, and reports on one screen."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.cli.selfcheck import BEGUN, CHECKS, FAILED, OK, SKIPPED, read_diary, state_of

if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE = "hasten test [options] [options of hasten launch]"
_LOG_LINES = 15
_GRACE = 30.0  # seconds in which the launcher ends its processes
_ERROR_LINES = 6


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:  # noqa: PT028 - no test, but a command of this name
    """The parser of `hasten test`; as a command of `subparsers`, if given."""
    options: dict[str, Any] = {
        "usage": USAGE,
        "description": "Start processes as the configuration file says and check on each: the process group, collectives, data, a "
        "training step of DDP and of FSDP against plain torch, saving and loading. Options of `hasten launch` may follow, such as "
        "`--cpu --num_processes 2`. On several machines start it on each.",
        "allow_abbrev": False,
    }
    if subparsers is None:
        parser = argparse.ArgumentParser("hasten test", **options)
    else:
        parser = subparsers.add_parser("test", **options)
        parser.set_defaults(func=test_command)
    parser.add_argument(
        "--config_file", "--config-file", help="the configuration file; by default the one that is found"
    )
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="limit for the whole (300)")
    parser.add_argument(
        "--shared_folder", "--shared-folder", metavar="PATH",
        help="a folder that all machines see, for the check of checkpoints; needed with several machines only",
    )  # fmt: skip
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the test and print the report; returns the exit code."""
    args, rest = test_command_parser().parse_known_args(arguments)
    args.launch_options = rest
    return _test(args)


def test_command(args: argparse.Namespace) -> None:
    """Run what `test_command_parser` has parsed, and print the report.

    Raises:
        SystemExit: something failed.
    """
    code = _test(args)
    if code:
        raise SystemExit(code)


def _test(args: argparse.Namespace) -> int:
    from hasten.cli.launch import launch_command_parser, make_spec

    options = list(getattr(args, "launch_options", ()))
    if args.config_file:
        options = ["--config_file", args.config_file, *options]
    with tempfile.TemporaryDirectory(prefix="hasten-test-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        words = [*options, "-m", "hasten.cli.selfcheck", str(folder)]
        parsed = launch_command_parser().parse_args(words)
        try:
            spec = make_spec(parsed)
        except (ValueError, NotImplementedError) as error:
            print(f"hasten test: {error}", file=sys.stderr)
            return 2
        several = spec.machines[1] > 1
        shared = getattr(args, "shared_folder", None) or (None if several else str(folder))
        first = spec.local_processes * spec.machine_rank
        ranks = range(first, first + spec.local_processes)
        print(f"hasten test: {_plural(spec.local_processes, 'process', 'processes')}{_origin(spec)} ...", flush=True)
        code, log = _run([*words, *([shared] if shared else [])], folder, getattr(args, "timeout", 300.0))
        # In an elastic job the ranks of a machine are known to its diaries alone.
        found = {rank: read_diary(folder, rank) for rank in ranks} if not several else _all_diaries(folder)
        text, passed = report(found, code, log)
    print(text)
    return 0 if passed else 1


def report(diaries: dict[int, list[dict[str, Any]]], code: int | None, log: str) -> tuple[str, bool]:
    """The screen, and whether everything is well.

    Args:
        diaries: each rank's lines.
        code: the exit code of the job; None if it was ended at the limit.
        log: what the job has printed.
    """
    lines = _facts(diaries)
    failures: list[str] = []
    failed = 0
    for check in CHECKS:
        states = {rank: state_of(entries, check.name) for rank, entries in diaries.items()}
        wrong = [rank for rank, state in states.items() if state not in (OK, SKIPPED)]
        lines.append(f"  {check.name:<16} {_verdict(states)}{_remark(diaries, check.name, wrong)}")
        told = [rank for rank in wrong if states[rank] in (FAILED, BEGUN)]
        failed += bool(wrong)
        if told:
            failures += ["", *_explain(check.name, states, diaries), f"  To do: {check.advice}."]
    silent = [rank for rank, entries in diaries.items() if not entries]
    passed = not failed and code == 0 and bool(diaries)
    if passed:
        return "\n".join([*lines, "Everything works."]), True
    lines.append(
        f"{failed} of {len(CHECKS)} checks did not pass." if failed else "The checks passed, but the job failed."
    )
    lines += failures
    if code is None:
        lines += ["", "The limit was reached, and the job was ended; --timeout allows more."]
    if silent:
        lines += ["", f"{_ranks(silent)} never began: the process could not start, or died before."]
    interrupted = any(state_of(entries, check.name) == BEGUN for entries in diaries.values() for check in CHECKS)
    if silent or interrupted or not failures:
        lines += ["", *_last_words(code, log)]
    return "\n".join(lines), False


def _last_words(code: int | None, log: str) -> list[str]:
    """What the launcher says of the rank that failed first, else the end of what was printed."""
    printed = [line for line in log.splitlines() if line.strip()]
    told = [line for line in printed if line.startswith("hasten: rank ")]
    if told:
        return told
    ended = "" if code is None else f"The job ended with {code}. "
    return [f"{ended}It printed last:", *(f"  {line[:200]}" for line in printed[-_LOG_LINES:])]


def _run(words: Sequence[str], folder: Path, limit: float) -> tuple[int | None, str]:
    """Launch the checks; the exit code (None: ended at the limit), and what was printed."""
    log = folder / "log"
    with open(log, "wb") as stream:
        job = subprocess.Popen(
            [sys.executable, "-m", "hasten", "launch", *words],
            stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
        )  # fmt: skip
        code: int | None = None
        try:
            code = job.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if job.poll() is None:
                job.terminate()
                try:
                    job.wait(_GRACE)
                except subprocess.TimeoutExpired:
                    job.kill()
                    job.wait()
    return code, log.read_text(encoding="utf-8", errors="replace")


def _all_diaries(folder: Path) -> dict[int, list[dict[str, Any]]]:
    ranks = sorted(int(path.stem.partition("-")[2]) for path in folder.glob("rank-*.jsonl"))
    return {rank: read_diary(folder, rank) for rank in ranks}


def _origin(spec: Any) -> str:
    """Where the settings came from: ` by the settings of /path/config.yaml`."""
    paths = {value.where.rpartition(": ")[0] for value in spec.settings.values() if value.origin == "file"}
    return f" by the settings of {', '.join(sorted(paths))}" if paths else ""


def _facts(diaries: dict[int, list[dict[str, Any]]]) -> list[str]:
    """Devices, backend and precision, as far as some rank has come to know them."""
    facts = [entry for entries in diaries.values() for entry in entries if "device" in entry]
    if not facts:
        return []
    devices = ", ".join(dict.fromkeys(entry["device"] for entry in facts))
    return [f"  devices {devices}; backend {facts[0]['backend']}; mixed precision {facts[0]['precision']}"]


def _verdict(states: dict[int, str | None]) -> str:
    kinds = set(states.values())
    if kinds == {OK}:
        return "ok     "
    if kinds <= {OK, SKIPPED} and kinds:
        return "skipped"
    if kinds <= {None}:
        return "not run"
    parts = []
    for state, word in ((FAILED, "FAILED on"), (BEGUN, "not finished by"), (None, "not begun by")):
        ranks = [rank for rank, each in states.items() if each == state]
        if ranks:
            parts.append(f"{word} {_ranks(ranks)}")
    return ", ".join(parts)


def _remark(diaries: dict[int, list[dict[str, Any]]], check: str, wrong: list[int]) -> str:
    """What a check that is well has shown, and how long it took."""
    ends = [
        entry for entries in diaries.values() for entry in entries if entry.get("check") == check and "text" in entry
    ]
    if wrong or not ends:
        return ""
    return f"  {max(entry['seconds'] for entry in ends):4.1f} s  {ends[0]['text']}"


def _explain(check: str, states: dict[int, str | None], diaries: dict[int, list[dict[str, Any]]]) -> list[str]:
    """The errors of a check, each with the ranks that have it."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, entries in diaries.items():
        for entry in entries:
            if entry.get("check") == check and entry["state"] == FAILED:
                ranks.setdefault((entry["text"], entry["trace"]), []).append(rank)
    lines = []
    for (text, trace), those in ranks.items():
        lines += [f"{check}, {_ranks(those)}: {line}" if not number else f"  {line}"
                  for number, line in enumerate(text.splitlines()[:_ERROR_LINES])]  # fmt: skip
        lines += [f"  at {line}" for line in trace.splitlines()[-1:]]
    waiting = [rank for rank, state in states.items() if state == BEGUN]
    if waiting:
        lines.append(f"{check}, {_ranks(waiting)}: was still in it when the job ended.")
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0 to 7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def _plural(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"

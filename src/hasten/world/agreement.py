"""Agreement: what a process says of a collective before it takes part, and the error when the processes differ."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

DIGEST_BYTES = 16
_SHOWN = 8  # differing leaves named in a message
_SENT = 5000  # leaves that a process names to the others when they disagree; the digest covers all
_SITE_BYTES = 256
ORDER = (
    "Every process must make the same calls in the same order: look for a call inside `if is_main_process`, for loops of "
    "different lengths, or for a process that left a loop early."
)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class DistributedOperationException(Exception):
    """The processes of a world do not agree on a collective, so none of them has taken part in it."""


@dataclass(frozen=True)
class Statement:
    """What one process says before a collective. All processes must say the same.

    Args:
        operation: name of the function that was called.
        arguments: those of its arguments that must be equal everywhere.
        leaves: path, dtype and shape of each tensor, in an order that does not depend on the process.
        error: the text of an error, where this process cannot take part.
        site: file and line of the call, in debug mode: it must be the same everywhere, too.
        where: file and line of the call, for people.
    """

    operation: str
    arguments: dict[str, Any]
    leaves: tuple[tuple[str, str, str], ...] = ()
    error: str | None = None
    site: str | None = None
    where: str = field(default="", compare=False)

    @cached_property
    def digest(self) -> bytes:
        """A number of fixed size that stands for the statement."""
        whole = repr((self.operation, self.arguments, self.leaves, self.error, self.site))
        return hashlib.blake2b(whole.encode(), digest_size=DIGEST_BYTES).digest()

    @cached_property
    def _text(self) -> bytes:
        return json.dumps([self.operation, self.arguments, self.leaves[:_SENT], self.error, self.site]).encode()

    @property
    def nbytes(self) -> int:
        """The length of what `told` returns, wherever the call stands."""
        return len(self._text) + _SITE_BYTES

    def told(self, where: str) -> bytes:
        """The statement as the other processes read it when they disagree, with the place of this call."""
        return self._text + where.encode()[-_SITE_BYTES:].ljust(_SITE_BYTES)

    @staticmethod
    def parse(told: bytes) -> Statement:
        """Read what `told` gave."""
        operation, arguments, leaves, error, site = json.loads(told[:-_SITE_BYTES])
        where = told[-_SITE_BYTES:].decode(errors="ignore").rstrip()
        named = tuple((path, dtype, shape) for path, dtype, shape in leaves)
        return Statement(operation, arguments, named, error, site, where)

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        place = self.site or self.where
        return f"{self.operation}({arguments})" + (f" at {place}" if place else "")


def key_text(key: object) -> str:
    """A mapping's key as a text that is the same in every process."""
    return _ADDRESS.sub("", repr(key))


def failure(operation: str, error: Exception, site: str | None) -> Statement:
    """The statement of a process that cannot take part in `operation`."""
    return Statement(operation, {}, error=_ADDRESS.sub("", f"{type(error).__name__}: {error}"), site=site)


def disagreement(statements: Sequence[Statement]) -> DistributedOperationException:
    """The error for statements that differ, the same in every process.

    Args:
        statements: one of each process, in rank order.
    """
    if len({statement.operation for statement in statements}) > 1:
        return _different_calls(statements, "did not call the same operation", ORDER)
    name = statements[0].operation
    errors = [statement.error for statement in statements]
    if any(errors):
        lines = [f"  {ranks}: {error}" for error, ranks in grouped(errors) if error] + _places(statements)
        return _exception(f"`{name}` could not run, so no process took part in it.", lines, "Correct the error above.")
    if len({str(statement.arguments) for statement in statements}) > 1:
        advice = "Call it with the same arguments everywhere."
        return _different_calls(statements, f"called `{name}` with different arguments", advice)
    if len({statement.leaves for statement in statements}) > 1:
        return _different_leaves(name, statements)
    if len({statement.site for statement in statements}) > 1:
        return _different_calls(
            statements, f"called `{name}` from different places (checked in debug mode only)", ORDER
        )
    return _exception(f"`{name}` got structures that differ after their first {_SENT} tensors.", [], _advice(name, []))


def _different_calls(statements: Sequence[Statement], what: str, advice: str) -> DistributedOperationException:
    lines = [f"  {ranks}: {statement}" for statement, ranks in grouped([str(each) for each in statements])]
    return _exception(f"The {len(statements)} processes {what}:", lines, advice)


def _different_leaves(name: str, statements: Sequence[Statement]) -> DistributedOperationException:
    tables = [{path: (dtype, shape) for path, dtype, shape in statement.leaves} for statement in statements]
    paths = list(dict.fromkeys(path for table in tables for path in table))
    differing = [path for path in paths if len({table.get(path) for table in tables}) > 1]
    lines = []
    for path in differing[:_SHOWN]:
        found = [" ".join(table[path]) if path in table else "nothing" for table in tables]
        lines.append(f"  {path}: " + "; ".join(f"{what} on {ranks}" for what, ranks in grouped(found)))
    if len(differing) > _SHOWN:
        lines.append(f"  and {len(differing) - _SHOWN} more")
    lines += _places(statements)
    values = [[table.get(path) for table in tables] for path in differing]
    return _exception(
        f"`{name}` needs the same structure, dtypes and shapes on all {len(statements)} processes, but they differ:",
        lines,
        _advice(name, values),
    )


def _advice(name: str, values: list[list[tuple[str, str] | None]]) -> str:
    if any(None in row for row in values):
        return (
            "Pass the same keys, in structures of the same length, on every process; objects that differ go through "
            "`gather_object`."
        )
    if any(len({entry[0] for entry in row if entry}) > 1 for row in values):
        return "Convert to one dtype on every process first, e.g. `tensor.to(torch.float32)`."
    padded = "Make the shapes equal with `pad_across_processes(tensor, dim=...)` first"
    otherwise = {
        "gather": ", or gather them as they are: `gather(tensor, ragged=True)` lists each process's own tensor",
        "gather_for_metrics": ", or exchange the tensors as objects: `gather_for_metrics(data, use_gather_object=True)`",
    }
    return f"{padded}{otherwise.get(name, '')}."


def _places(statements: Sequence[Statement]) -> list[str]:
    """Where the calls stand, if that is known."""
    places = grouped([statement.site or statement.where for statement in statements])
    return [f"  called at {place}" + (f" on {ranks}" if len(places) > 1 else "") for place, ranks in places if place]


def grouped(values: Sequence[Any]) -> list[tuple[Any, str]]:
    """Each different value with the ranks that have it, e.g. `ranks 0-2, 5`."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return [(value, _spell(numbers)) for value, numbers in ranks.items()]


def _spell(ranks: list[int]) -> str:
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


def _exception(title: str, lines: list[str], advice: str) -> DistributedOperationException:
    return DistributedOperationException("\n".join([title, *lines, advice]))

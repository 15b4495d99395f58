"""How the processes of a world take part in one save.

Only the main process must save; the others may. Code written for the reference calls `save_state` on every process, on the main one
alone, or on the first one of each machine, and all must work without waiting for somebody who never comes. So there is no
collective operation here: the processes meet in the store of their process group. The main process opens a save and the
others join it: a process's k-th save of a folder is the main process's k-th save of that folder. When the main process has
written its part, it gives the others a while to join if not all have, then goes on with those that have; who comes later
adds its own files afterwards.

Keys: `of/label/k` (the number of the k-th save of a label). Of save number n: `n/open` (by the main process: what is saved
where), `n/joined` (how many others have joined), `n/gate/r` (whether rank r has joined, or came too late: who sets it first
decides), `n/disk/r` (where rank r writes, on a disk that the main process does not see), `n/shared` (whether the large files are
written by all together), `n/done/r` (rank r has written its files, or failed), `n/go` (all are done, or it is given up),
`n/placed/r` (rank r has put the folder on its disk in place), `n/result`.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from hasten.world.process import World

# Seconds without anybody joining after which the main process goes on: for the first save of a kind, once as many have joined
# as last time, and before that many have. Saves are of one kind if the numbers in their names are all that differs.
PATIENCE, SHORT_PATIENCE, LONG_PATIENCE = 3.0, 0.25, 15.0
_IN, _OUT = "in", "out"
_KEPT = 4  # saves whose keys stay


@dataclass
class Calls:
    """The saves of a world so far, as one process knows them.

    Args:
        number: how often each label was saved.
        latest: the number of the latest save that this process took part in.
        joined: on the main process, how many others took part in the latest save of each kind.
        opened: on the main process, the keys of the saves that are not removed yet, oldest first.
        shares: on the main process, whether others may write parts of its files.
    """

    number: Counter[str] = field(default_factory=Counter)
    latest: int = 0
    joined: dict[str, int] = field(default_factory=dict)
    opened: list[str] = field(default_factory=list)
    shares: bool = True

    def count(self, label: str) -> int:
        """Count a save of a label; the how-manieth it is."""
        self.number[label] += 1
        return self.number[label]


class Meeting:
    """The store of a world, seen by one of its processes, for one save."""

    def __init__(self, world: World) -> None:
        from hasten.world import torch_private

        assert world.group is not None
        world.check_alive()
        self.world = world
        self.number = 0
        self._calls: Calls = world.attached.setdefault("saves", Calls())
        self._wait = world.patience
        # A connection of its own: waiting on the shared one would block everybody else in this process.
        self._store = torch_private.default_store().clone()
        self._prefix = f"hasten/save/{world.group.group_name}"

    # -- the main process --------------------------------------------------------------------------------------------

    def open(self, record: dict[str, Any]) -> None:
        """Begin the next save; `record` says what the others must know."""
        label, count = record["label"], self._calls.count(record["label"])
        self.number = self._add("saves", 1)
        self._kind = _kind_of(label)
        self._set("open", {**record, "count": count})
        self._set(f"of/{label}/{count}", self.number, numbered=False)
        self._calls.opened.append(f"of/{label}/{count}")

    def has_company(self) -> bool:
        """Whether somebody else takes part or can be expected to, and may write parts of the large files."""
        expected, until = self._calls.joined.get(self._kind), time.monotonic() + SHORT_PATIENCE
        while self._calls.shares and not (joined := self._add(f"{self.number}/joined", 0)):
            if expected is not None or time.monotonic() > until:
                return bool(expected)
            time.sleep(0.005)
        return self._calls.shares and bool(joined)

    def write_alone(self) -> None:
        """Share no files from the next save on."""
        self._calls.shares = False

    def announce(self, shared: bool) -> None:
        """Say whether the large files are written by all together. What is said first counts."""
        self._store.compare_set(self._key(f"{self.number}/shared"), "", json.dumps(shared))

    def assemble(self) -> list[int]:
        """Wait for the others as long as that makes sense, and say which ones take part."""
        others = range(1, self.world.size)
        expected = self._calls.joined.get(self._kind)
        joined, since = 0, time.monotonic()
        while (now := self._add(f"{self.number}/joined", 0)) < len(others):
            joined, since = (now, time.monotonic()) if now > joined else (joined, since)
            known = PATIENCE if expected is None else SHORT_PATIENCE if joined >= expected else LONG_PATIENCE
            if time.monotonic() - since > known:
                break
            time.sleep(0.005)
        present = [rank for rank in others if now == len(others) or self._pass_gate(self.number, rank, _OUT)]
        self._calls.joined[self._kind] = len(present)
        return present

    def reports(self, ranks: Sequence[int]) -> dict[int, Any]:
        """What these ranks have reported about their part, waited for."""
        return self._collect("done", ranks, "finish its part of a save")

    def placed(self, ranks: Sequence[int]) -> dict[int, Any]:
        """What became of the folders on other disks, waited for."""
        return self._collect("placed", ranks, "put its files in place")

    def go(self, present: Sequence[int] | None) -> None:
        """Let the folders on other disks take their places, with the files of these ranks; None gives the save up."""
        self._set("go", present)

    def close(self, error: str | None) -> None:
        """Tell everybody how it ended. Keys of old saves are removed."""
        self._set("result", error)
        old = self.number - _KEPT
        if old > 0:
            self._store.delete_key(self._key(self._calls.opened.pop(0)))
            for name in ("open", "joined", "shared", "go", "result"):
                self._store.delete_key(self._key(f"{old}/{name}"))
            for rank in range(1, self.world.size):
                for name in ("gate", "done", "disk", "placed"):
                    self._store.delete_key(self._key(f"{old}/{name}/{rank}"))

    # -- the others --------------------------------------------------------------------------------------------------

    def join(self, label: str) -> tuple[dict[str, Any], bool]:
        """Find the main process's save of this label and join it. Returns its record and whether it is still open."""
        self.number = self._calls.latest = self._find(label, self._calls.count(label))
        record = self._get(f"{self.number}/open")
        in_time = "error" not in record and self._pass_gate(self.number, self.world.rank, _IN)
        if in_time:
            self._add(f"{self.number}/joined", 1)
        return record, in_time

    def is_given_up(self) -> bool:
        """Whether the main process has given the save up already."""
        return bool(self._store.check([self._key(f"{self.number}/go")])) and self.may_go() is None

    def is_shared(self) -> bool:
        """Wait for the main process to say whether the large files are written by all together."""
        self._await(f"{self.number}/shared", "write its part of a save")
        return bool(self._get(f"{self.number}/shared"))

    def announce_disk(self, folder: str) -> None:
        """Say where this machine's processes write, as they do not see the main process's folder."""
        self._set(f"disk/{self.world.rank}", folder)

    def disk_of(self, rank: int) -> str:
        """Where the processes of this machine write, as its first process has announced."""
        self._await(f"{self.number}/disk/{rank}", "open a folder", rank)
        return str(self._get(f"{self.number}/disk/{rank}"))

    def report(self, outcome: Any) -> None:
        """Say that this process's part is done, or why not."""
        self._set(f"done/{self.world.rank}", outcome)

    def may_go(self) -> list[int] | None:
        """Wait until all have reported. The ranks that take part; None if the save is given up."""
        self._await(f"{self.number}/go", "finish a save")
        present: list[int] | None = self._get(f"{self.number}/go")
        return present

    def report_placed(self, error: str | None) -> None:
        """Say that this disk's folder is in its place, or why not."""
        self._set(f"placed/{self.world.rank}", error)

    def result(self) -> str | None:
        """Wait for the end of the save: None, or what went wrong."""
        self._await(f"{self.number}/result", "finish a save")
        error: str | None = self._get(f"{self.number}/result")
        return error

    def _find(self, label: str, count: int) -> int:
        """The number of the main process's save of this label and count, waited for.

        Machines or ranks with disks of their own may name their folders differently: if there is none for a while, one will do
        whose last name differs in its numbers only.
        """
        own, deadline = self._key(f"of/{label}/{count}"), time.monotonic() + self._wait.total_seconds()
        while (left := deadline - time.monotonic()) > 0:
            try:
                self._store.wait([own], timedelta(seconds=min(PATIENCE, left)))
                return int(self._get(f"of/{label}/{count}"))
            except RuntimeError:
                alike = self._named_alike(label, count)
                if alike is not None:
                    return alike
        raise RuntimeError(self._in_vain("begin a save", 0, f"its save number {count} of {label}"))

    def _named_alike(self, label: str, count: int) -> int | None:
        kind = _kind_of(os.path.basename(label))
        for number in range(self._calls.latest + 1, self._add("saves", 0) + 1):
            if not self._store.check([self._key(f"{number}/open")]):
                continue
            record = self._get(f"{number}/open")
            if record["count"] == count and _kind_of(os.path.basename(record["label"])) == kind:
                return number
        return None

    def _pass_gate(self, number: int, rank: int, wish: str) -> bool:
        """Decide whether a rank is in, if that is not decided yet; whether it is."""
        return bool(self._store.compare_set(self._key(f"{number}/gate/{rank}"), "", wish) == _IN.encode())

    # -- the store ---------------------------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _add(self, name: str, amount: int) -> int:
        return int(self._store.add(self._key(name), amount))

    def _set(self, name: str, value: Any, numbered: bool = True) -> None:
        self._store.set(self._key(f"{self.number}/{name}" if numbered else name), json.dumps(value))

    def _get(self, name: str) -> Any:
        return json.loads(self._store.get(self._key(name)))

    def _collect(self, name: str, ranks: Sequence[int], what: str) -> dict[int, Any]:
        found = {}
        for rank in ranks:
            self._await(f"{self.number}/{name}/{rank}", what, rank)
            found[rank] = self._get(f"{self.number}/{name}/{rank}")
        return found

    def _await(self, name: str, what: str, rank: int = 0) -> None:
        try:
            self._store.wait([self._key(name)], self._wait)
        except RuntimeError as error:
            raise RuntimeError(self._in_vain(what, rank, str(error))) from error

    def _in_vain(self, what: str, rank: int, more: str) -> str:
        return (
            f"Rank {self.world.rank} waited {self._wait.total_seconds():g} s for rank {rank} to {what}, in vain. It has died, is "
            "stuck, or does not save this: call `save_state` on every process with the same folder, or on the main process "
            f"alone. ({more})"
        )


def _kind_of(label: str) -> str:
    return re.sub(r"\d+", "#", label)

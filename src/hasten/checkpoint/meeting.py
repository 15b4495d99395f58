"""How the processes of a world take part in one save.

Only the main process must save; the others may. Code written for the reference calls `save_state` on every process, on the main one
alone, or on the first one of each machine, and all must work without waiting for somebody who never comes. So there is no
collective operation here: the processes meet in the store of their process group. The main process opens a save and the
others join it. When the main process has written its part, it gives the others a while to join if not all have, then goes on
with those that have; who comes later adds its own files afterwards.

Keys of save number n: `n/open` (by the main process: what is saved where), `n/joined` (how many others have joined), `n/gate/r`
(whether rank r has joined, or came too late: who sets it first decides), `n/disk/r` (where rank r writes, on a disk that the
main process does not see), `n/done/r` (rank r has written its files, or failed), `n/go` (all are done, or it is given up),
`n/placed/r` (rank r has put the folder on its disk in place), `n/result`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from hasten.world.process import World

# Seconds without anybody joining after which the main process goes on; the short one, once as many have joined as last time.
PATIENCE, SHORT_PATIENCE = 3.0, 0.25
_IN, _OUT = "in", "out"
_KEPT = 4  # saves whose keys stay


class Meeting:
    """The store of a world, seen by one of its processes, for one save."""

    def __init__(self, world: World) -> None:
        from hasten.world import torch_private

        assert world.group is not None
        world.check_alive()
        self.world = world
        self.number = 0
        self._wait = world.timeout or timedelta(minutes=30)
        # A connection of its own: waiting on the shared one would block everybody else in this process.
        self._store = torch_private.default_store().clone()
        self._prefix = f"hasten/save/{world.group.group_name}"

    # -- the main process --------------------------------------------------------------------------------------------

    def open(self, record: dict[str, Any]) -> None:
        """Begin the next save; `record` says what the others must know."""
        self.number = self._add("saves", 1)
        self._set("open", record)

    def assemble(self) -> list[int]:
        """Wait for the others as long as that makes sense, and say which ones take part."""
        others = range(1, self.world.size)
        expected = self._get_if_there("participants", numbered=False)
        joined, since = 0, time.monotonic()
        while (now := self._add(f"{self.number}/joined", 0)) < len(others):
            joined, since = (now, time.monotonic()) if now > joined else (joined, since)
            enough = expected is not None and joined >= expected
            if time.monotonic() - since > (SHORT_PATIENCE if enough else PATIENCE):
                break
            time.sleep(0.005)
        present = [rank for rank in others if now == len(others) or self._pass_gate(self.number, rank, _OUT)]
        self._set("participants", len(present), numbered=False)
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
            for name in ("open", "joined", "go", "result"):
                self._store.delete_key(self._key(f"{old}/{name}"))
            for rank in range(1, self.world.size):
                for name in ("gate", "done", "disk", "placed"):
                    self._store.delete_key(self._key(f"{old}/{name}/{rank}"))

    # -- the others --------------------------------------------------------------------------------------------------

    def join(self, label: str) -> tuple[dict[str, Any], bool]:
        """Find the main process's save of this label and join it. Returns its record and whether it is still open.

        Saves that the main process has made alone are passed over, if it soon begins another one. Otherwise the latest is taken
        for this one: this process is late, or the ranks name their folders differently.
        """
        seen = self._get_if_there(f"seen/{self.world.rank}", numbered=False) or 0
        number = self._add("saves", 0)
        if number <= seen:
            number += 1
            self._await(f"{number}/open", "begin a save")
        while not self._is_meant((record := self._get(f"{number}/open")), number, label):
            later = self._save_after(number)
            if later == 0:
                break
            number = later
        self.number = number
        self._set(f"seen/{self.world.rank}", number, numbered=False)
        in_time = "error" not in record and self._pass_gate(number, self.world.rank, _IN)
        if in_time:
            self._add(f"{number}/joined", 1)
        return record, in_time

    def is_given_up(self) -> bool:
        """Whether the main process has given the save up already."""
        return bool(self._store.check([self._key(f"{self.number}/go")])) and self.may_go() is None

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

    def _is_meant(self, record: dict[str, Any], number: int, label: str) -> bool:
        """Whether a save is surely the one that this process is called for: it has the label, and is open or has failed.

        One that has succeeded without this process may be one that the main process made alone.
        """
        if record["label"] != label:
            return False
        closed = self._store.check([self._key(f"{number}/result")])
        return "error" in record or not closed or self._get(f"{number}/result") is not None

    def _save_after(self, number: int) -> int:
        """The number of a save that begins after this one, soon after its end; 0 if there is none."""
        self._await(f"{number}/result", "finish a save")
        deadline = time.monotonic() + PATIENCE
        while (latest := self._add("saves", 0)) == number:
            if time.monotonic() > deadline:
                return 0
            time.sleep(0.02)
        return latest

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

    def _get_if_there(self, name: str, numbered: bool) -> Any:
        full = f"{self.number}/{name}" if numbered else name
        return self._get(full) if self._store.check([self._key(full)]) else None

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
            limit = f"{self._wait.total_seconds():g} s"
            raise RuntimeError(
                f"Rank {self.world.rank} waited {limit} for rank {rank} to {what}, in vain. It has died, is stuck, or does not "
                f"save at all: call `save_state` on every process, or on the main process alone. ({error})"
            ) from error

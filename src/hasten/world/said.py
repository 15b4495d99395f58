"""What each process of a world says, exchanged through the store of its group.

A collective operation would do the same in less time, but not where some processes have broken off in the middle of another
one: those that wait there would take part in it by mistake.
"""

from __future__ import annotations

from typing import Any

from hasten.world import torch_private
from hasten.world.process import World


class Said:
    """One exchange. Every process of the world makes it, the same number of times.

    Args:
        world: more than one process.
        topic: what it is about; exchanges of different topics do not mix.
    """

    def __init__(self, world: World, topic: str) -> None:
        assert world.group is not None
        world.check_alive()
        counts: dict[str, int] = world.attached.setdefault("said", {})
        counts[topic] = self._number = counts.get(topic, 0) + 1
        self._world = world
        self._topic = f"hasten/said/{world.group.group_name}/{topic}"
        # A connection of its own: waiting on the shared one would block everybody else in this process.
        self._store: Any = torch_private.default_store().clone()

    def say(self, text: str) -> None:
        """Say it, without waiting for the others."""
        self._store.set(self._key(self._world.rank, self._number), text)
        if self._number > 2:  # whoever is here has heard all of the last but one
            self._store.delete_key(self._key(self._world.rank, self._number - 2))

    def heard(self) -> dict[int, str]:
        """What has been said so far, by rank."""
        keys = {rank: self._key(rank, self._number) for rank in range(self._world.size)}
        return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}

    def all(self) -> dict[int, str]:
        """What everyone says, waited for as long as the group's collectives may take.

        Raises:
            TimeoutError: names the ranks that said nothing.
        """
        limit = self._world.patience
        try:
            self._store.wait([self._key(rank, self._number) for rank in range(self._world.size)], limit)
        except RuntimeError as error:  # stores differ in its class
            silent = sorted(set(range(self._world.size)) - set(self.heard()))
            if not silent:
                raise
            raise TimeoutError(
                f"Rank {self._world.rank} waited for ranks {silent} for {limit.total_seconds():.0f} s, its process group's timeout."
            ) from error
        return self.heard()

    def _key(self, rank: int, number: int) -> str:
        return f"{self._topic}/{number}/{rank}"

"""The process context: the only mutable state that belongs to the process and not to an object."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hasten.world.process import World


class Watcher(Protocol):
    """What is told whenever a loop asks a prepared loader for a batch."""

    def watched(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of one pass over `loader`."""

    def close(self) -> None:
        """Watch no more."""


class ActiveLoaders:
    """The prepared loaders that are being iterated, innermost last.

    Weak references: a loader that the user has dropped in the middle of an epoch is collected and leaves the stack.
    """

    def __init__(self) -> None:
        self._stack: list[weakref.ref[Any]] = []
        # Asked for in every step of a training loop: a weak reference, or NoneType, whose call gives None as quickly.
        self.innermost: Callable[[], Any] = type(None)
        self.watcher: Watcher | None = None

    def push(self, loader: Any) -> None:
        """Note that an iteration of `loader` begins."""
        self._become([*self._stack, weakref.ref(loader, self._forget)])

    def remove(self, loader: Any) -> None:
        """Note that the innermost iteration of `loader` is over."""
        for index in reversed(range(len(self._stack))):
            if self._stack[index]() is loader:
                self._become(self._stack[:index] + self._stack[index + 1 :])
                return

    @property
    def current(self) -> Any:
        """The loader of the innermost running loop, or None."""
        return self.innermost()

    def all(self) -> list[Any]:
        """The loaders being iterated, outermost first."""
        return [loader for loader in (reference() for reference in self._stack) if loader is not None]

    def clear(self) -> None:
        """Forget every loader, and who watches them."""
        if self.watcher is not None:
            self.watcher.close()
        self._become([])

    def _forget(self, reference: weakref.ref[Any]) -> None:
        self._become([kept for kept in self._stack if kept is not reference])

    def _become(self, stack: list[weakref.ref[Any]]) -> None:
        self._stack = stack
        self.innermost = stack[-1] if stack else type(None)


class ProcessContext:
    """What one process knows: its default world, its running loaders, and the dictionaries that the state views share."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.loaders = ActiveLoaders()
        self.partial_state: dict[str, Any] = {}
        self.accelerator_state: dict[str, Any] = {}
        self.gradient_state: dict[str, Any] = {}
        self.said: set[str] = set()
        self.savings: weakref.WeakSet[Any] = weakref.WeakSet()  # in the background

    def reset(self) -> None:
        """Forget everything. The process group stays; `hasten.world.process.shutdown()` ends it."""
        self.world = None
        self.loaders.clear()
        for shared in (self.partial_state, self.accelerator_state, self.gradient_state):
            shared.clear()
        self.said.clear()

    def first_time(self, what: str) -> bool:
        """Whether `what` is said for the first time in this process: for notes that are given once."""
        new = what not in self.said
        self.said.add(what)
        return new


CONTEXT = ProcessContext()


def reset() -> None:
    """Forget all of hasten's state in this process, the exported environment variables included."""
    import sys

    CONTEXT.reset()
    export = sys.modules.get("hasten.settings.export")
    if export is not None:
        export.reset()

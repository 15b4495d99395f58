"""What can be counted has no noise: Python calls, ATen operations, host syncs, collectives, bytes of live tensors."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Calls:
    """Calls of Python functions (a generator that goes on counts too) and of built-in ones."""

    python: int
    builtin: int


def count_calls(run: Callable[[], object]) -> Calls:
    """Count the calls that `run` makes in this thread."""
    counts = {"call": 0, "c_call": 0}

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event in counts:
            counts[event] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return Calls(counts["call"], counts["c_call"])


class Operations(TorchDispatchMode):
    """Within this context: `aten`, the operations; `syncs`, reads of a tensor's value by Python; `collectives`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = f"{func.namespace}.{func.__name__}"
        self.names[name] = self.names.get(name, 0) + 1
        return func(*args, **(kwargs or {}))

    def _count(self, wanted: Callable[[str], bool]) -> int:
        return sum(number for name, number in self.names.items() if wanted(name))

    @property
    def aten(self) -> int:
        return self._count(lambda name: name.startswith("aten."))

    @property
    def syncs(self) -> int:
        return self._count(lambda name: name.startswith(("aten._local_scalar_dense", "aten.is_nonzero", "aten.equal")))

    @property
    def collectives(self) -> int:
        return self._count(lambda name: name.startswith(("c10d.", "_c10d_functional.")) and "wait_tensor" not in name)


class LiveBytes(TorchDispatchMode):
    """Within this context: `live`, the bytes of the tensors that operations made and that still exist; `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return

        def forget(reference: object) -> None:
            self._known.pop(key, None)
            self.live -= size

        self._known[key] = weakref.ref(storage, forget)
        self.live += size
        self.peak = max(self.peak, self.live)


def _tensors(result: object) -> Iterable[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for each in result:
            yield from _tensors(each)

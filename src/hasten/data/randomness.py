"""The random generators that an order or a sample may be drawn from: take their states, and put them back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

State = dict[str, Any]

TORCH = ("torch",)
ALL = ("torch", "python", "numpy")


def capture(kinds: Sequence[str], generators: Sequence[torch.Generator] = ()) -> State:
    """The states of this process's generators of the given kinds, and of `generators`, as tensors and plain values."""
    state: State = {kind: _FORM[kind](_RAW[kind]()) for kind in kinds}
    state["generators"] = [generator.get_state() for generator in generators]
    return state


class Glance:
    """The states of this process's generators now, in the form that is quickest to take.

    Args:
        kinds: which ones.
        numpy_before: an earlier glance, if numpy's generator has only drawn numbers since that have no second one in reserve
            (as `numpy.random.normal` has): reading its memory is a hundred times faster than asking for its state.
    """

    def __init__(self, kinds: Sequence[str], numpy_before: Glance | None = None) -> None:
        self._quick = numpy_before is not None and "numpy" in kinds
        self.raw = {kind: _RAW[kind]() for kind in kinds if kind != "numpy" or not self._quick}
        self._memory = _numpy_memory() if self._quick else None
        if numpy_before is not None and self._quick:
            self.raw["numpy"] = numpy_before.raw["numpy"]

    def changed(self) -> list[str]:
        """The kinds that something has been drawn from since."""
        full = [kind for kind in self.raw if kind != "numpy" or not self._quick]
        found = [kind for kind in full if not _is_raw_same(self.raw[kind], _RAW[kind]())]
        if self._memory is None or self._memory == _numpy_memory():
            return found
        self.raw["numpy"] = _with_memory(self.raw["numpy"], self._memory)
        return [*found, "numpy"]

    def state(self, kinds: Sequence[str]) -> State:
        """What `capture` would have taken then."""
        return {kind: _FORM[kind](self.raw[kind]) for kind in kinds}


def _is_raw_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):  # numpy's; one that somebody has put in another kind for is left alone
        return one["bit_generator"] != "MT19937" or _same(_numpy(one), _numpy(other))
    # The place in Python's words first: it changes with almost every draw.
    return bool(one[1][-1] == other[1][-1] and one == other)


_NUMPY_WORDS = 624
_NUMPY_BYTES = 4 * (_NUMPY_WORDS + 1)  # the words and the place in them, as a C structure


def _numpy_memory() -> bytes:
    import ctypes

    import numpy

    generator: Any = numpy.random.mtrand.get_bit_generator()
    if not isinstance(generator, numpy.random.MT19937):
        return b""  # somebody has put in another kind, which is left alone
    return ctypes.string_at(generator.ctypes.state_address, _NUMPY_BYTES)


def _with_memory(state: Any, memory: bytes) -> Any:
    import numpy

    words = numpy.frombuffer(memory, dtype=numpy.uint32)
    inner = {"key": words[:_NUMPY_WORDS].copy(), "pos": int(words[_NUMPY_WORDS])}
    return {**state, "state": inner}


def restore(state: State, generators: Sequence[torch.Generator] = ()) -> None:
    """Put the states back that `capture` took."""
    for kind, value in state.items():
        if kind != "generators":
            _RESTORE[kind](value)
    for generator, value in zip(generators, state.get("generators", ()), strict=False):
        generator.set_state(value)


@contextmanager
def rewound(state: State, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Draw from an earlier state inside, and leave the generators as they were before."""
    kinds = [kind for kind in state if kind != "generators"]
    before = capture(kinds, generators)
    restore(state, generators)
    try:
        yield
    finally:
        restore(before, generators)


def differs(one: State, other: State) -> bool:
    """Whether something was drawn between two states."""
    return any(not _same(one[kind], other[kind]) for kind in one)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return all(map(_same, one, other))
    return bool(one == other)


def _python(raw: Any) -> list[Any]:
    version, words, gauss = raw
    return [version, torch.tensor(words), gauss]


def _set_python(state: list[Any]) -> None:
    version, words, gauss = state
    random.setstate((version, tuple(words.tolist()), gauss))


def _raw_numpy() -> Any:
    import numpy

    return numpy.random.get_state(legacy=False)


def _numpy(state: Any) -> list[Any]:
    words, position = state["state"]["key"], state["state"]["pos"]
    return [torch.from_numpy(words.astype("int64")), int(position), int(state["has_gauss"]), float(state["gauss"])]


def _set_numpy(state: list[Any]) -> None:
    import numpy

    words, *rest = state
    numpy.random.set_state(("MT19937", words.numpy().astype("uint32"), *rest))


_RAW: dict[str, Callable[[], Any]] = {"torch": torch.get_rng_state, "python": random.getstate, "numpy": _raw_numpy}
_FORM: dict[str, Callable[[Any], Any]] = {"torch": lambda raw: raw, "python": _python, "numpy": _numpy}
_RESTORE: dict[str, Callable[[Any], None]] = {"torch": torch.set_rng_state, "python": _set_python, "numpy": _set_numpy}

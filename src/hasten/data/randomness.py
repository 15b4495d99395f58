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
    state: State = {kind: _CAPTURE[kind]() for kind in kinds}
    state["generators"] = [generator.get_state() for generator in generators]
    return state


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


def _python() -> list[Any]:
    version, words, gauss = random.getstate()
    return [version, torch.tensor(words), gauss]


def _set_python(state: list[Any]) -> None:
    version, words, gauss = state
    random.setstate((version, tuple(words.tolist()), gauss))


def _numpy() -> list[Any]:
    import numpy

    state: Any = numpy.random.get_state(legacy=False)
    words, position = state["state"]["key"], state["state"]["pos"]
    return [torch.from_numpy(words.astype("int64")), int(position), int(state["has_gauss"]), float(state["gauss"])]


def _set_numpy(state: list[Any]) -> None:
    import numpy

    words, *rest = state
    numpy.random.set_state(("MT19937", words.numpy().astype("uint32"), *rest))


_CAPTURE: dict[str, Callable[[], Any]] = {"torch": torch.get_rng_state, "python": _python, "numpy": _numpy}
_RESTORE: dict[str, Callable[[Any], None]] = {"torch": torch.set_rng_state, "python": _set_python, "numpy": _set_numpy}

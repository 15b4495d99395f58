"""What a stream of Hugging Face datasets is made of: how far its own `state_dict` and `shard` can be relied on."""

from __future__ import annotations

from typing import Any

_SHUFFLE_BUFFER = "BufferShuffledExamplesIterable"
_COUNTING = {"TakeExamplesIterable", "SkipExamplesIterable"}


def loses_samples(dataset: Any) -> bool:
    """Whether a stream that is put back in its place goes on without the samples that waited in a shuffle buffer."""
    return _SHUFFLE_BUFFER in _steps(dataset)


def counts_in_parts(dataset: Any) -> bool:
    """Whether parts of a stream have other samples than the whole: `take` and `skip` then count in each part."""
    return not _COUNTING.isdisjoint(_steps(dataset))


def forget_place(dataset: Any) -> None:
    """Let a stream that was put in a place, and has begun there, begin at its start again: it would go there in every pass of
    the same epoch.
    """
    if getattr(dataset, "_starting_state_dict", None) is not None:
        dataset._starting_state_dict = None


def _steps(dataset: Any) -> set[str]:
    """The classes of the steps, from the sources to what is done last, by name; of other datasets none."""
    found: set[str] = set()
    rest = [getattr(dataset, "_ex_iterable", None)]
    while rest:
        step = rest.pop()
        if step is not None:
            found.add(type(step).__name__)
            rest += [getattr(step, "ex_iterable", None), *(getattr(step, "ex_iterables", None) or ())]
    return found

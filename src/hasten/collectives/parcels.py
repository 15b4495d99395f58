"""Parcels: tensors too large for a frame, and how they are divided over collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hasten.collectives.layout import Layout

ALONE_BYTES = 1 << 20  # a tensor of this size travels by itself: packing and cutting would copy it twice for nothing


class Parcels:
    """Which of some tensors travel alone, and the layout of the others, which travel together.

    Args:
        names: the path of each tensor.
        tensors: examples; their dtypes and shapes count.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        large = [tensor.numel() * tensor.element_size() >= ALONE_BYTES for tensor in tensors]
        # By name, so that processes with dictionaries in another order send the same tensor at the same time.
        self.alone = tuple(sorted((index for index, big in enumerate(large) if big), key=lambda index: names[index]))
        self.together = tuple(index for index, big in enumerate(large) if not big)
        self.layout = Layout([names[index] for index in self.together], [tensors[index] for index in self.together])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as a flat view of its bytes."""
    return tensor.view(-1).view(torch.uint8)

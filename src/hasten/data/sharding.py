"""Whether a loader must be shared out over the ranks, or is each rank's own part already."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from hasten.data.samplers import get_sampler
from hasten.settings.dataloading import SHARDINGS

SHARD, ALREADY, REPLICATE = "shard", "already", "replicate"


def choose_sharding(dataloader: DataLoader[Any], wanted: str, parts: int) -> str:
    """One of "shard", "already" and "replicate".

    "auto" looks for the attribute `sharding` of the loader or of its dataset, with one of these values; for a
    `DistributedSampler`; and for a dataset that `datasets.distributed.split_dataset_by_node` has split.

    Args:
        dataloader: the user's loader.
        wanted: "auto", or the choice itself.
        parts: how many different parts of the data the ranks need.

    Raises:
        ValueError: an unknown choice, or the loader is divided into another number of parts.
    """
    if wanted == "auto":
        marks = [getattr(item, "sharding", None) for item in (dataloader, dataloader.dataset)]
        wanted = next((mark for mark in marks if isinstance(mark, str) and mark in SHARDINGS), wanted)
    if wanted not in SHARDINGS:
        raise ValueError(f"sharding={wanted!r}: it must be one of {', '.join(map(repr, SHARDINGS))}.")
    if wanted != "auto":
        return wanted
    divided = _divided(dataloader)
    if divided is None:
        return SHARD
    by, number = divided
    if number != parts:
        raise ValueError(
            f"The loader is divided into {number} parts by {by}, but the ranks need {parts} different parts. Divide it into "
            f"{parts}, or leave it whole and let `prepare` share it out. If it is meant to be so, say what it is with "
            "`DataLoaderConfiguration(sharding='already')` (this rank's own part) or `sharding='shard'` (share it out again)."
        )
    return ALREADY


def _divided(dataloader: DataLoader[Any]) -> tuple[str, int] | None:
    """What has divided a loader already, and into how many parts."""
    sampler = get_sampler(dataloader)
    if isinstance(sampler, DistributedSampler):
        return "its DistributedSampler", sampler.num_replicas
    node = getattr(dataloader.dataset, "_distributed", None)  # the mark of split_dataset_by_node on a stream
    number = getattr(node, "world_size", None)
    return None if number is None else ("split_dataset_by_node", int(number))

"""Preparing a loader: each rank gets its part of the data, by index or by stream, or is sent it by the rank that reads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from hasten.data.resume import Progress
from hasten.data.samplers import SeedableRandomSampler, get_sampler, innermost
from hasten.data.shard import BatchSamplerShard, IterableDatasetShard, SamplerShard, check_divisible, data_part
from hasten.data.sharded import DataLoaderShard
from hasten.data.sharding import SHARD, choose_sharding
from hasten.world.process import World, current


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    *,
    world: World | None = None,
    sharding: str = "auto",
    resume: str = "order",
    read_ahead: bool = False,
    move_ahead: bool = False,
) -> DataLoader[Any]:
    """Make a loader that gives each rank its part of the batches of `dataloader`.

    The result is an instance of the loader's own class and keeps all its settings. The batch size of `dataloader` is that of
    one rank, or with `split_batches` that of all ranks together.

    Args:
        dataloader: any torch DataLoader; it stays as it is, except that a shuffling sampler without a generator gets one when
            there are several ranks.
        device: where batches go with `put_on_device`; by default the world's device.
        num_processes, process_index: the number of ranks and this one's index; by default those of the world.
        split_batches: cut each batch into one part per rank.
        put_on_device: move the batches.
        rng_types: generators that get rank 0's state at the start of each pass; "generator" is the sampler's.
        dispatch_batches: rank 0 reads everything and sends the others their batches. By default for iterable datasets whose
            batches are moved.
        even_batches: repeat samples from the start so that all ranks have the same number of full batches.
        slice_fn_for_dispatch: with `dispatch_batches`, cuts a rank's part out of the batches that were read: called with
            `(data, slice, process_index=..., num_processes=...)`.
        use_seedable_sampler: shuffle by a `SeedableRandomSampler`, equal on all ranks without communication.
        data_seed: its seed; by default torch's.
        non_blocking: move batches without waiting.
        use_stateful_dataloader: after `load_state_dict`, continue at the saved position without `skip_first_batches`.
        torch_device_mesh: a mesh; ranks that differ only in axes of one model (tp, cp, sp, pp, ep) get the same batches.
        world: the processes that share the data; by default all.
        sharding, resume: see `DataLoaderConfiguration`.
        read_ahead: with `dispatch_batches`, rank 0 reads the next step in a thread while the loop's body runs; see
            `DataLoaderDispatcher`. Loaders that each rank reads itself are not touched; `num_workers` reads ahead for them.
        move_ahead: with `put_on_device`, copy the next batch on a stream of its own while the loop's body runs; see
            `DataLoaderConfiguration`.

    Raises:
        ValueError: the settings contradict each other or the loader; the message says how to change them.
    """
    if not isinstance(dataloader, DataLoader):
        raise ValueError(f"A torch DataLoader is needed, this is a {type(dataloader).__name__}.")
    world = current() if world is None else world
    ranks = world.size if num_processes is None else num_processes
    rank = world.rank if process_index is None else process_index
    if not 0 <= rank < ranks:
        raise ValueError(f"process_index={rank}: with num_processes={ranks} it must be one of 0 to {ranks - 1}.")
    part, parts = data_part(rank, ranks, torch_device_mesh)
    how = choose_sharding(dataloader, sharding, parts) if parts > 1 else SHARD
    if split_batches and how == SHARD:
        check_divisible(_batch_size(dataloader), parts, "a `DataLoader`")
    replaced = _seedable(dataloader, data_seed) if use_seedable_sampler else {}
    fields: dict[str, Any] = {
        "device": (device or world.device) if put_on_device else None,
        "by_position": use_stateful_dataloader or resume == "position",
        "sharding": how,
        "progress": Progress(),
        "_drop_last": _drops_last(dataloader),
        "_non_blocking": non_blocking,
        "move_ahead": move_ahead,
        "world": world,
    }
    if _dispatches(dataloader, dispatch_batches, put_on_device, how):
        from hasten.data.dispatch import DataLoaderDispatcher

        fields |= {"split_batches": split_batches, "slice_fn": slice_fn_for_dispatch, "parts": parts}
        fields["read_ahead"] = read_ahead
        # The workers' seed is drawn from the process's generator, because every rank draws one at each pass.
        return DataLoaderDispatcher.adopt(dataloader, {**replaced, "generator": None}, **fields)
    had_generator = getattr(get_sampler(dataloader), "generator", None) is not None
    generator = _synchronized_generator(dataloader, replaced) if ranks > 1 else None
    if rng_types is not None:
        fields["rng_types"] = [kind for kind in rng_types if generator is not None or not _is_generator(kind)]
        fields["synchronized_generator"] = generator
    fields["owns_generator"] = not had_generator and generator is not None and not _is_stream(dataloader)
    if parts > 1 and how == SHARD:
        share = _stream_part if _is_stream(dataloader) else _index_part
        replaced |= share(dataloader, replaced, part, parts, split_batches, even_batches)
    return DataLoaderShard.adopt(dataloader, replaced, **fields)


def _dispatches(dataloader: DataLoader[Any], wanted: bool | None, put_on_device: bool, how: str) -> bool:
    """Whether rank 0 reads for all."""
    if how != SHARD:
        if wanted:
            raise ValueError(
                f"`dispatch_batches=True` and sharding={how!r}: rank 0 would read for all what each rank has already. Leave one of "
                "the two out (a DistributedSampler counts as sharding='already')."
            )
        return False
    if wanted and not put_on_device:
        raise ValueError(
            "Using `dispatch_batches=True` requires `put_on_device=True`: the batches that are sent arrive on the device. Leave "
            "the loader's device placement on, or set `dispatch_batches=False`."
        )
    return put_on_device and _is_stream(dataloader) if wanted is None else wanted


def _is_stream(dataloader: DataLoader[Any]) -> bool:
    return isinstance(dataloader.dataset, IterableDataset)


def _is_generator(kind: Any) -> bool:
    return str(getattr(kind, "value", kind)) == "generator"


def _batches(dataloader: DataLoader[Any]) -> Any:
    """The batch sampler, also where it is given as the sampler of a loader that does not batch by itself."""
    return dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler


def _batch_size(dataloader: DataLoader[Any]) -> int | None:
    return getattr(_batches(dataloader), "batch_size", dataloader.batch_size)


def _drops_last(dataloader: DataLoader[Any]) -> bool:
    return dataloader.drop_last or getattr(innermost(_batches(dataloader)), "drop_last", False)


def _seedable(dataloader: DataLoader[Any], data_seed: int | None) -> dict[str, Any]:
    """What of a loader is replaced so that torch's random sampler becomes a seedable one."""
    sampler = get_sampler(dataloader)
    if type(sampler) is not RandomSampler:
        return {}
    number = None if sampler.num_samples == len(sampler.data_source) else sampler.num_samples
    seedable = SeedableRandomSampler(
        sampler.data_source, sampler.replacement, number, sampler.generator, data_seed=data_seed
    )
    batches = _batches(dataloader)
    if batches is sampler:
        return {"sampler": seedable}
    inner = innermost(batches)
    if inner is batches:
        batches = inner = copy.copy(inner)
    inner.sampler = seedable
    if dataloader.batch_sampler is None:
        return {"sampler": batches}
    return {"batch_sampler": batches} | ({"sampler": seedable} if dataloader.sampler is sampler else {})


def _synchronized_generator(dataloader: DataLoader[Any], replaced: dict[str, Any]) -> torch.Generator | None:
    """The generator that must be equal on all ranks; a sampler that would draw a private seed on each gets one here."""
    if isinstance(dataloader.dataset, IterableDataset):
        own = getattr(dataloader.dataset, "generator", None)
        return own if isinstance(own, torch.Generator) else None
    sampler: Any = None if replaced else get_sampler(dataloader)
    if not hasattr(sampler, "generator"):
        return None
    if sampler.generator is None:
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    return sampler.generator


def _index_part(
    dataloader: DataLoader[Any], replaced: dict[str, Any], part: int, parts: int, split: bool, even: bool
) -> dict[str, Any]:
    """What of a loader is replaced so that it reads its part of a map-style dataset."""
    batches = replaced.get("batch_sampler", dataloader.batch_sampler)
    if batches is not None:
        return {"batch_sampler": BatchSamplerShard(batches, parts, part, split, even)}
    sampler = replaced.get("sampler", dataloader.sampler)
    if isinstance(innermost(sampler), BatchSampler):
        return {"sampler": BatchSamplerShard(sampler, parts, part, split, even)}
    return {"sampler": SamplerShard(sampler, parts, part, even)}


def _sources(dataset: Any) -> int:
    """Of how many sources a stream says that it is made, by the older or the newer name of Hugging Face datasets."""
    numbers = [getattr(dataset, name, None) for name in ("n_shards", "num_shards")]
    return next((number for number in numbers if isinstance(number, int)), 0)


def _stream_part(
    dataloader: DataLoader[Any], replaced: dict[str, Any], part: int, parts: int, split: bool, even: bool
) -> dict[str, Any]:
    """What of a loader is replaced so that it reads its part of an iterable dataset."""
    dataset: Any = dataloader.dataset
    size = dataloader.batch_size
    if not split and hasattr(dataset, "shard") and _sources(dataset) >= parts:  # it reads its sources only
        return {"dataset": dataset.shard(num_shards=parts, index=part)}
    shard = IterableDatasetShard(dataset, size or 1, dataloader.drop_last, parts, part, split)
    if dataloader.num_workers:
        shard.share(dataloader.num_workers)
    if not split or size is None:
        return {"dataset": shard}
    own = size // parts
    return {
        "dataset": shard,
        "batch_size": own,
        "batch_sampler": BatchSampler(dataloader.sampler, own, dataloader.drop_last),
    }

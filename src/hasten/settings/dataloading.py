"""What the user sets about data loaders."""

from __future__ import annotations

from dataclasses import dataclass, field

SHARDINGS = ("auto", "shard", "already", "replicate")
RESUMES = ("order", "position")

_SWITCHES = (
    "split_batches",
    "dispatch_batches",
    "even_batches",
    "use_seedable_sampler",
    "non_blocking",
    "use_stateful_dataloader",
    "read_ahead",
    "move_ahead",
)


@dataclass
class DataLoaderConfiguration:
    """How a prepared loader divides its data over the ranks.

    Args:
        split_batches: the loader's batch size is that of all ranks together, and each rank takes its part of each batch.
            By default the loader's batch size is that of one rank.
        dispatch_batches: one rank reads and sends the others their batches. None: only for iterable datasets.
        even_batches: repeat samples from the start so that every rank has the same number of full batches.
        use_seedable_sampler: shuffle by a sampler seeded with (seed + epoch), equal on all ranks without communication.
        data_seed: seed of that sampler; None draws one from torch's generator.
        non_blocking: copy batches to the device without waiting (useful with pinned memory).
        use_stateful_dataloader: as `resume="position"`; the name is accelerate's, and torchdata is not needed.
        sharding: "shard" shares the data out over the ranks; "already" takes a loader as this rank's own part; "replicate" gives
            every rank all of it, and `gather_for_metrics` counts it once. "auto" is "already" for a loader with a
            `DistributedSampler` or a dataset split by `split_dataset_by_node`, what the attribute `sharding` of the loader or
            its dataset says, and else "shard".
        resume: what `load_state` restores of a loader. "order": its seed and epoch, so that `skip_first_batches(loader, n)`
            continues exactly; "position": the place in the epoch, too, and the next pass continues there by itself.
        read_ahead: with `dispatch_batches`, read the next step in a thread while the loop's body runs.
        move_ahead: copy the next batch to the device on a stream of its own, while the device works on the batch in the loop's
            body. Worth most with `pin_memory=True` in the loader. Devices without streams, and the CPU, move as without it, and
            so do batches that hold objects with nothing but a `.to` of their own.

    Raises:
        ValueError: a setting is not one of its values.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    sharding: str = field(default="auto", kw_only=True)
    resume: str = field(default="order", kw_only=True)
    read_ahead: bool = field(default=False, kw_only=True)
    move_ahead: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for name, allowed in (("sharding", SHARDINGS), ("resume", RESUMES)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"DataLoaderConfiguration({name}={getattr(self, name)!r}): it must be one of "
                    f"{', '.join(map(repr, allowed))}."
                )
        for name in _SWITCHES:
            given = getattr(self, name)
            # What is true to Python, as a word that says no, must not switch something on.
            if not (isinstance(given, (bool, int)) or (given is None and name == "dispatch_batches")):
                raise ValueError(f"DataLoaderConfiguration({name}={given!r}): it must be True or False.")
        if self.read_ahead and self.dispatch_batches is False:
            raise ValueError(
                "DataLoaderConfiguration(read_ahead=True, dispatch_batches=False): reading ahead is for loaders that one process "
                "reads for all. Leave one of the two out; `DataLoader(num_workers=...)` reads ahead for the others."
            )
        if self.data_seed is not None and not hasattr(self.data_seed, "__index__"):
            raise ValueError(
                f"DataLoaderConfiguration(data_seed={self.data_seed!r}): it must be a whole number, or None."
            )

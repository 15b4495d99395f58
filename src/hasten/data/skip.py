"""Beginning an epoch in its middle: loaders without their first batches."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from hasten.data.skippable import SkippableLoader


class SkipDataLoader(SkippableLoader):
    """A DataLoader that leaves out the first batches of its first pass; it is no prepared loader.

    Args:
        dataset: the dataset.
        skip_batches: how many batches to leave out.
        use_stateful_dataloader: must be False: only prepared loaders have a position.
        kwargs: those of `torch.utils.data.DataLoader`.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        if use_stateful_dataloader:
            raise ValueError("A SkipDataLoader keeps no state. Prepare a loader with `use_stateful_dataloader=True`.")
        super().__init__(dataset, skip_batches, **kwargs)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """A loader like `dataloader` that leaves out the first batches of its first pass; later passes are whole.

    Batches of map-style datasets are skipped by index, in the same time however many they are, and never loaded; those of
    iterable datasets are read and dropped. All settings are kept. A prepared loader and the result count their epochs together:
    after `accelerator.load_state`, a pass over the result continues the interrupted epoch, and a pass over `dataloader` is the
    next one.

    Args:
        dataloader: a prepared loader or a plain one.
        num_batches: how many batches to leave out, of this rank.

    Raises:
        ValueError: `num_batches` is negative, or `dataloader` is not a torch DataLoader.
    """
    if num_batches < 0:
        raise ValueError(f"num_batches={num_batches}: the number of batches to skip can not be negative.")
    if isinstance(dataloader, SkippableLoader):
        return dataloader.copy(skip_batches=dataloader.skip_batches + num_batches)
    if not isinstance(dataloader, DataLoader):
        raise ValueError(f"Only batches of a torch DataLoader can be skipped, this is a {type(dataloader).__name__}.")
    return SkipDataLoader.adopt(dataloader, {}, skip_batches=num_batches)

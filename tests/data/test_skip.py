from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hasten.data.loader import prepare_data_loader
from hasten.data.skip import SkipDataLoader, skip_first_batches
from hasten.world.process import start
from tests.data.scenarios import Batches, Numbers, Stream
from tests.ranks import run_ranks


def lists(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


def test_a_plain_loader():
    loader = DataLoader(Numbers(5), batch_size=2)
    rest = skip_first_batches(loader, 1)
    assert [lists(rest), lists(rest)] == [[[2, 3], [4]], [[0, 1], [2, 3], [4]]]
    assert isinstance(rest, SkipDataLoader)
    assert lists(skip_first_batches(DataLoader(Stream(5), batch_size=2), 2)) == [[4]]
    assert list(skip_first_batches(DataLoader(Numbers(3), batch_size=None), 2)) == [2]


def test_skips_add_up():
    rest = skip_first_batches(skip_first_batches(prepare_data_loader(DataLoader(Numbers(5))), 2), 1)
    assert len(rest) == 2
    assert lists(rest) == [[3], [4]]


def test_a_loader_that_skips_can_be_prepared():
    loader = prepare_data_loader(skip_first_batches(DataLoader(Numbers(6)), 1), num_processes=2, process_index=1)
    assert lists(loader) == [[3], [5]]
    assert lists(loader) == [[1], [3], [5]]


def test_every_setting_is_kept():
    def cut(data: Any, rows: slice, process_index: int = 0, num_processes: int = 1) -> Any:
        return data[rows]

    loader: Any = prepare_data_loader(
        DataLoader(Numbers(10), batch_size=4, drop_last=True),
        torch.device("cpu"),
        put_on_device=True,
        dispatch_batches=True,
        split_batches=True,
        slice_fn_for_dispatch=cut,
        non_blocking=True,
        use_stateful_dataloader=True,
        rng_types=["torch"],
    )
    loader.set_epoch(3)
    rest: Any = skip_first_batches(loader, 1)
    same = [
        "iteration",
        "device",
        "_drop_last",
        "_non_blocking",
        "slice_fn",
        "split_batches",
        "by_position",
        "rng_types",
    ]
    for name in [*same, "batch_size", "drop_last", "total_batch_size", "batch_sampler", "parts", "progress"]:
        assert getattr(rest, name) == getattr(loader, name), name
    assert type(rest) is type(loader)
    assert rest.remainder == -1


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_end_is_that_of_the_whole_pass(drop_last: bool):
    loader: Any = prepare_data_loader(
        DataLoader(Numbers(10), batch_size=4, drop_last=drop_last), num_processes=2, process_index=0
    )
    rest: Any = skip_first_batches(loader, 1)
    for _ in rest:
        assert rest.end_of_dataloader
    for _ in loader:
        pass
    assert rest.remainder == loader.remainder == (-1 if drop_last else 2)


def test_epochs_are_counted_together():
    loader: Any = prepare_data_loader(DataLoader(Numbers(8), shuffle=True), use_seedable_sampler=True, data_seed=1)
    rest: Any = skip_first_batches(loader, 3)
    orders = [lists(rest), lists(loader), lists(rest)]
    assert (loader.iteration, rest.iteration) == (3, 3)
    whole = [
        [[index] for index in torch.randperm(8, generator=torch.Generator().manual_seed(1 + epoch)).tolist()]
        for epoch in range(3)
    ]
    assert orders == [whole[0][3:], whole[1], whole[2]]


def test_steps_of_a_dispatched_loader_are_skipped_and_not_batches():
    assert run_ranks(dispatched_rest, 2) == [[[4, 5], [8]], [[6, 7], [9]]]


def dispatched_rest() -> list[Any]:
    start(cpu=True)
    loader = DataLoader(Numbers(10), batch_size=2)
    shared = prepare_data_loader(loader, put_on_device=True, dispatch_batches=True)
    rest = skip_first_batches(shared, 1)
    assert len(rest) == 2
    return lists(rest)


def test_batches_of_any_size():
    loader = prepare_data_loader(
        DataLoader(Numbers(6), batch_sampler=Batches([[0], [1, 2], [3], [4, 5]])), num_processes=2, process_index=1
    )
    assert lists(skip_first_batches(loader, 1)) == [[4, 5]]


def test_bad_input():
    with pytest.raises(ValueError, match="-1"):
        skip_first_batches(DataLoader(Numbers()), -1)
    with pytest.raises(ValueError, match="this is a list"):
        skip_first_batches([1, 2], 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keeps no state"):
        SkipDataLoader(Numbers(), use_stateful_dataloader=True)


def test_a_skipping_loader_built_by_hand():
    loader = SkipDataLoader(Numbers(5), skip_batches=1, batch_size=2)
    assert len(loader) == 2
    assert lists(loader) == [[2, 3], [4]]

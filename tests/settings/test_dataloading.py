from dataclasses import astuple

import pytest

from hasten.settings.dataloading import DataLoaderConfiguration


def test_defaults_and_order_are_those_of_the_reference():
    theirs, ours = (False, None, True, False, None, False, False), ("auto", "order", False, False)
    assert astuple(DataLoaderConfiguration()) == (*theirs, *ours)
    config = DataLoaderConfiguration(True, False, False, True, 5, True, True)
    assert config == DataLoaderConfiguration(
        split_batches=True, dispatch_batches=False, even_batches=False, use_seedable_sampler=True, data_seed=5,
        non_blocking=True, use_stateful_dataloader=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "allowed"), [("sharding", "'auto', 'shard', 'already', 'replicate'"), ("resume", "'order', 'position'")]
)
def test_unknown_values_are_refused(name, allowed):
    with pytest.raises(ValueError, match=rf"DataLoaderConfiguration\({name}='no'\): it must be one of {allowed}\."):
        DataLoaderConfiguration(**{name: "no"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("even_batches", "no"),
        ("split_batches", None),
        ("dispatch_batches", "auto"),
        ("move_ahead", "yes"),
        ("data_seed", "x"),
    ],
)
def test_what_is_no_switch_or_number_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"DataLoaderConfiguration\({name}={value!r}\): it must be"):
        DataLoaderConfiguration(**{name: value})
    DataLoaderConfiguration(dispatch_batches=None, even_batches=0, data_seed=3)  # type: ignore[arg-type]


def test_reading_ahead_needs_a_loader_that_one_process_reads():
    with pytest.raises(ValueError, match="reading ahead is for loaders that one process reads"):
        DataLoaderConfiguration(read_ahead=True, dispatch_batches=False)
    for dispatch in (None, True):
        assert DataLoaderConfiguration(read_ahead=True, dispatch_batches=dispatch).read_ahead


def test_what_the_reference_does_not_have_is_given_by_name():
    with pytest.raises(TypeError):
        DataLoaderConfiguration(False, None, True, False, None, False, False, "shard")  # type: ignore[misc]

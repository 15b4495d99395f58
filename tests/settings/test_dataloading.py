from dataclasses import astuple

from hasten.settings.dataloading import DataLoaderConfiguration


def test_defaults_and_order_are_those_of_the_reference():
    assert astuple(DataLoaderConfiguration()) == (False, None, True, False, None, False, False)
    config = DataLoaderConfiguration(True, False, False, True, 5, True, True)
    assert config == DataLoaderConfiguration(
        split_batches=True, dispatch_batches=False, even_batches=False, use_seedable_sampler=True, data_seed=5,
        non_blocking=True, use_stateful_dataloader=True,
    )  # fmt: skip

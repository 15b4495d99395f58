from typing import Any

import numpy
import pytest

from hasten.settings.accumulation import GradientAccumulationPlugin


def test_only_what_is_not_the_default_is_forwarded():
    assert GradientAccumulationPlugin().to_kwargs() == {}
    assert GradientAccumulationPlugin(2, True, False, True).to_kwargs() == {
        "num_steps": 2,
        "sync_with_dataloader": False,
        "sync_each_batch": True,
    }
    assert GradientAccumulationPlugin(num_steps=numpy.int64(2)).to_kwargs() == {"num_steps": 2}  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [0, -1, True, 1.5, 2.0, "2", [2]])
def test_the_number_of_steps_is_a_whole_number_from_one(steps: Any):
    with pytest.raises(ValueError, match=r"num_steps=.*must be a whole number of at least 1"):
        GradientAccumulationPlugin(num_steps=steps)


def test_what_is_not_built_is_refused():
    with pytest.raises(ValueError, match=r"adjust_scheduler=False\): only True is legal"):
        GradientAccumulationPlugin(adjust_scheduler=False)

from typing import Any

import pytest
import torch

from hasten.collectives.gather import gather
from hasten.collectives.verify import TORCH_DISTRIBUTED_OPERATION_TYPES, chained_operation, verify_operation
from hasten.settings.enums import DistributedType
from hasten.world.agreement import DistributedOperationException
from tests.collectives.data import Counted, message, start
from tests.ranks import run_ranks


@verify_operation
def own(tensor: Any, more: int = 0) -> Any:
    """An operation."""
    return tensor, more


@chained_operation
def outer(tensor: Any) -> Any:
    """Another operation."""
    return gather(tensor)


def test_alone_the_function_is_called_as_it_is():
    assert (own.__name__, own.__doc__) == ("own", "An operation.")
    assert own(1, more=2) == (1, 2)
    assert own(tensor="text") == ("text", 0)
    assert outer.__name__ == "outer"
    assert outer("text") == "text"


def test_labels_of_worlds_with_others_in_them():
    assert len(TORCH_DISTRIBUTED_OPERATION_TYPES) == 13
    assert "NO" not in TORCH_DISTRIBUTED_OPERATION_TYPES
    assert DistributedType.MULTI_CPU.value in TORCH_DISTRIBUTED_OPERATION_TYPES


def verify() -> list[Any]:
    rank = start().rank
    with Counted() as counted:
        result = own({"x": torch.ones(2 + rank), "y": "text" * rank}, 3)[1]
    return [counted.calls, result]


def test_nothing_is_checked_outside_of_debug_mode():
    assert run_ranks(verify, 2) == [[[], 3]] * 2


def verify_in_debug_mode() -> list[Any]:
    rank = start().rank
    with Counted() as counted:
        assert own({"x": torch.ones(2), "y": "text" * rank}, 3)[1] == 3
        assert own(tensor=[torch.ones(2)])[1] == 0
    found = [message(lambda: own({"x": torch.ones(2 + rank), "y": "text"})), message(lambda: own([torch.ones(rank)]))]
    try:
        own(torch.ones(2)) if rank == 0 else gather(torch.ones(2))
    except DistributedOperationException as error:
        found.append(str(error))
    return [len(counted.calls), *found]


def test_debug_mode_compares_shapes_before_the_function_runs():
    first, second = run_ranks(verify_in_debug_mode, 2, env={"ACCELERATE_DEBUG_MODE": "1"})
    assert first == second
    assert first[0] == 2
    assert first[1].startswith(f"`{__name__}.own` needs the same structure, dtypes and shapes on all 2 processes")
    assert "\n  ['x']: float32 [2] on rank 0; float32 [3] on rank 1\n  called at test_verify.py:" in first[1]
    assert "[0]: float32 [0] on rank 0; float32 [1] on rank 1" in first[2]
    assert f"rank 0: {__name__}.own() at test_verify.py:" in first[3]
    assert "rank 1: gather() at test_verify.py:" in first[3]


def chain() -> list[str]:
    rank = start().rank
    with pytest.raises(DistributedOperationException) as caught:
        outer(torch.ones(1 + rank))
    assert outer(torch.ones(1)).tolist() == [1, 1]
    return [str(caught.value), str(caught.value.__cause__)]


def test_a_chained_operation_names_itself():
    (text, cause), other = run_ranks(chain, 2)
    assert other == [text, cause]
    assert text == f"Error found while calling `{__name__}.outer`: {cause}"
    assert cause.startswith("`gather` needs the same structure")

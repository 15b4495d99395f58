import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy

from hasten.parallel import words


@pytest.mark.parametrize("given", ["hybrid_shard_zero2", "5", 5, ShardingStrategy._HYBRID_SHARD_ZERO2])
def test_strategies_have_names_and_numbers(given: object) -> None:
    assert words.strategy(given) is ShardingStrategy._HYBRID_SHARD_ZERO2
    assert words.STRATEGIES[words.strategy(given)] == (False, words.MACHINE)


def test_unknown_strategies() -> None:
    with pytest.raises(ValueError, match=r"sharding_strategy='ZERO9': allowed are \['FULL_SHARD'"):
        words.strategy("ZERO9")
    assert [words.names_strategy(each) for each in ("full_shard", ShardingStrategy.NO_SHARD, "true", True)] == [
        True,
        True,
        False,
        False,
    ]


def test_formats_by_name_and_one_by_one() -> None:
    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    assert words.precision_policy("bf16") == words.precision_policy("fp8") == bf16
    parts = {"param_dtype": "bf16", "reduce_dtype": torch.float32, "output_dtype": "float32"}
    assert words.precision_policy(parts) == MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    with pytest.raises(ValueError, match="keys"):
        words.precision_policy({"param_dtype": "bf16"})


def test_policies_of_torch_and_of_users() -> None:
    def of_size(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return not recurse and nonwrapped_numel > 5

    small, large = nn.Linear(1, 1), nn.Linear(3, 3)
    chosen = words.function(of_size)
    assert [chosen(small), chosen(large)] == [False, True]
    assert words.function(lambda module: module is small)(small)

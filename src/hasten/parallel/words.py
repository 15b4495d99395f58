"""What the words of the settings of sharding mean: strategies, formats, policies, forms of a state."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecisionPolicy,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from hasten.parallel.recompute import Recomputed
from hasten.parallel.units import Choose

POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_POLICY_KEYS = ("param_dtype", "reduce_dtype", "output_dtype")
DEFAULT_SIZE = 100_000_000

# Over which ranks parameters are divided.
EVERYWHERE = "all ranks"
MACHINE = "the ranks of a machine"
NOWHERE = "no other rank"

# Whether whole parameters are freed after the forward pass, and over which ranks they are divided.
STRATEGIES = {
    ShardingStrategy.FULL_SHARD: (True, EVERYWHERE),
    ShardingStrategy.SHARD_GRAD_OP: (False, EVERYWHERE),
    ShardingStrategy.HYBRID_SHARD: (True, MACHINE),
    ShardingStrategy._HYBRID_SHARD_ZERO2: (False, MACHINE),
    ShardingStrategy.NO_SHARD: (False, NOWHERE),
}

CONFIGS: dict[StateDictType, tuple[StateDictConfig, OptimStateDictConfig]] = {
    StateDictType.FULL_STATE_DICT: (
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
    ),
    StateDictType.SHARDED_STATE_DICT: (
        ShardedStateDictConfig(offload_to_cpu=True),
        ShardedOptimStateDictConfig(offload_to_cpu=True),
    ),
}

STRATEGY_NAMES = {kind.name.lstrip("_"): kind for kind in ShardingStrategy}


def names_strategy(given: Any) -> bool:
    """Whether something is a strategy of version 1, or the name of one."""
    return isinstance(given, ShardingStrategy) or (isinstance(given, str) and given.upper() in STRATEGY_NAMES)


def no_wrap(module: nn.Module) -> bool:
    """The policy by which a model is gathered as a whole."""
    return False


def strategy(given: Any) -> ShardingStrategy:
    """A strategy of version 1 from its name or number.

    Raises:
        ValueError: there is no such strategy.
    """
    if isinstance(given, ShardingStrategy):
        return given
    known = STRATEGY_NAMES | {str(kind.value): kind for kind in ShardingStrategy}
    kind = known.get(str(given).upper())
    if kind is None:
        raise ValueError(f"sharding_strategy={given!r}: allowed are {list(STRATEGY_NAMES)}.")
    return kind


def precision_policy(given: Any) -> MixedPrecisionPolicy:
    """A policy from a torch policy, the name of a precision, or a dictionary.

    Raises:
        ValueError: anything else.
    """
    if isinstance(given, MixedPrecisionPolicy):
        return given
    if isinstance(given, str) or hasattr(given, "value"):
        name = str(getattr(given, "value", given)).lower()
        dtype = torch.bfloat16 if name == "fp8" else _DTYPES.get(name)
        if dtype is not None:
            return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
    if isinstance(given, dict) and set(given) == set(_POLICY_KEYS):
        dtypes: dict[str, Any] = {key: _DTYPES.get(value, value) for key, value in given.items()}
        if all(isinstance(value, torch.dtype) for value in dtypes.values()):
            return MixedPrecisionPolicy(**dtypes)
    raise ValueError(
        f"Invalid mixed precision policy: {given}. Must be a `MixedPrecisionPolicy`, one of {sorted(_DTYPES)}, or a `dict` with "
        f"keys {list(_POLICY_KEYS)} and these values."
    )


def own_classes(model: nn.Module) -> list[str]:
    """The classes that a model says must not be divided, as far as it has them."""
    present = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    return [name for name in getattr(model, "_no_split_modules", None) or () if name in present]


def repeated_classes(model: nn.Module) -> list[str]:
    """The classes, other than torch's own, of which one list of modules has several: what are probably the layers."""
    found = dict[str, None]()
    for each in model.modules():
        if isinstance(each, (nn.ModuleList, nn.Sequential)):
            kinds = [type(child) for child in each if any(True for _ in child.parameters())]
            found |= {
                kind.__name__: None
                for kind in kinds
                if kinds.count(kind) > 1 and not kind.__module__.startswith("torch.")
            }
    return list(found)


def function(policy: Any) -> Choose:
    """A choice from a function of a module, or from one of torch's policies, which ask for more."""
    if isinstance(policy, partial) and policy.func is transformer_auto_wrap_policy:
        classes = tuple(policy.keywords["transformer_layer_cls"])
        return lambda module: isinstance(module, classes)
    try:
        asks = set(inspect.signature(policy).parameters)
    except (TypeError, ValueError):
        asks = set()
    if "recurse" in asks:
        return lambda module: bool(
            policy(module=module, recurse=False, nonwrapped_numel=sum(each.numel() for each in module.parameters()))
        )
    # A layer that runs again was chosen when it still had its own class, which the function may compare.
    return lambda module: isinstance(module, Recomputed) or bool(policy(module))

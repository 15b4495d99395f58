"""How many ranks each axis of the mesh has."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hasten.settings import environment

AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
_BACKENDS = {"cp": ("torch",), "sp": ("deepspeed",)}


@dataclass
class ParallelismSizes:
    """The size of each mesh axis, and what follows from the sizes without any process being there.

    Args:
        dp_replicate_size: copies of the model that see different data.
        dp_shard_size: ranks that share one copy's parameters and see different data.
        tp_size: ranks that share each layer (tensor parallelism).
        cp_size: ranks that share each sequence (context parallelism).
        cp_backend: implementation of context parallelism: "torch".
        sp_size: ranks that share each sequence by attention heads (Ulysses).
        sp_backend: implementation of sequence parallelism: "deepspeed".
        tp_handler, cp_handler, sp_handler: further settings of an axis.

    A size of None is read from `PARALLELISM_CONFIG_<AXIS>_SIZE`, else 1.

    Raises:
        ValueError: a size is below 1, axes exclude each other, or a backend is unknown.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None

    def __post_init__(self) -> None:
        for axis in AXES:
            name = f"{axis}_size"
            setattr(self, name, _size(name, getattr(self, name)))
        for axis, allowed in _BACKENDS.items():
            name = f"{axis}_backend"
            if getattr(self, name) is None:
                setattr(self, name, environment.raw(f"PARALLELISM_CONFIG_{name.upper()}") or allowed[0])
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; choose one of {list(allowed)}.")
        self._check_combination()

    def _check_combination(self) -> None:
        if self.cp_enabled and self.sp_enabled:
            raise ValueError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size} exclude each other: both split the sequence. Set one to 1."
            )
        if (self.tp_enabled or self.cp_enabled) and self.dp_replicate_enabled and not self.dp_shard_enabled:
            raise ValueError(
                f"tp_size={self.tp_size} or cp_size={self.cp_size} together with dp_replicate_size={self.dp_replicate_size} "
                "needs dp_shard_size > 1: replicating a tensor- or context-parallel model goes through its shards."
            )

    def size(self, axis: str) -> int:
        """Number of ranks along `axis`."""
        return int(getattr(self, f"{axis}_size"))

    @property
    def active_mesh_dims(self) -> list[str]:
        """The axes with more than one rank, outermost first."""
        return [axis for axis in AXES if self.size(axis) > 1]

    @property
    def dp_dim_names(self) -> list[str]:
        """The active axes along which the data differs."""
        return [axis for axis in ("dp_replicate", "dp_shard") if self.size(axis) > 1]

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The active axes along which the data is the same."""
        return [axis for axis in ("tp", "cp", "sp") if self.size(axis) > 1]

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The active axes over which parameters are sharded."""
        return [axis for axis in ("dp_shard", "cp") if self.size(axis) > 1]

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The active axes over which the loss is averaged."""
        return [axis for axis in ("dp_replicate", "dp_shard", "cp") if self.size(axis) > 1]

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The mesh axes that fully sharded data parallelism works on."""
        return (["dp_replicate"] if self.dp_replicate_enabled else []) + ["dp_shard_cp"]

    @property
    def total_size(self) -> int:
        """Number of ranks of the whole mesh."""
        total = 1
        for axis in AXES:
            total *= self.size(axis)
        return total

    @property
    def data_parallel_size(self) -> int:
        """Number of different batches per step."""
        return self.size("dp_replicate") * self.size("dp_shard")

    @property
    def non_data_parallel_size(self) -> int:
        """Number of ranks that share one batch."""
        return self.size("tp") * self.size("cp") * self.size("sp")

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether the model is replicated."""
        return self.size("dp_replicate") > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether the parameters are sharded."""
        return self.size("dp_shard") > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are split."""
        return self.size("tp") > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are split."""
        return self.size("cp") > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are split by attention heads."""
        return self.size("sp") > 1

    def to_json(self) -> dict[str, Any]:
        """The sizes and backends as plain values."""
        return {
            field.name: value
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), (int, str)) and not isinstance(value, bool)
        }


def _size(name: str, given: Any) -> int:
    variable = f"PARALLELISM_CONFIG_{name.upper()}"
    value = environment.raw(variable) or 1 if given is None else given
    try:
        size = int(value)
    except (TypeError, ValueError):
        size = 0
    if size < 1 or (not isinstance(value, str) and size != value):
        source = variable if given is None else name
        raise ValueError(f"{source}={value!r}: a mesh axis has a whole number of ranks, at least 1; 1 switches it off.")
    return size

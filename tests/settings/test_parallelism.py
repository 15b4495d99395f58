from typing import Any

import pytest

from hasten.settings.parallelism import AXES, ParallelismSizes

Sizes = ParallelismSizes


def test_every_axis_is_off_by_default():
    sizes = Sizes()
    assert [sizes.size(axis) for axis in AXES] == [1, 1, 1, 1, 1]
    assert sizes.total_size == sizes.data_parallel_size == sizes.non_data_parallel_size == 1
    assert sizes.active_mesh_dims == sizes.dp_dim_names == sizes.non_dp_dim_names == []
    assert sizes.fsdp_dim_names == ["dp_shard_cp"]
    assert (sizes.cp_backend, sizes.sp_backend) == ("torch", "deepspeed")
    assert not any(getattr(sizes, f"{axis}_enabled") for axis in AXES)


def test_sizes_can_be_given_by_position():
    sizes = Sizes(2, 3, 4, 1, "torch", 1)
    assert (sizes.dp_replicate_size, sizes.dp_shard_size, sizes.tp_size, sizes.total_size) == (2, 3, 4, 24)


# sizes, active axes, dp, non-dp, dp_shard_cp, dp_cp, fsdp, data-parallel size, other size: as the reference answers
CASES: list[tuple[dict[str, Any], str, str, str, str, str, str, int, int]] = [
    ({"dp_replicate_size": 2}, "dp_replicate", "dp_replicate", "", "", "dp_replicate", "dp_replicate dp_shard_cp", 2, 1),
    ({"dp_shard_size": 2}, "dp_shard", "dp_shard", "", "dp_shard", "dp_shard", "dp_shard_cp", 2, 1),
    ({"dp_shard_size": 2, "cp_size": 2}, "dp_shard cp", "dp_shard", "cp", "dp_shard cp", "dp_shard cp", "dp_shard_cp", 2, 2),
    ({"cp_size": 2}, "cp", "", "cp", "cp", "cp", "dp_shard_cp", 1, 2),
    ({"sp_size": 2}, "sp", "", "sp", "", "", "dp_shard_cp", 1, 2),
    ({"tp_size": 2}, "tp", "", "tp", "", "", "dp_shard_cp", 1, 2),
    (
        {"dp_replicate_size": 2, "sp_size": 2},
        "dp_replicate sp", "dp_replicate", "sp", "", "dp_replicate", "dp_replicate dp_shard_cp", 2, 2,
    ),
    (
        {"dp_replicate_size": 2, "dp_shard_size": 3, "cp_size": 5, "tp_size": 7},
        "dp_replicate dp_shard cp tp", "dp_replicate dp_shard", "tp cp", "dp_shard cp", "dp_replicate dp_shard cp",
        "dp_replicate dp_shard_cp", 6, 35,
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_what_follows_from_the_sizes(case: Any):
    given, active, dp, other, shard, loss, fsdp, data_size, other_size = case
    sizes = Sizes(**given)
    assert sizes.active_mesh_dims == active.split()
    assert sizes.dp_dim_names == dp.split()
    assert sizes.non_dp_dim_names == other.split()
    assert sizes.dp_shard_cp_dim_names == shard.split()
    assert sizes.dp_cp_dim_names == loss.split()
    assert sizes.fsdp_dim_names == fsdp.split()
    assert sizes.data_parallel_size == data_size
    assert sizes.non_data_parallel_size == other_size
    assert sizes.total_size == data_size * other_size
    for axis in AXES:
        assert getattr(sizes, f"{axis}_enabled") == (f"{axis}_size" in given)


def test_what_is_not_given_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_BACKEND", "torch")
    assert Sizes().active_mesh_dims == ["dp_replicate"]
    assert Sizes(dp_replicate_size=1).active_mesh_dims == []
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "many")
    with pytest.raises(ValueError, match="PARALLELISM_CONFIG_DP_REPLICATE_SIZE='many': a mesh axis has"):
        Sizes()


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [0, -1, 1.5, "x", [], float("nan")])
def test_a_size_is_a_whole_number_from_one(axis: str, size: Any):
    with pytest.raises(ValueError, match=rf"{axis}_size=.*: a mesh axis has a whole number of ranks, at least 1"):
        Sizes(**{f"{axis}_size": size})


def test_sizes_become_integers():
    sizes = Sizes(dp_replicate_size="2", dp_shard_size=3.0)  # type: ignore[arg-type]
    assert (sizes.dp_replicate_size, sizes.dp_shard_size) == (2, 3)
    assert type(sizes.dp_shard_size) is int


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cp_size": 2, "sp_size": 2}, "cp_size=2 and sp_size=2 exclude each other"),
        ({"dp_replicate_size": 2, "tp_size": 2}, "together with dp_replicate_size=2 needs dp_shard_size > 1"),
        ({"dp_replicate_size": 2, "cp_size": 2}, "together with dp_replicate_size=2 needs dp_shard_size > 1"),
        ({"cp_backend": "ring"}, r"cp_backend='ring' is unknown; choose one of \['torch'\]"),
        ({"sp_backend": "torch"}, r"sp_backend='torch' is unknown; choose one of \['deepspeed'\]"),
    ],
)
def test_contradictions_are_refused(given: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Sizes(**given)


def test_to_json_holds_sizes_and_backends():
    assert Sizes(dp_shard_size=2, tp_size=4).to_json() == {
        "dp_replicate_size": 1,
        "dp_shard_size": 2,
        "tp_size": 4,
        "cp_size": 1,
        "cp_backend": "torch",
        "sp_size": 1,
        "sp_backend": "deepspeed",
    }

import copy
import itertools
import pickle
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hasten.settings.parallelism import AXES, ParallelismSizes
from hasten.world import mesh, process, torch_private
from hasten.world.mesh import ParallelismConfig, build_mesh
from hasten.world.process import World
from tests.ranks import run_ranks

FLATTENED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}
SIZES = [tuple(sizes) for sizes in itertools.product((1, 2, 4), repeat=len(AXES))]


def legal(sizes: tuple[int, ...]) -> bool:
    dp_replicate, dp_shard, cp, sp, tp = (size > 1 for size in sizes)
    return not (cp and sp) and not ((tp or cp) and dp_replicate and not dp_shard)


def config(sizes: tuple[int, ...]) -> ParallelismConfig:
    return ParallelismConfig(**{f"{axis}_size": size for axis, size in zip(AXES, sizes, strict=True)})


def meshes_of(ranks: int) -> list[tuple[int, ...]]:
    product = {sizes: torch.tensor(sizes).prod().item() for sizes in SIZES}
    return [sizes for sizes in SIZES if product[sizes] == ranks and legal(sizes)]


# ---- positions, without any process ----


@pytest.mark.parametrize("total", [1, 2, 4, 8])
def test_positions_are_those_in_the_mesh(total: int):
    checked = 0
    for sizes in meshes_of(total):
        places = torch.arange(total).reshape(sizes)
        given = config(sizes)
        for rank in range(total):
            world = World(rank=rank, size=total)
            where = (places == rank).nonzero()[0].tolist()
            assert [mesh.axis_rank(world, given, axis) for axis in AXES] == where
            assert mesh.data_rank(world, given) == where[0] * sizes[1] + where[1]
            assert mesh.data_size(world, given) == sizes[0] * sizes[1]
            checked += 1
    assert checked >= total


def test_without_a_mesh_every_process_sees_data_of_its_own():
    world = World(rank=2, size=3)
    assert (mesh.data_rank(world, None), mesh.data_size(world, None)) == (2, 3)


# ---- meshes of real ranks ----


def build_all(total: int) -> list[list[Any]]:
    world = process.start(timeout=timedelta(seconds=7))
    found = []
    for sizes in meshes_of(total):
        given = config(sizes)
        built = build_mesh(given, world)
        names = built.mesh_dim_names
        assert names is not None
        assert built.mesh.flatten().tolist() == list(range(total))
        assert built.get_coordinate() == tuple(mesh.axis_rank(world, given, axis) for axis in names)
        sums = []
        for name in names:
            value = torch.tensor([1 << world.rank])
            dist.all_reduce(value, group=built.get_group(name))
            sums.append(int(value))
        found.append([names, tuple(built.shape), sums, flat_sums(built, world.rank), sorted(every_timeout())])
    return found


def flat_sums(built: Any, rank: int) -> dict[str, int]:
    found = {}
    for name, flat in sorted(built._flatten_mapping.items()):
        value = torch.tensor([1 << rank])
        dist.all_reduce(value, group=flat.get_group())
        found[name] = int(value)
    return found


def every_timeout() -> set[float]:
    return {
        time.total_seconds()
        for group in torch_private.all_groups()
        for time in torch_private.group_timeouts(group).values()
    }


def members(sizes: tuple[int, ...], along: tuple[str, ...], rank: int) -> int:
    """The ranks that share all positions with `rank` except those along some axes, as a set of bits."""
    places = torch.arange(torch.tensor(sizes).prod()).reshape(sizes)
    where = (places == rank).nonzero()[0].tolist()
    index = tuple(slice(None) if axis in along else place for axis, place in zip(AXES, where, strict=True))
    return sum(1 << int(other) for other in places[index].flatten())


@pytest.mark.parametrize("total", [1, 2, 4])
def test_every_mesh_has_groups_along_its_axes_and_waits_as_long_as_the_world(total: int):
    expected = meshes_of(total)
    for rank, found in enumerate(run_ranks(build_all, total, total, initialise=False)):
        assert len(found) == len(expected)
        for sizes, (names, shape, sums, flat, timeouts) in zip(expected, found, strict=True):
            active = tuple(axis for axis, size in zip(AXES, sizes, strict=True) if size > 1) or ("dp_replicate",)
            assert names == active
            assert shape == tuple(sizes[AXES.index(axis)] for axis in active)
            assert sums == [members(sizes, (axis,), rank) for axis in active]
            assert flat == {
                name: members(sizes, tuple(axis for axis in parts if axis in active), rank)
                for name, parts in FLATTENED.items()
                if set(parts) & set(active)
            }
            assert timeouts == [7.0]


def meshes_of_halves() -> list[Any]:
    world = process.start(timeout=timedelta(seconds=9))
    ranks = [0, 1] if world.rank < 2 else [2, 3]
    part = world.part(ranks)
    found: list[Any] = []
    if world.rank < 2:  # one half builds more than the other
        build_mesh(ParallelismSizes(tp_size=2), part)
    built = build_mesh(ParallelismSizes(dp_shard_size=2), part)
    value = torch.tensor([world.rank])
    dist.all_reduce(value, group=built.get_group("dp_shard"))
    found += [built.mesh.tolist(), int(value), sorted(every_timeout())]
    whole = build_mesh(ParallelismSizes(dp_replicate_size=2, dp_shard_size=2), world)  # and then they meet
    value = torch.tensor([world.rank])
    dist.all_reduce(value, group=whole.get_group("dp_replicate"))
    return [*found, int(value)]


def test_parts_of_a_job_build_meshes_of_their_own_at_once():
    assert run_ranks(meshes_of_halves, 4) == [
        [[0, 1], 1, [9.0], 2],
        [[0, 1], 1, [9.0], 4],
        [[2, 3], 5, [9.0], 2],
        [[2, 3], 5, [9.0], 4],
    ]


def refuse() -> list[str]:
    messages = []
    for sizes in (ParallelismSizes(tp_size=4), ParallelismSizes()):
        try:
            build_mesh(sizes, process.start())
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_the_axes_must_multiply_to_the_number_of_ranks():
    for messages in run_ranks(refuse, 2):
        assert messages[0] == (
            "The mesh dp_replicate=1 x dp_shard=1 x cp=1 x sp=1 x tp=4 has 4 ranks, but the job has 2. Change an axis or start 4 "
            "processes (`hasten launch --num_processes 4`)."
        )
        assert "has 1 ranks, but the job has 2" in messages[1]


def test_a_mesh_needs_a_group():
    with pytest.raises(ValueError, match="A mesh needs a process group: start the script with"):
        build_mesh(ParallelismSizes(), process.start())


# ---- the configuration object ----


def keep() -> list[Any]:
    given = ParallelismConfig(dp_replicate_size=2)
    found: list[Any] = []
    for device_type in (None, "cpu", None, "cpu", "cuda"):
        try:
            found.append(id(given.get_device_mesh(device_type)))
        except ValueError as error:
            found.append(str(error))
    copied, pickled = copy.deepcopy(given), pickle.loads(pickle.dumps(given))
    return [*found, given == copied == pickled, copied._mesh, pickled._mesh]


def test_a_configuration_builds_its_mesh_once():
    for found in run_ranks(keep, 2):
        assert found[0].startswith("There is no mesh yet: name the device type of its ranks")
        assert found[1] == found[2] == found[3]
        assert found[4] == "The mesh was built on 'cpu'; a mesh on 'cuda' was asked for."
        assert found[5:] == [True, None, None]


def test_a_configuration_is_its_sizes():
    assert ParallelismConfig(2, 3).active_mesh_dims == ["dp_replicate", "dp_shard"]
    assert ParallelismConfig(dp_shard_size=2).to_json()["dp_shard_size"] == 2
    with pytest.raises(ValueError, match="tp_size=0"):
        ParallelismConfig(tp_size=0)

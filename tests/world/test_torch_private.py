"""One contract test for each function: what hasten relies on must hold in the torch that is installed."""

import inspect
import logging
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader

from hasten.world import torch_private
from tests.ranks import run_ranks

SEVEN = timedelta(seconds=7)


def timeouts() -> list[object]:
    group = dist.new_group([0, 1])
    before = torch_private.group_timeouts(group)
    torch_private.set_group_timeout(group, SEVEN)
    after = torch_private.group_timeouts(group)
    other = torch_private.group_timeouts(dist.group.WORLD)
    dist.all_reduce(torch.ones(1), group=group)
    return [before["cpu"], set(after.values()), "cpu" in other, SEVEN in other.values()]


def test_group_timeouts_are_read_and_set():
    for before, after, has_cpu, other_changed in run_ranks(timeouts, 2):
        assert before == timedelta(minutes=30)
        assert after == {SEVEN}
        assert has_cpu
        assert not other_changed


def wait_in_vain() -> str:
    torch_private.set_group_timeout(dist.group.WORLD, timedelta(seconds=0.2))
    if dist.get_rank() == 1:
        torch_private.default_store().get("done")
        return "never came"
    try:
        dist.barrier()
    except RuntimeError as error:
        return str(error)
    finally:
        torch_private.default_store().set("done", "1")
    return "came"


def test_a_timeout_that_was_set_ends_a_wait():
    first, second = run_ranks(wait_in_vain, 2)
    assert "200ms" in first or "imed out" in first or "imeout" in first
    assert second == "never came"


def groups() -> list[int]:
    counts = [len(torch_private.all_groups())]
    new = dist.new_group([0, 1])
    counts.append(len(torch_private.all_groups()))
    assert new in torch_private.all_groups()
    assert dist.group.WORLD in torch_private.all_groups()
    dist.destroy_process_group(new)
    return [*counts, len(torch_private.all_groups())]


def test_all_groups():
    assert run_ranks(groups, 2) == [[1, 2, 1]] * 2


def unequal() -> list[float]:
    """Rank 1 is in one group, ranks 0 and 2 in three; then all meet, and make a group again that they have ended."""
    rank, found = dist.get_rank(), []
    plans = [[0, 2], [0, 2], [0, 1, 2], [2, 0], [0, 1, 2]]
    for ranks in plans:
        if rank in ranks:
            group = torch_private.new_group(sorted(ranks), SEVEN, backend="gloo")
            total = torch.tensor([float(rank)])
            dist.all_reduce(total, group=group)
            found.append(total.item())
            if len(ranks) == 3:
                dist.destroy_process_group(group)
    return found


def test_only_the_members_make_a_group_whatever_they_have_made_before():
    assert run_ranks(unequal, 3) == [[2.0, 2.0, 3.0, 2.0, 3.0], [3.0, 3.0], [2.0, 2.0, 3.0, 2.0, 3.0]]


def test_groups_are_named_as_before_afterwards():
    before = dist.distributed_c10d._hash_ranks_to_str
    with pytest.raises(ValueError, match="process group"):
        torch_private.new_group([0], None)
    assert dist.distributed_c10d._hash_ranks_to_str is before


def mesh_of_half() -> list[object]:
    rank = dist.get_rank()
    if rank >= 2:  # the others do not take part, and nobody waits for them
        return []
    with torch_private.groups_of_a_mesh(SEVEN):
        mesh = DeviceMesh("cpu", torch.tensor([[0, 1]]), mesh_dim_names=("dp_replicate", "dp_shard"))
        flat = mesh["dp_replicate", "dp_shard"]._flatten("dp")
    from torch.distributed import device_mesh, distributed_c10d

    total = torch.ones(1)
    dist.all_reduce(total, group=flat.get_group())
    made = [group for group in torch_private.all_groups() if group is not dist.group.WORLD]
    return [
        device_mesh.new_group is distributed_c10d.new_group,
        len(made) >= 3,
        {timeout for group in made for timeout in torch_private.group_timeouts(group).values()} == {SEVEN},
        total.item(),
        flat.size(),
    ]


def test_the_members_of_a_mesh_make_its_groups_alone_with_a_timeout():
    assert run_ranks(mesh_of_half, 4) == [[True, True, True, 2.0, 2]] * 2 + [[]] * 2


def test_making_groups_is_as_before_even_after_an_error():
    from torch.distributed import device_mesh

    before = device_mesh.new_group
    with pytest.raises(KeyError), torch_private.groups_of_a_mesh(None):  # noqa: PT012
        assert device_mesh.new_group is not before
        raise KeyError
    assert device_mesh.new_group is before
    assert {"timeout", "use_local_synchronization"} <= set(inspect.signature(before).parameters)


def store() -> str:
    shared = torch_private.default_store()
    shared.set(f"from {dist.get_rank()}", str(dist.get_rank()))
    return shared.get(f"from {1 - dist.get_rank()}").decode()


def test_default_store():
    assert run_ranks(store, 2) == ["1", "0"]


def test_is_inside_elastic_agent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not torch_private.is_inside_elastic_agent()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert torch_private.is_inside_elastic_agent()


def test_storages_that_pickle_meets_in_a_tensor():
    import io
    import pickle

    met = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            storage = torch_private.storage_of(obj)
            met.append(storage)
            return None if storage is None else 0

    tensor = torch.arange(5.0)
    for item in ({"x": tensor}, tensor.untyped_storage()):
        met.clear()
        Pickler(io.BytesIO(), protocol=2).dump(item)
        [found] = [each for each in met if each is not None]
        assert found.data_ptr() == tensor.data_ptr()
        assert found.nbytes() == 20


def test_is_unscaled():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    assert not torch_private.is_unscaled(scaler, optimizer)
    scaler.unscale_(optimizer)
    assert torch_private.is_unscaled(scaler, optimizer)
    scaler.step(optimizer)
    assert torch_private.is_unscaled(scaler, optimizer)
    scaler.update()
    assert not torch_private.is_unscaled(scaler, optimizer)


def test_found_infinite():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for factor, infinite in ((float("inf"), True), (1.0, False)):
        assert not torch_private.found_infinite(scaler, optimizer)
        scaler.scale(parameter.sum() * factor).backward()
        scaler.step(optimizer)
        assert torch_private.found_infinite(scaler, optimizer) == infinite
        scaler.update()
        optimizer.zero_grad()


def learn_graph() -> list[bool]:
    found = []
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1), static_graph=True)
    found.append(torch_private.must_learn_graph(model))
    model(torch.ones(1, 2)).sum().backward()
    found.append(torch_private.must_learn_graph(model))
    return found


def test_must_learn_graph():
    assert run_ranks(learn_graph, 2) == [[True, False]] * 2


def hooked() -> list[bool]:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    before = torch_private.has_communication_hook(model)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    return [before, torch_private.has_communication_hook(model)]


def test_communication_hooks_are_seen():
    assert run_ranks(hooked, 2) == [[False, True]] * 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_takes_the_indices_that_it_is_given(workers: int):
    loader = torch_private.LoaderOverIndices(
        list("abcd"), batch_size=2, num_workers=workers, multiprocessing_context="fork" if workers else None
    )
    loader.indices = [[3, 0], [1]]
    assert list(loader) == [["d", "a"], ["b"]]


def test_workers_are_kept_and_forgotten():
    loader = DataLoader([0, 1], num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    assert not torch_private.keeps_workers(loader)
    iterator = iter(loader)
    assert list(iterator) == [torch.tensor([0]), torch.tensor([1])]
    assert torch_private.keeps_workers(loader)
    torch_private.forget_iterator(loader)
    assert not torch_private.keeps_workers(loader)
    assert not torch_private.keeps_workers(DataLoader([0]))
    iterator._shutdown_workers()


def test_every_function_has_a_contract_test():
    source = inspect.getsource(inspect.getmodule(test_every_function_has_a_contract_test))  # type: ignore[arg-type]
    own = [
        name
        for name, value in vars(torch_private).items()
        if getattr(value, "__module__", "") == torch_private.__name__ and not name.startswith("_")
    ]
    assert [name for name in own if f"torch_private.{name}" not in source] == []


def test_copy_each():
    targets = [torch.zeros(2, 3).t(), torch.zeros(())]
    torch_private.copy_each(targets, [torch.ones(3, 2), torch.tensor(2.0)])
    assert [target.tolist() for target in targets] == [[[1.0, 1.0]] * 3, 2.0]


def test_multiply_each():
    tensors = [torch.ones(2), torch.full((), 3.0)]
    torch_private.multiply_each(tensors, 2.0)
    torch_private.multiply_each(tensors, torch.tensor(0.5, dtype=torch.float64))
    assert [tensor.tolist() for tensor in tensors] == [[1.0, 1.0], 3.0]


def blocks() -> list[object]:
    mesh = init_device_mesh("cpu", (3,))
    tensors = [
        distribute_tensor(torch.arange(35.0).reshape(7, 5), mesh, [placement])
        for placement in (Shard(0), Shard(1), Replicate())
    ]
    return [(*torch_private.local_block(tensor), tuple(tensor.to_local().shape)) for tensor in tensors]


def test_local_block():
    rows, columns, whole = zip(*run_ranks(blocks, 3), strict=True)
    assert rows == (((3, 5), (0, 0), (3, 5)), ((3, 5), (3, 0), (3, 5)), ((1, 5), (6, 0), (1, 5)))
    assert columns == (((7, 2), (0, 0), (7, 2)), ((7, 2), (0, 2), (7, 2)), ((7, 1), (0, 4), (7, 1)))
    assert whole == (((7, 5), (0, 0), (7, 5)),) * 3


def test_tensors_without_values():
    from torch.distributed.tensor import _random

    mode = torch_private.tensors_without_values()
    for _ in range(2):
        with mode:
            empty = torch.empty(1 << 20, 1 << 20)  # 4 TiB
    assert empty.shape == (1 << 20, 1 << 20)
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    with torch_private.trial_without_values(), mode:
        assert logger.disabled
        assert (empty @ empty).shape == empty.shape
        _random._rng_tracker = "something"  # type: ignore[assignment]
    assert logger.disabled is before
    assert _random._rng_tracker is None


def sharded_module() -> list[object]:
    from torch.distributed.fsdp import fully_shard

    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    model.register_forward_hook(lambda *_: None)
    fully_shard(model[0])
    fully_shard(model)
    hooks = [*model._forward_pre_hooks.values(), *model._forward_hooks.values()]
    found: list[object] = [sorted(map(torch_private.is_sharding_hook, hooks))]
    torch_private.prepare_root(model)
    model[0](torch.ones(1, 4))  # would make itself the root
    resting = []
    model[1].register_forward_hook(lambda *_: resting.append(torch_private.is_resting(model)))
    output = model(torch.ones(1, 4)).sum()
    found.append([*resting, torch_private.is_resting(model)])
    torch_private.spoil_graphs(model)
    try:
        output.backward()
    except RuntimeError as error:
        found.append(str(error))
    return found


def test_sharded_modules():
    for hooks, resting, error in run_ranks(sharded_module, 2):
        assert hooks == [False, True, True]
        assert resting == [False, True]
        assert "modified by an inplace operation" in error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_moved_towards_others(dtype):
    tensors = [torch.tensor([0.0, 4.0]), torch.tensor(8.0), torch.empty(0)]
    towards = [torch.tensor([8.0, 4.0]), torch.tensor(0.0), torch.empty(0)]
    torch_private.move_each(tensors, [tensor.to(dtype) for tensor in towards], 0.25)
    assert [tensor.tolist() for tensor in tensors] == [[2.0, 4.0], 6.0, []]


def divided() -> tuple[list[float], list[int], bool]:
    mesh = init_device_mesh("cpu", (2,))
    whole = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    other = torch_private.with_local(whole, whole.to_local() + 1)
    return other.full_tensor().tolist(), list(other.shape), other.requires_grad


def test_a_dtensor_over_another_local_part():
    assert run_ranks(divided, 2) == [([1.0, 2.0, 3.0, 4.0, 5.0], [5], False)] * 2


def test_whether_a_backward_pass_runs():
    seen = []
    tensor = torch.ones(2, requires_grad=True)
    tensor.register_hook(lambda gradient: seen.append(torch_private.in_backward()))
    (tensor * 2).sum().backward()
    assert seen == [True]
    assert not torch_private.in_backward()

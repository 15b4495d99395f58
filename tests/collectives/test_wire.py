import gc
import weakref
from typing import Any

import pytest
import torch

from hasten.collectives import wire as wires
from hasten.collectives.broadcast import broadcast
from hasten.collectives.gather import gather
from hasten.collectives.objects import broadcast_object_list, gather_object
from hasten.collectives.pad import pad_across_processes
from hasten.collectives.reduce import reduce
from hasten.collectives.wire import Wire, wire_of
from hasten.world import process
from tests.collectives.data import message, start, tree
from tests.ranks import run_ranks
from tests.simulated_device import install


def test_a_process_alone_has_no_wire():
    assert wire_of(process.current()) is None


def everything(rank: int, size: int) -> list[Any]:
    """Small and large tensors and objects through every collective."""
    large = torch.full((2**18,), float(rank))
    data = {"x": torch.tensor([rank]), "y": torch.tensor(1.0 + rank), "z": torch.full((5000,), rank)}
    mixed = {**data, "large": large}
    own = {"x": torch.tensor([rank]), "large": large.clone()}
    broadcast(own, 1)
    padded = pad_across_processes(torch.ones(1 + rank), pad_index=2)
    texts = [f"{rank}" * 9]
    broadcast_object_list(texts, 1)
    return [
        gather(data["x"]).tolist(),
        gather(mixed)["z"].float().mean().item(),
        gather(mixed)["large"].mean().item(),
        reduce(data["y"], "sum").item(),
        reduce(mixed, "sum")["large"].mean().item(),
        own["x"].item(),
        own["large"].mean().item(),
        padded.sum().item() + rank,
        gather_object(["x" * 30_000 * rank])[1][:2],
        texts,
    ]


MIDDLE = 0.5
EXPECTED = [[0, 1], MIDDLE, MIDDLE, 3.0, 1.0, 1, 1.0, 3.0, "xx", ["1" * 9]]


def on_a_staged_wire() -> list[Any]:
    world = start()
    world.attached["frames"] = Wire(world, staged=True)
    result = everything(world.rank, world.size)
    assert message(lambda: gather(torch.zeros(1 + world.rank))).startswith("`gather` needs the same")
    return result


def test_header_on_the_host_and_frame_on_the_device():
    assert run_ranks(on_a_staged_wire, 2) == [EXPECTED] * 2


def on_an_accelerator() -> list[Any]:
    memory = install("npu")  # it exists as long as this does
    world = process.start(backend="cpu:gloo,npu:gloo")
    wire = wire_of(world)
    assert wire is not None
    there = {"x": torch.tensor([world.rank]).to(world.device), "y": torch.tensor([world.rank])}
    gathered, reduced = gather(there), reduce(there, "sum")
    broadcast(there, 1)
    large = gather([torch.ones(2**18).to(world.device), torch.full((2**18,), 1.0)])
    found = [gathered, reduced, there, large]
    devices = [[leaf.device.type for leaf in (each.values() if isinstance(each, dict) else each)] for each in found]
    host = [gathered["x"].tolist(), reduced["x"].tolist(), there["x"].tolist(), there["y"].tolist()]
    assert memory[0].live
    return [str(wire.device), wire.staged, devices, host, everything(world.rank, world.size)]


def test_tensors_of_an_accelerator_and_of_the_host_come_back_where_they_were():
    for device, staged, devices, host, rest in run_ranks(on_an_accelerator, 2, fresh=True, initialise=False):
        assert device == "npu:0"
        assert staged
        assert devices == [["npu", "cpu"]] * 4
        assert host == [[0, 1], [1], [1], [1]]
        assert rest == EXPECTED


def leaves_are_free() -> list[bool]:
    world = start()
    data = tree(world.rank)
    held = [weakref.ref(leaf) for part in data.values() for leaf in part.values()]
    for operation in (gather, reduce, broadcast, pad_across_processes):
        operation(data)
    del data
    gc.collect()
    wire = weakref.ref(wire_of(world))
    free = all(reference() is None for reference in held)
    process.CONTEXT.reset()
    del world
    gc.collect()
    return [free, wire() is None]


def test_nothing_is_kept_alive():
    assert run_ranks(leaves_are_free, 2) == [[True, True]] * 2


def refuse_dtensors() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    start()
    mesh = init_device_mesh("cpu", (2,))
    spread = distribute_tensor(torch.ones(2), mesh, [Replicate()])
    found = []
    for operation in (gather, reduce, broadcast, pad_across_processes):
        with pytest.raises(TypeError, match="full_tensor") as caught:
            operation([spread])
        found.append(str(caught.value))
    return found


def test_dtensors_are_refused_with_the_fix():
    first, second = run_ranks(refuse_dtensors, 2)
    assert first == second
    assert first[0].startswith("`gather` got a DTensor, which is spread over the processes already.")


@pytest.mark.parametrize("away", [False, True])
def test_copies_take_any_strides_and_leave_gradients_alone(away: bool):
    targets = [torch.zeros(3, 2).t(), torch.zeros(()), torch.zeros(0), torch.zeros(2, dtype=torch.complex64)]
    given = [torch.ones(2, 3, requires_grad=True), torch.tensor(2.0), torch.zeros(0), torch.tensor([1j, 2]).conj()]
    wires.copy_all(targets, given, away)
    assert [target.tolist() for target in targets] == [[[1.0] * 3] * 2, 2.0, [], [-1j, 2]]
    assert not targets[0].requires_grad
    wires.copy_all([], [], away)

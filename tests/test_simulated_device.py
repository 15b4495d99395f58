"""Each test runs in a rank of its own, since the device changes the process."""

import copy
import gc
import io

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.ranks import RankError, run_ranks
from tests.simulated_device import install


def on_device(function, world_size=1, **options):
    return run_ranks(function, world_size, fresh=True, initialise=False, **options)


def move() -> list[object]:
    (memory,) = install("npu")
    host = torch.arange(6.0).reshape(2, 3)
    there = host.to("npu")
    view = there.t()[1:]
    back = there.cpu()
    back.zero_()
    seen = [
        str(there.device),
        there.device.type,
        there.tolist() == host.tolist(),
        view.tolist(),
        there.to("npu") is there,
        memory.live,
    ]
    there += 1
    seen += [there.sum().item(), torch.ones(2, device="npu").sum().item(), memory.live]
    del there
    seen += [memory.live]
    del view
    return [*seen, memory.live]


def test_tensors_move_and_bytes_are_counted_once_per_storage():
    expected = ["npu:0", "npu", True, [[1.0, 4.0], [2.0, 5.0]], True, 24, 21.0, 2.0, 24, 24, 0]
    assert on_device(move) == [expected]


def train(device: str) -> list[float]:
    if device == "npu":
        install(device)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.0), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    model.to(device)
    assert all(old is new for old, new in zip(parameters, model.parameters(), strict=True)), (
        "a move keeps the parameters"
    )
    losses = []
    for _ in range(4):
        loss = model(torch.ones(2, 8).to(device)).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_gives_the_numbers_of_the_cpu():
    assert on_device(train, device="npu") == on_device(train, device="cpu")


def peaks() -> tuple[int, int, int]:
    (memory,) = install("npu")
    model = torch.nn.Linear(100, 100, bias=False).to("npu")
    size = memory.live
    memory.reset_peak()
    with torch.no_grad():
        model(torch.ones(10, 100, device="npu"))
    peak = memory.peak
    npu = torch.get_device_module("npu")
    assert (npu.max_memory_allocated(), npu.memory_allocated(0)) == (peak, memory.live)
    model.to("cpu")
    del model
    gc.collect()
    return size, peak, memory.live


def test_peak_memory_is_exact():
    weights, batch = 100 * 100 * 4, 10 * 100 * 4
    assert on_device(peaks) == [(weights, weights + 2 * batch, 0)]


def exhaust() -> int:
    (memory,) = install("npu", capacity=1000)
    kept = torch.ones(200, device="npu")
    with pytest.raises(torch.OutOfMemoryError, match=r"npu out of memory\. Tried to allocate 400 bytes"):
        torch.ones(100, device="npu")
    gc.collect()
    assert torch.get_device_module("npu").mem_get_info() == (200, 1000)
    return memory.live - kept.nbytes


def test_memory_can_run_out():
    assert on_device(exhaust) == [0]


def mix() -> tuple[float, float]:
    install("npu", devices=2)
    here, there = torch.ones(2), torch.ones(2, device="npu:1")
    for other in (here, torch.ones(2, device="npu")):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device, but found at least two"):
            there + other
    with pytest.raises(RuntimeError, match="there is no npu:2"):
        torch.ones(2, device="npu:2")
    return (there * torch.tensor(2.0)).sum().item(), there[torch.tensor([0])].item()


def test_devices_do_not_mix_but_for_scalars_and_indices():
    assert on_device(mix) == [(4.0, 1.0)]


def several() -> list[int]:
    memories = install("npu", devices=3)
    npu = torch.get_device_module("npu")
    tensors = [torch.ones(10 * (index + 1), device=f"npu:{index}") for index in range(3)]
    moved = tensors[0].to("npu:2")
    with npu.device(1):
        current = torch.ones(1, device="npu")
    assert [str(moved.device), str(current.device), npu.device_count()] == ["npu:2", "npu:1", 3]
    return [memory.live for memory in memories]


def test_several_devices_are_counted_apart():
    assert on_device(several) == [[40, 84, 160]]


def cast() -> list[torch.dtype]:
    install("npu")
    model = torch.nn.Linear(4, 4).to("npu")
    with torch.autocast("npu", dtype=torch.bfloat16):
        out = model(torch.ones(2, 4, device="npu"))
        normed = torch.nn.functional.layer_norm(out.float(), (4,))
    out.float().sum().backward()
    assert model.weight.grad is not None
    return [out.dtype, normed.dtype, model.weight.grad.dtype, model(torch.ones(2, 4, device="npu")).dtype]


def test_autocast_lowers_matrix_products():
    assert on_device(cast) == [[torch.bfloat16, torch.float32, torch.float32, torch.float32]]


def save() -> tuple[object, ...]:
    install("npu")
    model = torch.nn.Linear(2, 2).to("npu")
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    here = torch.load(file, map_location="cpu")["weight"]
    file.seek(0)
    there = torch.load(file)["weight"]
    same = [
        torch.equal(here, model.weight.cpu()),
        torch.equal(there, model.weight),
        torch.equal(twin.weight, model.weight),
    ]
    return [str(tensor.device) for tensor in (here, there, twin.weight)], same


def test_state_can_be_saved_and_copied():
    assert on_device(save) == [(["cpu", "npu:0", "npu:0"], [True, True, True])]


def answers() -> tuple[object, ...]:
    install("npu")
    accelerator = torch.accelerator
    return (
        accelerator.is_available(),
        str(accelerator.current_accelerator()),
        accelerator.device_count(),
        accelerator.current_device_index(),
    )


def test_torch_accelerator_knows_it():
    assert on_device(answers) == [(True, "npu", 1, 0)]


def shard(blocks: int, width: int) -> tuple[list[float], list[float], int, int]:
    (memory,) = install("npu")
    dist.init_process_group("cpu:gloo,npu:gloo")
    torch.manual_seed(0)
    plain = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(blocks)))
    model = copy.deepcopy(plain).to("npu")
    mesh = dist.init_device_mesh("npu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    gc.collect()
    sharded = memory.live
    memory.reset_peak()
    losses: tuple[list[float], list[float]] = ([], [])
    for network, device, seen in ((plain, "cpu", losses[0]), (model, "npu", losses[1])):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(3):
            loss = network(torch.ones(2, width, device=device)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
    return *losses, sharded, memory.peak


def test_fsdp2_trains_on_two_ranks_and_holds_a_part():
    blocks, width = 8, 64
    for plain, trained, sharded, peak in on_device(shard, 2, blocks=blocks, width=width):
        assert trained == pytest.approx(plain, rel=1e-6)
        assert sharded == blocks * width * width * 4 // 2
        assert 2 * sharded < peak < 3 * sharded, "halves of parameters and gradients, and a few blocks in full"


def install_twice() -> None:
    install("npu")
    install("xpu")


def test_a_process_has_one_slot():
    with pytest.raises(RankError, match="has a simulated device already: npu"):
        on_device(install_twice)

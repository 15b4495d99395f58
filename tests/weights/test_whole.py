import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hasten.weights import whole
from hasten.world import process
from hasten.world.frames import Frames
from tests.parallel.test_gathered import accelerate, ranks_of
from tests.parallel.test_shard import language, loss_of, tokens
from tests.ranks import run_ranks


class Counted:
    """Counts all-gathers of values, and agreements."""

    def __init__(self, monkey: Any) -> None:
        self.gathers = self.agreements = 0
        gather, agree = Frames.gather_into, Frames.agree

        def gather_into(frames: Frames, *arguments: Any) -> None:
            self.gathers += 1
            gather(frames, *arguments)

        def agreed(frames: Frames, *arguments: Any, **named: Any) -> None:
            self.agreements += 1
            agree(frames, *arguments, **named)

        monkey.setattr(Frames, "gather_into", gather_into)
        monkey.setattr(Frames, "agree", agreed)


LAYER = 65 * 64 * 4  # bytes of what the tests of memory gather
SHAPES = [(7, 3), (1,), (2, 5), (4, 6), (), (3, 0), (9,), (5, 4, 3)]


def tensors(rank_count: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (rank_count,), mesh_dim_names=("dp_shard",))
    found: list[Any] = []
    for index, shape in enumerate(SHAPES):
        value = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + index / 3
        placement = Shard(len(shape) - 1) if index % 3 == 2 and shape else Shard(0) if shape else Replicate()
        found.append(distribute_tensor(value, mesh, [placement]))
    return [*found, torch.arange(3), torch.ones(2)]


def gathered(dtype: torch.dtype | None) -> tuple[list[Tensor], list[Tensor], int]:
    world = process.start(cpu=True)
    with pytest.MonkeyPatch.context() as monkey:
        counted = Counted(monkey)
        divided = tensors(world.size)
        found = list(whole.gather_whole(divided, world, dtype))
    assert counted.agreements == 0
    expected = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in divided]
    return found, expected, counted.gathers


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_tensors_of_all_shapes_in_one_collective(ranks, dtype):
    for found, expected, gathers in run_ranks(gathered, ranks, dtype):
        assert gathers == 1
        for one, other in zip(found, expected, strict=True):
            assert one.is_contiguous()
            assert torch.equal(one, other.to(dtype) if dtype and other.is_floating_point() else other)


class Counter(nn.Module):
    """Has a buffer that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = language(tied=True)
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self, batch: Tensor) -> Tensor:
        return self.body(batch)


def streamed(kind: str, dtype: torch.dtype | None, at_once: int) -> Any:
    accelerator = accelerate(kind)
    model = accelerator.prepare(Counter())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(loss_of(model, tokens(accelerator.process_index, 0)))
    optimizer.step()
    if kind != "replicated":
        model(tokens(0, 0))  # leaves the end of the model whole
    with pytest.MonkeyPatch.context() as monkey:
        counted = Counted(monkey)
        found = [
            (name, value.clone(), value.data_ptr())
            for name, value in accelerator.stream_weights(model, dtype, at_once=at_once)
        ]
    return found, accelerator.get_state_dict(model), (counted.gathers, counted.agreements)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", ["sharded", "copies", "offloaded", "recomputed", "replicated", "bf16"])
def test_what_is_streamed_is_the_state(kind, dtype):
    for rank, (found, state, counts) in enumerate(run_ranks(streamed, ranks_of(kind), kind, dtype, 1 << 20)):
        names = [name for name, _, _ in found]
        assert names.index("body.head.weight") == names.index("body.embedding.weight") + 1
        by_name = {name: value for name, value, _ in found}
        places = {name: place for name, _, place in found}
        assert len(names) == len(by_name)
        assert places["body.head.weight"] == places["body.embedding.weight"]
        assert counts == ((0, 0) if kind == "replicated" else (1, 1))
        if rank == 0 or kind == "replicated":
            assert by_name.keys() == state.keys()
            for name, value in by_name.items():
                wanted = state[name].to(dtype) if dtype and state[name].is_floating_point() else state[name]
                assert torch.equal(value, wanted), name


def test_each_large_tensor_travels_alone():
    for found, _, counts in run_ranks(streamed, 2, "sharded", None, 0):
        distinct = len({name for name, _, _ in found} - {"body.head.weight"})
        assert counts == (distinct - 1, distinct)  # nobody needs to send a buffer


def settled(live: Callable[[], int], most: int = 0) -> int:
    """Live bytes, once gloo's threads have let go of what they have sent."""
    for _ in range(300):
        if live() <= most:
            break
        time.sleep(0.01)
    return live()


def settle_before_exchanges(monkey: Any, live: Callable[[], int]) -> None:
    exchange = whole._exchange

    def settle(*arguments: Any) -> list[Tensor]:
        assert settled(live) == 0  # nothing that was gathered before is held
        return exchange(*arguments)

    monkey.setattr(whole, "_exchange", settle)


def peak(at_once: int) -> tuple[int, int, int]:
    """Bytes that are gathered at one time, by following what the collectives and the loop hold."""
    accelerator = accelerate("whole")
    with torch.random.fork_rng(devices=[]):
        model = accelerator.prepare(nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]))
    live: dict[int, int] = {}
    most = 0
    make = torch.empty

    def follow(*arguments: Any, **named: Any) -> Tensor:
        nonlocal most
        tensor = make(*arguments, **named)
        storage = tensor.untyped_storage()
        live[storage._cdata] = storage.nbytes()
        weakref.finalize(storage, live.pop, storage._cdata)
        most = max(most, sum(live.values()))
        return tensor

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(torch, "empty", follow)
        settle_before_exchanges(monkey, lambda: sum(live.values()))
        for _, tensor in accelerator.stream_weights(model, at_once=at_once):
            del tensor
    return most, 64 * 64 * 4, sum(each.numel() * 4 for each in model.parameters())


def test_one_tensor_is_whole_at_a_time():
    for most, largest, everything in run_ranks(peak, 2, 1024):
        assert most == 1.5 * largest  # the tensor, and this rank's half of it on its way
        assert everything > 5 * largest


def left() -> list[int]:
    accelerator = accelerate()
    model = accelerator.prepare(language())
    for index, _ in enumerate(accelerator.stream_weights(model, at_once=0)):
        if index == 2:
            break
    return accelerator.gather(torch.tensor([1])).tolist()


def left_alone() -> str:
    accelerator = accelerate()
    model = accelerator.prepare(language())
    try:
        for index, _ in enumerate(accelerator.stream_weights(model, at_once=0)):
            if index == 2 and accelerator.process_index == 0:
                break
        accelerator.wait_for_everyone()
    except Exception as error:
        return str(error)
    return "went well"


def test_leaving_early():
    assert run_ranks(left, 2) == [[1, 1]] * 2
    for found in run_ranks(left_alone, 2):
        assert "did not call the same operation" in found
        assert "stream_weights" in found
        assert "wait_for_everyone" in found


def adapted() -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """A frozen model in half precision with trained parts in full, as adapters are."""
    accelerator = accelerate()
    model: Any = language().bfloat16().requires_grad_(False)
    for layer in model.layers:
        layer.up.adapter = nn.Linear(8, 2, bias=False)
    model = accelerator.prepare(model)
    with pytest.MonkeyPatch.context() as monkey:
        counted = Counted(monkey)
        found = dict(accelerator.stream_weights(model))
    return found, accelerator.get_state_dict(model), counted.gathers


def test_formats_travel_apart():
    for rank, (found, state, gathers) in enumerate(run_ranks(adapted, 2)):
        assert gathers == 2
        assert {value.dtype for value in found.values()} == {torch.bfloat16, torch.float32}
        if rank == 0:
            assert found.keys() == state.keys()
            assert all(torch.equal(value, state[name]) for name, value in found.items())


def on_a_device(offload: bool) -> dict[str, int]:
    from torch.distributed.fsdp import CPUOffloadPolicy

    from hasten import Accelerator, FullyShardedDataParallelPlugin
    from tests.simulated_device import install

    (memory,) = install("npu")
    dist.init_process_group("cpu:gloo,npu:gloo")
    policy = {"cpu_offload": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="size_based_wrap", min_num_params=1000, **policy)  # type: ignore[arg-type]
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = accelerator.prepare(nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]).to("npu"))
    before = memory.live
    memory.reset_peak()
    devices = set()
    with pytest.MonkeyPatch.context() as monkey:
        settle_before_exchanges(monkey, lambda: memory.live - before)
        for _, tensor in accelerator.stream_weights(model, at_once=4096):
            devices.add(str(tensor.device))
            del tensor
    found = {"stream": memory.peak - before, "devices": len(devices - {"npu:0"})}
    with accelerator.gathered(model):
        found["gathered"] = settled(lambda: memory.live - before, 8 * LAYER)
    memory.reset_peak()
    for _, parameters in accelerator.gathered_units(model, writeback=True):
        parameters.clear()
        del parameters
    return {**found, "units": memory.peak - before, "left": settled(lambda: memory.live - before)}


@pytest.mark.parametrize("offload", [False, True])
def test_memory_of_an_accelerator(offload):
    for found in run_ranks(on_a_device, 2, offload, fresh=True, initialise=False):
        assert found["devices"] == 0
        assert found["stream"] == 1.5 * 64 * 64 * 4
        assert found["gathered"] == 8 * LAYER
        assert found["units"] <= 5 * LAYER  # a unit, what it was packed in, rank 0's values, and what gloo lets go late
        assert found["left"] == 0

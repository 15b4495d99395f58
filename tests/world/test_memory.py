import gc
import subprocess
import sys
import weakref

import pytest
import torch

import hasten.utils
from hasten import Accelerator
from hasten.training.batch_size import find_executable_batch_size
from hasten.world import memory
from hasten.world.memory import clear_device_cache, release_memory, should_reduce_batch_size
from tests.ranks import run_ranks
from tests.simulated_device import install


class Node:
    """An object in a reference cycle: only a collection ends it."""

    def __init__(self) -> None:
        self.itself = self


def test_collecting_is_optional():
    gc.collect()
    gc.disable()
    try:
        node = weakref.ref(Node())
        clear_device_cache()
        assert node() is not None
        clear_device_cache(garbage_collection=True)
        assert node() is None
    finally:
        gc.enable()


def test_release_memory_collects_and_gives_a_none_for_each_object():
    node = weakref.ref(Node())
    first, second = release_memory(torch.ones(2), "anything")
    assert first is second is None
    assert release_memory() == []
    assert node() is None


def test_free_memory_goes_the_same_way(monkeypatch: pytest.MonkeyPatch):
    calls = []
    monkeypatch.setattr(memory, "clear_device_cache", lambda garbage_collection=False: calls.append(garbage_collection))
    accelerator = Accelerator()
    assert accelerator.free_memory(1, 2) == [None, None]
    assert accelerator.clear() == []
    assert release_memory(1) == [None]
    assert calls == [True] * 3


def empty_on_a_device() -> list[int]:
    install("simulated", devices=1, capacity=1000)
    calls: list[int] = []
    torch.get_device_module("simulated").empty_cache = lambda: calls.append(1)
    clear_device_cache()
    release_memory()
    Accelerator().free_memory()
    return calls


def test_the_cache_of_the_accelerator_is_emptied():
    assert run_ranks(empty_on_a_device, 1, fresh=True, initialise=False) == [[1, 1, 1]]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("whatever it says"), True),
        (torch.OutOfMemoryError("two", "arguments"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 15.72 GiB, other allocations: 2.41 MiB)"), True),
        (RuntimeError("MPS backend out of memory. Tried"), True),
        (RuntimeError("Invalid buffer size: 19.38 GiB"), True),
        (RuntimeError("XPU out of memory. Tried"), True),
        (RuntimeError("UR error: UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"), True),
        (RuntimeError("NPU out of memory. Tried to allocate 52.00 MiB (NPU 0; 60.96 GiB total capacity)"), True),
        (RuntimeError("CUDA out of memory.", 2), False),
        (RuntimeError(), False),
        (RuntimeError("shapes differ"), False),
        (ValueError("CUDA out of memory."), False),
        (MemoryError(), False),
    ],
    ids=repr,
)
def test_which_errors_mean_too_little_memory(error: Exception, expected: bool):
    assert should_reduce_batch_size(error) is expected


def test_the_cpu_allocator_itself():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert should_reduce_batch_size(caught.value)


# ---- where it is found ----


def test_names():
    assert hasten.utils.release_memory is release_memory
    assert hasten.utils.clear_device_cache is clear_device_cache
    assert hasten.utils.should_reduce_batch_size is should_reduce_batch_size
    assert hasten.utils.find_executable_batch_size is hasten.find_executable_batch_size is find_executable_batch_size


RARE = """
import sys
import hasten
hasten.Accelerator(cpu=True)
rare = ["training.batch_size", "training.attempt", "training.local_steps", "training.local_sgd", "training.diloco"]
rare += ["collectives.average", "world.memory", "world.said"]
assert not [name for name in rare if f"hasten.{name}" in sys.modules]
"""


def test_an_accelerator_imports_none_of_what_is_rare():
    subprocess.run([sys.executable, "-c", RARE], check=True, timeout=60)

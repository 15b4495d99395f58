from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hasten.settings.enums import DistributedType
from hasten.world import devices
from hasten.world.devices import DEVICES, Device, best_device, device_row, is_out_of_memory
from tests.ranks import run_ranks
from tests.simulated_device import install

ROWS = list(DEVICES.values())
ACCELERATORS = [row for row in ROWS if not row.is_cpu]
VENDORS = ["npu", "mlu", "musa", "sdaa", "neuron"]  # torch knows them only once their package has registered them

every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.type)
every_accelerator = pytest.mark.parametrize("row", ACCELERATORS, ids=lambda row: row.type)


class Module:
    """A device's `torch.<type>`: every call is noted, and answered from `answers`."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        for name, answer in answers.items():
            setattr(self, name, self._call(name, answer))

    def _call(self, name: str, answer: Any) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append((name, *args))
            return answer

        return call


def fake(monkeypatch: pytest.MonkeyPatch, row: Device, count: int = 2, **answers: Any) -> Module:
    """Let this machine have `count` devices of the row's type."""
    module = Module(**answers)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module if kind == row.type else None)
    monkeypatch.setattr(devices, "device_row", lambda device: DEVICES[device.type])
    accelerator = SimpleNamespace(
        current_accelerator=lambda check_available=False: SimpleNamespace(type=row.type) if count else None,
        device_count=lambda: count,
        set_device_index=module._call("set_device_index", None),
    )
    monkeypatch.setattr(torch, "accelerator", accelerator)
    return module


# ---- the table ----


def test_the_table_has_every_device_type():
    assert list(DEVICES) == ["cuda", "xpu", "npu", "mlu", "musa", "sdaa", "hpu", "neuron", "mps", "cpu"]
    assert all(DEVICES[row.type] is row for row in ROWS)


def test_labels_are_those_of_the_reference():
    labels = {row.type: row.label.value for row in ROWS}
    named = {kind: f"MULTI_{kind.upper()}" for kind in labels}
    assert labels == {**named, "cuda": "MULTI_GPU", "mps": "NO"}


def test_backends():
    assert {row.type: row.backend for row in ROWS} == {
        "cuda": "nccl", "xpu": "xccl", "npu": "hccl", "mlu": "cncl", "musa": "mccl", "sdaa": "tccl", "hpu": "hccl",
        "neuron": "neuron", "mps": "gloo", "cpu": "gloo",
    }  # fmt: skip


@every_accelerator
def test_a_variable_restricts_a_process_to_some_accelerators(row: Device):
    assert (row.visible is None) == (row.type == "mps")
    assert row.visible is None or row.visible.isupper()


# ---- questions to every row ----


@every_row
def test_availability_and_count(monkeypatch: pytest.MonkeyPatch, row: Device):
    fake(monkeypatch, row)
    assert row.is_available
    assert row.count == (1 if row.is_cpu else 2)
    fake(monkeypatch, row, count=0)
    assert row.is_available == row.is_cpu
    assert row.count == (1 if row.is_cpu else 0)


@every_accelerator
def test_another_accelerator_does_not_make_a_row_available(monkeypatch: pytest.MonkeyPatch, row: Device):
    other = DEVICES["xpu" if row.type == "cuda" else "cuda"]
    fake(monkeypatch, other)
    assert not row.is_available
    assert row.count == 0
    assert best_device() is other


@every_row
def test_the_best_device_is_the_accelerator(monkeypatch: pytest.MonkeyPatch, row: Device):
    fake(monkeypatch, row)
    assert best_device() is row
    fake(monkeypatch, row, count=0)
    assert best_device() is DEVICES["cpu"]


@pytest.mark.parametrize("kind", ["cuda", "xpu", "hpu", "mps", "cpu"])
def test_local_ranks_beyond_the_devices_share_them_in_turn(monkeypatch: pytest.MonkeyPatch, kind: str):
    fake(monkeypatch, DEVICES[kind])
    found = [str(DEVICES[kind].at(rank)) for rank in range(3)]
    assert found == ([kind] * 3 if kind in ("mps", "cpu") else [f"{kind}:0", f"{kind}:1", f"{kind}:0"])


@pytest.mark.parametrize("kind", ["cuda", "xpu", "hpu"])
def test_without_devices_there_is_still_a_name(monkeypatch: pytest.MonkeyPatch, kind: str):
    fake(monkeypatch, DEVICES[kind], count=0)
    assert DEVICES[kind].at(1) == torch.device(kind, 0)


@every_row
def test_select(monkeypatch: pytest.MonkeyPatch, row: Device):
    module = fake(monkeypatch, row)
    row.select(SimpleNamespace(type=row.type, index=None))  # type: ignore[arg-type]
    assert module.calls == []
    row.select(SimpleNamespace(type=row.type, index=1))  # type: ignore[arg-type]
    assert module.calls == ([] if row.is_cpu else [("set_device_index", 1)])


@every_row
def test_synchronize(monkeypatch: pytest.MonkeyPatch, row: Device):
    module = fake(monkeypatch, row, synchronize=None)
    row.synchronize()
    assert module.calls == ([] if row.is_cpu else [("synchronize",)])


@every_row
def test_empty_cache(monkeypatch: pytest.MonkeyPatch, row: Device):
    module = fake(monkeypatch, row, empty_cache=None)
    row.empty_cache()
    assert module.calls == ([] if row.is_cpu else [("empty_cache",)])
    fake(monkeypatch, row)
    row.empty_cache()  # a device without a cache


@every_accelerator
def test_seed_and_generator_states(monkeypatch: pytest.MonkeyPatch, row: Device):
    module = fake(monkeypatch, row, manual_seed_all=None, get_rng_state="state", set_rng_state=None)
    row.seed(3)
    assert row.get_rng_state() == "state"
    row.set_rng_state("state")  # type: ignore[arg-type]
    assert module.calls == [("manual_seed_all", 3), ("get_rng_state",), ("set_rng_state", "state")]
    module = fake(monkeypatch, row, manual_seed=None)
    row.seed(4)
    assert module.calls == [("manual_seed", 4)]


def test_seed_and_generator_state_of_the_cpu():
    row = DEVICES["cpu"]
    row.seed(5)
    state = row.get_rng_state()
    first = torch.rand(3)
    row.seed(5)
    assert torch.equal(torch.rand(3), first)
    row.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


@every_row
def test_memory(monkeypatch: pytest.MonkeyPatch, row: Device):
    fake(monkeypatch, row, mem_get_info=(3, 7))
    free, total = row.memory()
    if row.is_cpu or row.shares_memory:
        assert 0 < free <= total
        assert total > 1 << 28
    else:
        assert (free, total) == (3, 7)
    assert type(free) is type(total) is int


@every_row
def test_precisions(monkeypatch: pytest.MonkeyPatch, row: Device):
    fake(monkeypatch, row)
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda kind: kind == row.type)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace())
    assert row.supports(torch.float16) == row.fp16
    assert row.supports(torch.bfloat16)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace(is_bf16_supported=lambda: False))
    assert not row.supports(torch.bfloat16)
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda kind: False)
    assert not row.supports(torch.float16)
    assert not row.supports(torch.bfloat16)


def test_the_cpu_supports_both_small_formats():
    assert DEVICES["cpu"].supports(torch.bfloat16)
    assert DEVICES["cpu"].supports(torch.float16)
    assert DEVICES["cpu"].module is torch.cpu


@every_row
def test_messages_with_which_an_allocator_gives_up(row: Device):
    own = [text for text in row.out_of_memory if text != "out of memory"]
    assert own
    for text in own:
        assert is_out_of_memory(f"RuntimeError: {text} Tried to allocate 2.00 GiB")
    assert not is_out_of_memory("an error about something else")
    assert not is_out_of_memory("the printer is out of memory")


def test_the_real_message_of_the_cpu_allocator_is_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert is_out_of_memory(str(caught.value))


# ---- types that are not in the table, and those that need their vendor's package ----


def test_an_unknown_type_is_a_generic_accelerator():
    row = device_row("meta")
    assert (row.type, row.label, row.backend, row.visible) == ("meta", DistributedType.NO, "gloo", None)
    assert not row.is_cpu
    assert not row.is_available
    assert device_row(torch.device("cpu")) is DEVICES["cpu"]
    assert device_row("cuda:3") is DEVICES["cuda"]


def ask_a_registered_device(kind: str) -> list[object]:
    install(kind, devices=2, capacity=1000)
    row = best_device()
    row.seed(3)
    state = row.get_rng_state()
    drawn = torch.rand(2, device=row.at(0)).tolist()
    row.set_rng_state(state)
    again = torch.rand(2, device=row.at(0)).tolist()
    row.select(row.at(0))
    kept = torch.ones(25, device=row.at(0))
    row.synchronize()
    row.empty_cache()
    return [
        row.type,
        row.label.value,
        device_row(kind) is row,
        row.is_available,
        row.count,
        [str(row.at(rank)) for rank in range(3)],
        drawn == again,
        row.memory(),
        row.supports(torch.bfloat16),
        len(kept),
    ]


@pytest.mark.parametrize("kind", [*VENDORS, "unknown"])
def test_a_device_that_a_package_registers(kind: str):
    label = "NO" if kind == "unknown" else f"MULTI_{kind.upper()}"
    names = [f"{kind}:0", f"{kind}:1", f"{kind}:0"]
    expected = [kind, label, kind != "unknown", True, 2, names, True, (900, 1000), True, 25]
    assert run_ranks(ask_a_registered_device, 1, kind, fresh=True, initialise=False) == [expected]

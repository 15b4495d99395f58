"""The device table: one row per device type, and every question about a device answered from its row."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from hasten.settings.enums import DistributedType


@dataclass(frozen=True)
class Device:
    """What hasten must know of a device type that `torch.accelerator` does not tell.

    Args:
        type: torch's name of the device type.
        label: what a distributed run on it reports as its type.
        backend: the communication backend of torch.distributed.
        visible: the environment variable that restricts a process to some devices.
        out_of_memory: parts of the messages with which its allocator gives up.
        fp16: whether fp16 autocast and a gradient scaler exist for it.
        shares_memory: whether the device uses the host's memory.
    """

    type: str
    label: DistributedType
    backend: str
    visible: str | None
    out_of_memory: tuple[str, ...]
    fp16: bool = True
    shares_memory: bool = False

    @property
    def module(self) -> ModuleType | Any:
        """`torch.<type>`, e.g. `torch.cuda`; `torch.cpu` for the CPU."""
        return torch.get_device_module(self.type)

    @property
    def is_cpu(self) -> bool:
        """Whether this is the host itself."""
        return self.type == "cpu"

    @property
    def is_available(self) -> bool:
        """Whether this process can use such a device now."""
        if self.is_cpu:
            return True
        present = torch.accelerator.current_accelerator(check_available=True)
        return present is not None and present.type == self.type

    @property
    def count(self) -> int:
        """How many of them this process sees."""
        return 1 if self.is_cpu else torch.accelerator.device_count() if self.is_available else 0

    def at(self, index: int) -> torch.device:
        """The device that local rank `index` uses; ranks beyond the number of devices share them in turn."""
        if self.is_cpu:
            return torch.device("cpu")
        if self.type == "mps":
            return torch.device("mps")
        return torch.device(self.type, index % max(self.count, 1))

    def select(self, device: torch.device) -> None:
        """Make `device` the current one of this process."""
        if not self.is_cpu and device.index is not None:
            torch.accelerator.set_device_index(device.index)

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""
        if not self.is_cpu:
            self.module.synchronize()

    def empty_cache(self) -> None:
        """Give cached, unused device memory back."""
        if not self.is_cpu and hasattr(self.module, "empty_cache"):
            self.module.empty_cache()

    def seed(self, seed: int) -> None:
        """Seed the generators of every device of this type (the CPU's: torch's own)."""
        if self.is_cpu:
            torch.default_generator.manual_seed(seed)
        elif hasattr(self.module, "manual_seed_all"):
            self.module.manual_seed_all(seed)
        else:
            self.module.manual_seed(seed)

    def get_rng_state(self) -> torch.Tensor:
        """State of the current device's generator, a byte tensor on the CPU."""
        return torch.get_rng_state() if self.is_cpu else self.module.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state that `get_rng_state` returned."""
        if self.is_cpu:
            torch.set_rng_state(state)
        else:
            self.module.set_rng_state(state)

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the current device, or of the host."""
        if self.is_cpu or self.shares_memory:
            import psutil

            host = psutil.virtual_memory()
            return host.available, host.total
        free, total = self.module.mem_get_info()
        return int(free), int(total)

    def supports(self, dtype: torch.dtype) -> bool:
        """Whether autocast to `dtype` works on this device."""
        if not torch.amp.is_autocast_available(self.type):
            return False
        if dtype is torch.float16:
            return self.fp16
        if dtype is torch.bfloat16 and hasattr(self.module, "is_bf16_supported"):
            return bool(self.module.is_bf16_supported())
        return True


_GENERIC = ("out of memory",)

DEVICES: dict[str, Device] = {
    row.type: row
    for row in (
        Device(
            "cuda",
            DistributedType.MULTI_GPU,
            "nccl",
            "CUDA_VISIBLE_DEVICES",
            (
                "CUDA out of memory",
                "CUDA error: out of memory",
                "CUDA driver error: out of memory",
                "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",  # cuDNN says so where it finds no memory for its workspace
                "CUDNN_STATUS_ALLOC_FAILED",
                "CUBLAS_STATUS_ALLOC_FAILED",
                "HIP out of memory",
                "HIP error: out of memory",
                "HIPBLAS_STATUS_ALLOC_FAILED",
            ),
        ),
        Device(
            "xpu",
            DistributedType.MULTI_XPU,
            "xccl",
            "ZE_AFFINITY_MASK",
            (
                "XPU out of memory",
                "UR_RESULT_ERROR_OUT_OF_RESOURCES",
                "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
                *_GENERIC,
            ),
        ),
        Device("npu", DistributedType.MULTI_NPU, "hccl", "ASCEND_RT_VISIBLE_DEVICES", ("NPU out of memory", *_GENERIC)),
        Device("mlu", DistributedType.MULTI_MLU, "cncl", "MLU_VISIBLE_DEVICES", ("MLU out of memory", *_GENERIC)),
        Device("musa", DistributedType.MULTI_MUSA, "mccl", "MUSA_VISIBLE_DEVICES", ("MUSA out of memory", *_GENERIC)),
        Device("sdaa", DistributedType.MULTI_SDAA, "tccl", "SDAA_VISIBLE_DEVICES", ("SDAA out of memory", *_GENERIC)),
        Device("hpu", DistributedType.MULTI_HPU, "hccl", "HABANA_VISIBLE_MODULES", ("HPU out of memory", *_GENERIC)),
        Device(
            "neuron",
            DistributedType.MULTI_NEURON,
            "neuron",
            "NEURON_RT_VISIBLE_CORES",
            ("Neuron out of memory", *_GENERIC),
        ),
        Device(
            "mps",
            DistributedType.NO,
            "gloo",
            None,
            ("MPS backend out of memory", "Invalid buffer size: ", *_GENERIC),
            shares_memory=True,
        ),
        Device(
            "cpu",
            DistributedType.MULTI_CPU,
            "gloo",
            None,
            ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory", "std::bad_alloc"),
        ),
    )
}


def device_row(device: torch.device | str) -> Device:
    """The row of a device; an unknown type (a simulated or vendor device) behaves as a generic accelerator."""
    kind = torch.device(device).type
    if kind in DEVICES:
        return DEVICES[kind]
    return Device(
        kind, DistributedType.NO, torch.distributed.Backend.default_device_backend_map.get(kind, "gloo"), None, _GENERIC
    )


def best_device() -> Device:
    """The row of this machine's accelerator, or the CPU's."""
    present = torch.accelerator.current_accelerator(check_available=True)
    return DEVICES["cpu"] if present is None else device_row(present)


def is_out_of_memory(message: str) -> bool:
    """Whether an error message is one with which some device's allocator gives up."""
    return any(text in message for row in DEVICES.values() for text in row.out_of_memory if text not in _GENERIC)

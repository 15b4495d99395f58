"""A simulated accelerator: its tensors say that they are on `npu:0`, their values lie in CPU memory, and every byte is counted.

    memory = install("npu")[0]
    model.to("npu")
    assert memory.live == size_of_model

It makes device moves and device memory testable without hardware: autograd, optimizers, autocast, gloo collectives
(`init_process_group("cpu:gloo,npu:gloo")`) and FSDP2 work on it. As on real hardware, an operation on tensors of two devices is an
error, and so is one tensor too many for the capacity.

What it can not do: overlap (streams and events do nothing: work is done when a call returns), pinned memory, generators of its own
(the CPU generator draws), `torch.accelerator.memory_*` (ask `torch.npu.memory_*`), backward on another device than the first.

It changes the process for good, since torch has a single slot for a backend that it does not know: call `install` once, in a fresh
rank (`run_ranks(..., fresh=True)`) or a process of its own, before the first tensor is made.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch._utils import _rebuild_device_tensor_from_cpu_tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten

MAY_MIX_DEVICES = {
    aten.copy_.default,
    aten._to_copy.default,
    aten.index.Tensor,
    aten.index_put_.default,
    aten.set_.source_Tensor,
}
AUTOCAST_TO_LOWER = ("linear", "matmul", "mm", "bmm", "addmm", "conv1d", "conv2d")


class Memory:
    """Bytes of the storages on one device: now (`live`) and at most since `reset_peak` (`peak`)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def reset_peak(self) -> None:
        self.peak = self.live

    def follow(self, storage: torch.UntypedStorage) -> None:
        """Count a storage once, whatever views of it there are, until it is freed; call again after it was resized."""
        key = storage._cdata
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key).atexit = False
        self.live += storage.nbytes() - self._sizes.get(key, 0)
        self._sizes[key] = storage.nbytes()
        if self.live > self.capacity:
            raise torch.OutOfMemoryError(f"{_name()} out of memory. Tried to allocate {storage.nbytes()} bytes.")
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


class SimulatedTensor(torch.Tensor):
    """A tensor on the device. `on_cpu` is the tensor behind it, which has its values."""

    on_cpu: torch.Tensor

    @staticmethod
    def __new__(cls, on_cpu: torch.Tensor, device: torch.device) -> "SimulatedTensor":
        _MEMORY[device.index].follow(on_cpu.untyped_storage())
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            on_cpu.size(),
            strides=on_cpu.stride(),
            storage_offset=on_cpu.storage_offset(),
            dtype=on_cpu.dtype,
            device=device,
        )
        self.on_cpu = on_cpu
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.on_cpu}@{self.device}"

    def tolist(self) -> Any:
        return self.on_cpu.tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor with a location, so that `torch.load(map_location=...)` decides where it goes."""
        parts = (self.on_cpu.detach(), self.dtype, str(self.device), self.requires_grad)
        return _rebuild_device_tensor_from_cpu_tensor, parts

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})


def install(name: str = "npu", devices: int = 1, capacity: int = 1 << 40) -> list[Memory]:
    """Make `name` a device type of this process, with `devices` devices of `capacity` bytes; return their memories."""
    if _MEMORY:
        raise RuntimeError(f"this process has a simulated device already: {_name()}")
    _MEMORY.extend(Memory(capacity) for _ in range(devices))
    module: Any = _DeviceModule()
    _setup_privateuseone_for_python_backend(name, backend_module=module)
    # torch's own would look for streams in C++.
    torch.accelerator.current_stream = module.current_stream
    torch.accelerator.synchronize = module.synchronize
    # Parameters must stay the same objects when a module moves, as on real devices: optimizers hold them.
    torch.__future__.set_swap_module_params_on_conversion(True)
    every_op, aten_ops = (torch.library.Library(namespace, "IMPL") for namespace in ("_", "aten"))
    _LIBRARIES.extend((every_op, aten_ops))
    every_op.fallback(_run_op, "PrivateUse1")
    every_op.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for op in (aten.empty.memory_format, aten.empty_strided.default):
        aten_ops.impl(op, partial(_run_op, op), "PrivateUse1")
    for op_name in AUTOCAST_TO_LOWER:
        aten_ops.impl(op_name, partial(_run_lowered, getattr(aten, op_name)), "AutocastPrivateUse1")
    _resize_what_fsdp_resizes()
    return list(_MEMORY)


_MEMORY: list[Memory] = []  # by device index
_LIBRARIES: list[torch.library.Library] = []  # a library that is collected takes its kernels along


def _name() -> str:
    return torch._C._get_privateuse1_backend_name()


def _run_op(op: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(op, args, kwargs)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU tensors behind its arguments, and put the results on the device where they belong."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    _require_one_device(func, tensors)
    device = _device_of_result(tensors, kwargs)
    values, options = pytree.tree_map(_values, (args, kwargs))
    if options.get("device") is not None:
        options["device"] = torch.device("cpu")
    results = func(*values, **options)
    if func is aten._to_copy.default and results.untyped_storage()._cdata == values[0].untyped_storage()._cdata:
        results = results.clone()
    given = {id(_values(tensor)): tensor for tensor in tensors}

    def place(result: Any) -> Any:
        if not isinstance(result, torch.Tensor) or device is None:
            return result
        if id(result) not in given:
            return SimulatedTensor(result, device)
        if given[id(result)].shape != result.shape:
            raise NotImplementedError(f"{func} changes a shape in place, which the simulated device can not follow")
        return given[id(result)]

    return pytree.tree_map(place, results)


def _values(value: Any) -> Any:
    return value.on_cpu if isinstance(value, SimulatedTensor) else value


def _device_of_result(tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> torch.device | None:
    """Return where results belong; None is the CPU."""
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        index = _DeviceModule.current if device.index is None else device.index
        if device.type == _name() and index >= len(_MEMORY):
            raise RuntimeError(f"invalid device ordinal: there is no {_name()}:{index}")
        return torch.device(_name(), index) if device.type == _name() else None
    return next((tensor.device for tensor in tensors if isinstance(tensor, SimulatedTensor)), None)


def _require_one_device(func: Any, tensors: list[torch.Tensor]) -> None:
    """Raise what real devices raise. Copies, indices, CPU scalars and collectives are free, as there."""
    if func.namespace != "aten" or func in MAY_MIX_DEVICES:
        return
    devices = sorted({str(tensor.device) for tensor in tensors if tensor.dim() > 0})
    if len(devices) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {', '.join(devices)}! ({func})"
        )


def _run_lowered(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation in the dtype of autocast."""

    def lower(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.device.type == _name():
            return value.to(torch.get_autocast_dtype(_name()))
        return value

    key: Any = torch._C._parse_dispatch_key("AutocastPrivateUse1")
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
        return op(*pytree.tree_map(lower, args), **pytree.tree_map(lower, kwargs))


def _resize_what_fsdp_resizes() -> None:
    """FSDP2 frees and reallocates storages in place; one of our tensors has none of its own, so act on the one behind it."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    def through(resize: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        def resized(tensor: torch.Tensor) -> None:
            resize(_values(tensor))
            if isinstance(tensor, SimulatedTensor):
                _MEMORY[tensor.device.index].follow(tensor.on_cpu.untyped_storage())

        return resized

    fsdp: Any = _fsdp_param
    fsdp.free_storage = through(fsdp.free_storage)
    fsdp.alloc_storage = through(fsdp.alloc_storage)


class _Event:
    """An event that has happened already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


class _Stream:
    """A stream whose work is done already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _DeviceModule:
    """What torch and others ask of `torch.<name>`."""

    Stream, Event = _Stream, _Event
    current = 0

    def device_count(self) -> int:
        return len(_MEMORY)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def is_bf16_supported(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return _DeviceModule.current

    def set_device(self, device: Any) -> None:
        _DeviceModule.current = self._index(device)

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = _DeviceModule.current
        self.set_device(device)
        try:
            yield
        finally:
            _DeviceModule.current = before

    def synchronize(self, device: Any = None) -> None:
        pass

    def current_stream(self, device: Any = None) -> _Stream:
        return _Stream()

    def set_stream(self, stream: Any) -> None:
        pass

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def manual_seed(self, seed: int) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def empty_cache(self) -> None:
        pass

    def memory_allocated(self, device: Any = None) -> int:
        return _MEMORY[self._index(device)].live

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return _MEMORY[self._index(device)].peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        _MEMORY[self._index(device)].reset_peak()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        memory = _MEMORY[self._index(device)]
        return memory.capacity - memory.live, memory.capacity

    def _index(self, device: Any) -> int:
        index = device if isinstance(device, int) or device is None else torch.device(device).index
        return _DeviceModule.current if index is None or index < 0 else index

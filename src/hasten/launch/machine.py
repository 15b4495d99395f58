"""What this machine has, found without importing torch: accelerators and processor cores."""

from __future__ import annotations

import glob
import os
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, NamedTuple

from hasten.settings import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Machine(NamedTuple):
    """What a launch has to know of this machine.

    Attributes:
        accelerators: how many of them a process may use.
        visible: the environment variable by which a process is shown only some of them.
        cores: processor cores that this process may use.
    """

    accelerators: int = 0
    visible: str = "CUDA_VISIBLE_DEVICES"
    cores: int = 1


class _Kind(NamedTuple):
    """A type of accelerator: the torch that can use it, the files of its driver, and how it is hidden.

    `build` is the attribute of torch/version.py that a torch for it sets; `package` the extension that torch needs for it.
    """

    type: str
    visible: str
    files: str
    build: str = ""
    package: str = ""
    counter: Callable[[], int | None] = lambda: None


def _nvidia_count() -> int | None:
    """Devices by NVIDIA's management library: it starts no CUDA context. None if the library is missing."""
    import ctypes

    try:
        library = ctypes.CDLL("nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1")
        if library.nvmlInit_v2():
            return None
        count = ctypes.c_uint()
        failed = library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        library.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return None if failed else count.value


def _amd_count() -> int | None:
    """GPUs among the nodes of the kernel's compute topology; the processors among them have gpu_id 0."""
    found = 0
    for path in glob.glob("/sys/class/kfd/kfd/topology/nodes/*/gpu_id"):
        with open(path) as stream:
            found += stream.read().strip() not in ("", "0")
    return found


_KINDS = (
    _Kind("cuda", "CUDA_VISIBLE_DEVICES", "/dev/nvidia[0-9]* /dev/dxg", build="cuda", counter=_nvidia_count),
    _Kind("rocm", "HIP_VISIBLE_DEVICES", "/dev/kfd", build="hip", counter=_amd_count),
    _Kind("xpu", "ZE_AFFINITY_MASK", "/dev/dri/renderD*", build="xpu"),
    _Kind("npu", "ASCEND_RT_VISIBLE_DEVICES", "/dev/davinci[0-9]*", package="torch_npu"),
    _Kind("mlu", "MLU_VISIBLE_DEVICES", "/dev/cambricon_dev*", package="torch_mlu"),
    _Kind("musa", "MUSA_VISIBLE_DEVICES", "/dev/mtgpu*", package="torch_musa"),
    _Kind("sdaa", "SDAA_VISIBLE_DEVICES", "/dev/tcaicard*", package="torch_sdaa"),
    _Kind("hpu", "HABANA_VISIBLE_MODULES", "/dev/accel/accel* /dev/hl[0-9]*", package="habana_frameworks"),
    _Kind("neuron", "NEURON_RT_VISIBLE_CORES", "/dev/neuron*", package="torch_neuronx"),
)


def look(count_accelerators: bool = True, environ: Mapping[str, str] | None = None) -> Machine:
    """Find out what this machine has; without `count_accelerators`, only its cores."""
    if not count_accelerators:
        return Machine(cores=core_count())
    accelerators, visible = _accelerators(environ)
    return Machine(accelerators, visible, core_count())


def core_count() -> int:
    """Physical cores that this process may run on: its affinity and its container's quota count; at least 1."""
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
    cores = {_siblings(processor) for processor in allowed}
    return max(1, min(len(cores), _quota(len(cores))))


def shown(count: int | None, text: str | None) -> int | None:
    """How many of `count` accelerators a visible-devices variable that holds `text` leaves; None: nobody knows.

    As the drivers do, the list ends at the first number that does not exist.
    """
    if text is None:
        return count
    left = 0
    for name in (part.strip() for part in text.split(",")):
        if not name or (name.lstrip("-").isdigit() and (int(name) < 0 or (count is not None and int(name) >= count))):
            break
        left += 1
    return left


def _accelerators(environ: Mapping[str, str] | None) -> tuple[int, str]:
    builds = _torch_builds()
    if builds is None:
        return 0, Machine().visible
    for kind in _KINDS:
        ours = kind.build in builds if kind.build else PathFinder.find_spec(kind.package) is not None
        if ours and (os.name == "nt" or any(glob.glob(pattern) for pattern in kind.files.split())):
            count = kind.counter()
            if count is None:
                return _ask_torch(), kind.visible
            mask = (environment.snapshot() if environ is None else environ).get(kind.visible)
            return shown(count, mask) or 0, kind.visible
    return int(sys.platform == "darwin" and os.uname().machine == "arm64"), Machine().visible


def _torch_builds() -> set[str] | None:
    """Which of cuda, hip and xpu the installed torch was built for; None without torch. Reads its version file."""
    spec = PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        with open(os.path.join(os.path.dirname(spec.origin), "version.py"), encoding="utf-8") as stream:
            lines = stream.read().splitlines()
    except OSError:
        return set()
    settings = (line.partition("=") for line in lines if "=" in line)
    return {name.partition(":")[0].strip() for name, _, value in settings if value.strip() not in ("None", "False")}


def _ask_torch() -> int:
    """Let a child process count, with torch: slow (torch is imported), but right for every type."""
    import subprocess

    code = "import torch; print(torch.accelerator.device_count())"
    try:
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        return int(answer.stdout.split()[-1]) if answer.returncode == 0 else 0
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return 0


def _siblings(processor: int) -> str:
    """The hardware threads of a processor's core: equal for two processors of one core."""
    try:
        with open(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list") as stream:
            return stream.read().strip()
    except OSError:
        return str(processor)


def _quota(cores: int) -> int:
    """Whole cores that the container's limit leaves."""
    try:
        with open("/sys/fs/cgroup/cpu.max") as stream:
            limit, period = stream.read().split()
        return max(1, int(limit) // int(period))
    except (OSError, ValueError):  # no such limit, or none set ("max")
        return cores

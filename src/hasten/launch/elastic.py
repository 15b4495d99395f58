"""Several machines, restarts and log files: torch.distributed.run does the work, in a process of its own."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hasten.launch.local import say, supervise
from hasten.launch.ports import take_port
from hasten.settings.schema import BY_NAME
from hasten.settings.values import write

if TYPE_CHECKING:
    from hasten.launch.spec import LaunchSpec

# Settings that torch.distributed.run takes under their own names.
_PASSED = ("rdzv_id", "rdzv_conf", "max_restarts", "monitor_interval", "tee", "log_dir", "role")


def run_distributed(spec: LaunchSpec) -> int:
    """Start torch.distributed.run, wait for it, and return its exit code. Neither it nor a process of its outlives us."""
    if spec.machines[1] > 1 or spec.port is None or spec.value("rdzv_backend") not in ("static", "c10d"):
        return _run(spec)
    port, note = take_port(spec.port)
    with port:
        if note:
            say(spec, note)
        return _run(spec._replace(port=port.number))


def _run(spec: LaunchSpec) -> int:
    return supervise(spec, [(None, distributed_command(spec), spec.environment)])


def distributed_command(spec: LaunchSpec) -> list[str]:
    """The command line of torch.distributed.run for this machine."""
    low, high = spec.machines
    options = {
        "nnodes": str(low) if low == high else f"{low}:{high}",
        "nproc_per_node": str(spec.local_processes),
    }
    for name in _PASSED:
        value = spec.value(name)
        if value != BY_NAME[name].default:
            options[name] = write(BY_NAME[name], value)
    options |= _meeting_place(spec)
    flags = [f"--{name}={text}" for name, text in options.items()]
    if spec.value("no_python"):
        flags.append("--no_python")
    return [sys.executable, "-m", "torch.distributed.run", *flags, *spec.program]


def _meeting_place(spec: LaunchSpec) -> dict[str, str]:
    """How the machines, or the processes of the only machine, find each other."""
    backend = spec.value("rdzv_backend")
    alone = spec.machines[1] == 1
    if alone and spec.port is None and backend in ("static", "c10d"):
        return {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}  # its agent takes a free port and keeps it
    if backend == "static" and (alone or spec.value("same_network")):
        return {"node_rank": str(spec.machine_rank), "master_addr": spec.address, "master_port": str(spec.port)}
    place = {"rdzv_backend": backend, "rdzv_endpoint": f"{spec.address}:{spec.port}"}
    return {**place, "node_rank": str(spec.machine_rank)} if backend == "static" else place

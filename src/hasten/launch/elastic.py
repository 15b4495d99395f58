"""Several machines, restarts and log files: torch.distributed.run does the work, in a process of its own."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from hasten.launch.local import say, supervise
from hasten.launch.network import Route, route_to, why_unreachable
from hasten.launch.ports import HeldPort, take_port
from hasten.settings import environment
from hasten.settings.schema import BY_NAME
from hasten.settings.values import write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hasten.launch.spec import LaunchSpec

# Settings that torch.distributed.run takes under their own names.
_PASSED = ("rdzv_id", "rdzv_conf", "max_restarts", "monitor_interval", "tee", "log_dir", "role")
PATIENCE = 30.0  # seconds before the user is told that machines are missing


def run_distributed(spec: LaunchSpec) -> int:
    """Start torch.distributed.run, wait for it, and return its exit code. Neither it nor a process of its outlives us."""
    if spec.machines[1] > 1:
        return _join(spec)
    if spec.port is None or spec.value("rdzv_backend") not in ("static", "c10d"):
        return _run(spec)
    port, note = take_port(spec.port)
    with port:
        if note:
            say(spec, note)
        return _run(spec._replace(port=port.number))


def _join(spec: LaunchSpec) -> int:
    """Take part in a job of several machines."""
    route = route_to(spec.address)
    if route is None:
        say(spec, f"the main machine, {spec.address}, is not known here, or there is no way to it yet")
    elif route.interface and environment.raw("GLOO_SOCKET_IFNAME") is None:
        # gloo would take the address of the host name, which need not have one, or one that others cannot reach
        spec = spec._replace(environment={**spec.environment, "GLOO_SOCKET_IFNAME": route.interface})
    if route and not route.home and spec.value("machine_rank") == 0 and spec.value("rdzv_backend") == "static":
        say(
            spec,
            f"this is to be machine 0, but {spec.address} (main_process_ip) is no address of it; mind --machine_rank",
        )
    patience = threading.Timer(PATIENCE, _tell_what_is_missing, (spec,))
    patience.daemon = True
    patience.start()
    try:
        with _store_host(spec, route) as hosts:
            return _run(spec, route, hosts)
    finally:
        patience.cancel()


@contextmanager
def _store_host(spec: LaunchSpec, route: Route | None) -> Iterator[bool | None]:
    """Whether this is the launch to host the c10d rendezvous; None: torch.distributed.run finds out by itself.

    Its own way is to compare the host name's addresses with the given one, which fails if the name has none, or a loopback one.
    """
    if route is None or spec.value("rdzv_backend") != "c10d":
        yield None
        return
    with ExitStack() as held:
        if route.home:
            try:
                held.enter_context(HeldPort(spec.port or 0))
            except OSError:  # another launch on this machine hosts it
                yield False
                return
        yield route.home


def _tell_what_is_missing(spec: LaunchSpec) -> None:
    """Print a note if the processes of this machine have not been started yet, for want of the other machines."""
    import psutil

    try:
        if any(process.ppid() != os.getpid() for process in psutil.Process().children(recursive=True)):
            return  # torch.distributed.run has started processes, so all machines have met
    except psutil.Error:
        return  # one has ended while we looked
    low, high = spec.machines
    obstacle = why_unreachable(spec.address, spec.port or 0)
    reason = f"; here it cannot be reached: {obstacle}" if obstacle else ""
    say(
        spec,
        f"still waiting for the other machines: {low if low == high else f'{low} to {high}'} are to meet at "
        f"{spec.address}:{spec.port}{reason}. Each needs the same command, with a --machine_rank of its own.",
    )


def _run(spec: LaunchSpec, route: Route | None = None, hosts: bool | None = None) -> int:
    return supervise(spec, [(None, distributed_command(spec, route, hosts), spec.environment)])


def distributed_command(spec: LaunchSpec, route: Route | None = None, hosts: bool | None = None) -> list[str]:
    """The command line of torch.distributed.run for this machine.

    Args:
        spec: the launch.
        route: the way from this machine to the main one, where it is known.
        hosts: whether this launch hosts the c10d rendezvous; None: not said.
    """
    low, high = spec.machines
    options = {
        "nnodes": str(low) if low == high else f"{low}:{high}",
        "nproc_per_node": str(spec.local_processes),
    }
    for name in _PASSED:
        value = spec.value(name)
        if name == "rdzv_conf" and hosts is not None and "is_host" not in dict(value):
            value = (*value, ("is_host", int(hosts)))
        if value != BY_NAME[name].default:
            options[name] = write(BY_NAME[name], value)
    options |= _meeting_place(spec)
    if route is not None and spec.value("rdzv_backend") != "static":
        options["local_addr"] = route.address  # else the others are told the host name, which they may not know
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

"""Several machines, restarts and log files: torch.distributed.run does the work, in a process of its own."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from hasten.launch.local import say, supervise
from hasten.launch.network import Route, route_to, why_unreachable
from hasten.launch.ports import HeldPort, take_port
from hasten.launch.spec import LOCALHOST
from hasten.settings import environment
from hasten.settings.schema import BY_NAME
from hasten.settings.values import write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hasten.launch.spec import LaunchSpec

# Settings that torch.distributed.run takes under their own names.
_PASSED = ("rdzv_id", "max_restarts", "monitor_interval", "tee", "log_dir", "role")
_BUILT_IN = ("static", "c10d")  # rendezvous that need no server besides
_TORCH_GRACE = 30  # seconds that torch.distributed.run gives its processes to end
PATIENCE = 30.0  # seconds before the user is told that machines are missing


def run_distributed(spec: LaunchSpec) -> int:
    """Start torch.distributed.run, wait for it, and return its exit code. Neither it nor a process of its outlives us."""
    if spec.machines[1] > 1:
        return _join(spec)
    if spec.port is None or spec.value("rdzv_backend") not in _BUILT_IN:
        return _run(spec)
    port, note = take_port(spec.port)
    with port:
        if note:
            say(spec, note)
        return _run(spec._replace(port=port.number))


def _join(spec: LaunchSpec) -> int:
    """Take part in a job of several machines."""
    route = route_to(spec.address)
    static = spec.value("rdzv_backend") == "static"
    if route is None:
        say(spec, f"{spec.address} (main_process_ip) is not known on this machine, or there is no way to it yet")
    elif static and spec.machine_rank == 0 and not route.home:
        say(
            spec,
            f"this is to be machine 0, but {spec.address} (main_process_ip) is no address of it: mind --machine_rank",
        )
    ended = threading.Event()
    threading.Thread(target=_tell_who_is_missing, args=(spec, ended), daemon=True).start()
    try:
        with _rendezvous_host(spec, route) as hosts:
            return _run(spec, route, hosts)
    finally:
        ended.set()


@contextmanager
def _rendezvous_host(spec: LaunchSpec, route: Route | None) -> Iterator[bool | None]:
    """Whether this launch is to host the c10d rendezvous; None: torch.distributed.run finds out by itself.

    Its own way is to look for the given address among those of the host name, which has none on some machines, and a loopback
    address on many.
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


def _tell_who_is_missing(spec: LaunchSpec, ended: threading.Event) -> None:
    """Print a note if this machine's processes are not started for a while, for want of the other machines."""
    deadline = time.monotonic() + PATIENCE
    while not ended.wait(1.0):
        if _has_grandchildren():  # torch.distributed.run has started them, so all machines have met
            return
        if time.monotonic() >= deadline:
            break
    else:
        return
    low, high = spec.machines
    obstacle = why_unreachable(spec.address, spec.port or 0)
    say(
        spec,
        f"still waiting for other machines. {low if low == high else f'{low} to {high}'} are to meet at "
        f"{spec.address}:{spec.port}{f', which cannot be reached from here ({obstacle})' if obstacle else ''}; each needs the "
        "same command, with a --machine_rank of its own",
    )


def _has_grandchildren() -> bool:
    import psutil

    try:
        return any(process.ppid() != os.getpid() for process in psutil.Process().children(recursive=True))
    except psutil.Error:  # one has ended while we looked
        return False


def _run(spec: LaunchSpec, route: Route | None = None, hosts: bool | None = None) -> int:
    variables = {**spec.environment, **_variables(spec, route)}
    return supervise(spec, [(None, distributed_command(spec, route, hosts), variables)])


def _variables(spec: LaunchSpec, route: Route | None) -> dict[str, str]:
    """What torch needs beyond the command line, unless the user has set it."""
    wanted = {}
    if route is not None and route.interface:
        # gloo would take the address of the host name, which need not have one, or one that others cannot reach
        wanted["GLOO_SOCKET_IFNAME"] = route.interface
    if _starts_again(spec):
        # else processes that have been started again find the addresses of the ended ones in the store, and wait for them
        wanted["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if spec.value("grace_period") > _TORCH_GRACE:
        wanted["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(spec.value("grace_period")))
    return {name: text for name, text in wanted.items() if environment.raw(name) is None}


def _starts_again(spec: LaunchSpec) -> bool:
    low, high = spec.machines
    return low != high or bool(spec.value("max_restarts"))


def distributed_command(spec: LaunchSpec, route: Route | None = None, hosts: bool | None = None) -> list[str]:
    """The command line of torch.distributed.run for this machine.

    Args:
        spec: the launch.
        route: the way from this machine to the main one, where there are several and it is known.
        hosts: whether this launch hosts the c10d rendezvous; None: not said.
    """
    low, high = spec.machines
    options = {
        "nnodes": str(low) if low == high else f"{low}:{high}",
        "nproc_per_node": str(spec.local_processes),
    }
    for name in _PASSED:
        value = spec.value(name)
        if value != BY_NAME[name].default:
            options[name] = write(BY_NAME[name], value)
    options |= _meeting_place(spec, route)
    if pairs := _rendezvous_options(spec, hosts):
        options["rdzv_conf"] = write(BY_NAME["rdzv_conf"], tuple(pairs.items()))
    flags = [f"--{name}={text}" for name, text in options.items()]
    if spec.value("no_python"):
        flags.append("--no_python")
    return [sys.executable, "-m", "hasten.world.agent", *flags, *spec.program]


def _is_watched(spec: LaunchSpec) -> bool:
    """Whether the machines are to hear of each other's end."""
    return spec.machines[1] > 1 and spec.value("rdzv_backend") in _BUILT_IN


def _meeting_place(spec: LaunchSpec, route: Route | None) -> dict[str, str]:
    """How the machines, or the processes of the only machine, find each other."""
    backend = spec.value("rdzv_backend")
    place = f"{spec.address}:{spec.port}"
    if _is_watched(spec):
        backend = f"hasten-{backend}"
    elif backend in _BUILT_IN:
        if spec.port is None:
            place = "localhost:0"  # its agent takes a free port and keeps it
        elif backend == "static" and not _starts_again(spec):
            return {"node_rank": "0", "master_addr": spec.address, "master_port": str(spec.port)}
        return {"rdzv_backend": "c10d", "rdzv_endpoint": place, "local_addr": LOCALHOST}
    address = {"local_addr": route.address} if route else {}  # else the others are told the host name
    return {"rdzv_backend": backend, "rdzv_endpoint": place, **address}


def _rendezvous_options(spec: LaunchSpec, hosts: bool | None) -> dict[str, str]:
    pairs = dict(spec.value("rdzv_conf"))
    if hosts is not None:
        pairs.setdefault("is_host", str(int(hosts)))
    if spec.value("rdzv_backend") == "static" and _is_watched(spec):
        pairs["rank"] = str(spec.machine_rank)
    return pairs

"""Starting the processes of a job from Python: `notebook_launcher` and `debug_launcher`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from hasten.launch.processes import USED_BEFORE, WorkerFailed, run
from hasten.settings import environment, export
from hasten.settings.enums import DistributedType
from hasten.settings.resolve import resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hasten.launch.machine import Machine

DEFAULT_PORT = "29500"


class PrepareForLaunch:
    """Calls a function in a started process, after telling the process which one it is.

    Sets FORK_LAUNCHED and, for a process of a distributed job, LOCAL_RANK and RANK. What was written can be undone by
    `hasten.settings.export.reset()`.

    Args:
        launcher: the function.
        distributed_type: the label of the job; "NO" for a single process.
        debug: the job is one of `debug_launcher`: its processes have ranks whatever the label says.
    """

    def __init__(
        self, launcher: Callable[..., Any], distributed_type: str | DistributedType = "NO", debug: bool = False
    ) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Run the function as process `index` of this machine."""
        variables: dict[str, str | None] = {"FORK_LAUNCHED": "1"}
        if self.debug or self.distributed_type != DistributedType.NO:
            before = int(environment.raw("GROUP_RANK") or 0) * int(environment.raw("LOCAL_WORLD_SIZE") or 0)
            variables |= {"LOCAL_RANK": str(index), "RANK": str(before + index)}
        export.variables(variables)
        self.launcher(*args)


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = DEFAULT_PORT,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Train from a notebook: call `function(*args)` in `num_processes` processes, and return when all have returned.

    One process runs in the notebook itself. Several are forked from it, so that functions of a cell work; an accelerator must
    not have been used in the notebook before.

    Args:
        function: builds its own Accelerator.
        args: its arguments.
        num_processes: processes on this machine.
        mixed_precision: "no", "fp16", "bf16" or "fp8": what an Accelerator without an own value uses.
        use_port: port by which the processes meet; on one machine, a free one is taken if it is in use.
        master_addr: address of the machine with node_rank 0.
        node_rank: number of this machine of `num_nodes`; the launcher is called once on each.
        num_nodes: machines of the job.
        rdzv_backend, rdzv_endpoint: "static" (or, on one machine, "c10d"), and "address:port" instead of the two arguments.
        rdzv_conf, rdzv_id, log_line_prefix_template: not built yet; only their defaults are accepted.
        max_restarts: how often all processes are started again after a failure; on one machine.
        monitor_interval: accepted for compatibility: the end of a process is noticed at once.

    Raises:
        ValueError: the arguments are contradictory, or an Accelerator exists already.
        RuntimeError: a process failed (`WorkerFailed`, with its traceback), or an accelerator is in use in the notebook.
        NotImplementedError: what is not built yet.
    """
    _check_counts(num_processes, node_rank, num_nodes, max_restarts)
    assert num_processes is not None
    _refuse_unbuilt(num_nodes, rdzv_backend, rdzv_conf, rdzv_id, log_line_prefix_template)
    precision = resolve(["mixed_precision"], arguments={"mixed_precision": mixed_precision})["mixed_precision"].value
    if rdzv_endpoint:
        master_addr, _, port = rdzv_endpoint.rpartition(":")
        use_port = port or use_port
    if num_processes * num_nodes == 1:
        with export.exported({"ACCELERATE_MIXED_PRECISION": precision}):
            function(*args)
        return
    machine = _machine_for(num_processes)
    method = _start_method(machine)
    job = _Job(function, tuple(args), num_processes, method, "MULTI_GPU" if machine.accelerators else "MULTI_CPU")
    added = {"ACCELERATE_MIXED_PRECISION": precision, **_threads(machine, num_processes, method)}
    _run_with_restarts(job, added, master_addr, int(use_port), node_rank, num_nodes, max_restarts)


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Call `function(*args)` in several processes on the CPU, joined by gloo, to try out distributed code.

    The process group is made by the first Accelerator (or PartialState) of each process.

    Args:
        function: what to run.
        args: its arguments.
        num_processes: how many.

    Raises:
        ValueError: this process is itself one of a distributed job.
        RuntimeError: a process failed (`WorkerFailed`, with its traceback).
    """
    import tempfile

    from hasten.launch.machine import look

    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        raise ValueError(
            "debug_launcher: this process has a process group already, which started processes cannot share. End it with "
            "torch.distributed.destroy_process_group() (or Accelerator.end_training()) first."
        )
    resolve(["num_processes"], arguments={"num_processes": num_processes})
    machine = look(count_accelerators=False)
    method = _start_method(machine)
    job = _Job(function, tuple(args), num_processes, method, "MULTI_CPU", debug=True)
    with tempfile.TemporaryDirectory() as folder:
        added = {
            "ACCELERATE_MIXED_PRECISION": "no",
            "ACCELERATE_USE_CPU": "true",
            "ACCELERATE_DEBUG_RDV_FILE": os.path.join(folder, "meeting"),
            **_threads(machine, num_processes, method),
        }
        _run(job, added, "127.0.0.1", 0, 0, 1)


class _Job(NamedTuple):
    """What to run, in how many processes, started how."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    processes: int
    method: str
    distributed_type: str
    debug: bool = False


def _run(job: _Job, added: dict[str, str], address: str, port: int, node: int, nodes: int) -> None:
    """Start the processes of this machine and wait for them. Raises WorkerFailed."""
    from hasten.launch.ports import is_busy, take_port

    if nodes > 1 and node == 0 and is_busy(port):
        raise ValueError(
            f"use_port={port} is in use on this machine. Choose another, the same on all {nodes} machines."
        )
    held, note = take_port(port) if nodes == 1 else (None, "")
    if note and str(port) != DEFAULT_PORT:
        print(f"hasten: {note}", file=sys.stderr, flush=True)
    variables = {
        "WORLD_SIZE": str(job.processes * nodes),
        "LOCAL_WORLD_SIZE": str(job.processes),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(held.number if held else port),
        "TORCHELASTIC_USE_AGENT_STORE": None,  # rank 0 keeps the store itself
        **added,
    }
    target = PrepareForLaunch(job.function, job.distributed_type, job.debug)
    try:
        with export.exported(variables):
            run(target, job.args, job.processes, job.method)
    finally:
        if held is not None:
            held.release()


def _run_with_restarts(
    job: _Job, added: dict[str, str], address: str, port: int, node: int, nodes: int, restarts: int
) -> None:
    for attempt in range(restarts + 1):
        try:
            _run(job, added, address, port, node, nodes)
        except WorkerFailed as failure:
            if attempt == restarts:
                raise
            print(f"hasten: {failure.summary}; restart {attempt + 1} of {restarts}", file=sys.stderr, flush=True)
        else:
            return


def _check_counts(num_processes: int | None, node_rank: int, num_nodes: int, max_restarts: int) -> None:
    if num_processes is None:
        raise ValueError(
            "You have to specify the number of processes you would like to use: add `num_processes=...` to your call."
        )
    resolve(["num_processes"], arguments={"num_processes": num_processes})
    if num_nodes < 1 or not 0 <= node_rank < num_nodes:
        raise ValueError(f"node_rank={node_rank} must lie between 0 and num_nodes - 1 (num_nodes={num_nodes}).")
    if max_restarts < 0:
        raise ValueError(f"max_restarts={max_restarts} must be at least 0.")
    if max_restarts and num_nodes > 1:
        raise NotImplementedError(
            "notebook_launcher: restarts of a job on several machines are not built yet; `hasten launch --max_restarts` has them."
        )


def _refuse_unbuilt(
    nodes: int, backend: str, conf: Mapping[str, Any] | None, rendezvous_id: str, prefix: str | None
) -> None:
    chosen = {
        "rdzv_conf": conf or None,
        "rdzv_id": None if rendezvous_id == "none" else rendezvous_id,
        "log_line_prefix_template": prefix,
        "rdzv_backend": None if backend == "static" or (backend == "c10d" and nodes == 1) else backend,
    }
    for name, value in chosen.items():
        if value is not None:
            raise NotImplementedError(
                f"notebook_launcher({name}={value!r}) is not built yet: leave it out, or use `hasten launch`."
            )


def _machine_for(num_processes: int) -> Machine:
    """This machine, after checking that it can run so many processes, and that this process may start them."""
    from hasten.launch.machine import look

    context = sys.modules.get("hasten.world.context")
    if context is not None and (context.CONTEXT.world is not None or context.CONTEXT.partial_state):
        raise ValueError(
            "To train on several processes from your notebook, the `Accelerator` should only be initialized inside your training "
            "function. Restart your notebook and make sure no cell initializes an `Accelerator`."
        )
    machine = look(count_accelerators=not environment.get("use_cpu"))
    if not machine.accelerators:
        return machine
    if num_processes > machine.accelerators:
        raise ValueError(
            f"num_processes={num_processes}, but this machine has only {machine.accelerators} accelerators to use. Ask for fewer, "
            "or set the environment variable ACCELERATE_USE_CPU=true to run on the CPU."
        )
    torch = sys.modules.get("torch")
    if torch is not None and any(
        getattr(torch, name).is_initialized() for name in ("cuda", "xpu") if hasattr(torch, name)
    ):
        raise RuntimeError("The accelerator has been used in this process already." + USED_BEFORE)
    if "bitsandbytes" in sys.modules:
        raise RuntimeError("bitsandbytes has been imported, which starts the accelerator." + USED_BEFORE)
    return machine


def _start_method(machine: Machine) -> str:
    """ "fork", for which a function may be defined in a cell; "spawn" where forked processes cannot use the device."""
    broken = machine.accelerators and machine.visible in ("ZE_AFFINITY_MASK", "HIP_VISIBLE_DEVICES")
    return "fork" if hasattr(os, "fork") and not broken else "spawn"


def _threads(machine: Machine, processes: int, method: str) -> dict[str, str]:
    """CPU threads of each process, unless the user has chosen."""
    if environment.raw("OMP_NUM_THREADS") is not None:
        return {}
    # GNU's OpenMP hangs in a forked process that uses threads after its parent did.
    unsafe = method == "fork" and "torch" in sys.modules
    return {"OMP_NUM_THREADS": "1" if unsafe else str(max(1, machine.cores // processes))}

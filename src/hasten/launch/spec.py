"""The resolved plan of a launch: what will be started, where, with which variables, and where each value came from."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any, NamedTuple

from hasten.launch.machine import Machine, look
from hasten.settings import environment
from hasten.settings.resolve import ENVIRONMENT, FILE, FLAG, Value
from hasten.settings.schema import BY_NAME, ELASTIC, TABLE, WORKER, Setting
from hasten.settings.values import nearest, write

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Who starts the processes.
REPLACE = "replace"  # one process, which takes the place of this one
LOCAL = "local"  # we do: several processes on this machine
DISTRIBUTED = "distributed"  # torch.distributed.run does: several machines, restarts, log files

# Intel's OpenMP on the CPU: threads stay on their cores, and sleep soon. The last number is the first core to use.
KMP_AFFINITY = "granularity=fine,compact,1,{}"
KMP_BLOCKTIME = "1"
LOCALHOST = "127.0.0.1"


class LaunchSpec(NamedTuple):
    """A launch, decided in full before anything is started.

    Attributes:
        engine: REPLACE, LOCAL or DISTRIBUTED.
        program: what python is given; with `no_python`, the program itself and its arguments.
        processes: processes of the whole job.
        local_processes: those of this machine.
        machines: fewest and most machines.
        machine_rank: number of this machine.
        address: where rank 0 is reached.
        port: its port; None: any free one.
        environment: variables that every process gets on top of the launcher's own.
        settings: every setting with its origin.
    """

    engine: str
    program: tuple[str, ...]
    processes: int
    local_processes: int
    machines: tuple[int, int]
    machine_rank: int
    address: str
    port: int | None
    environment: dict[str, str]
    settings: dict[str, Value]

    def value(self, name: str) -> Any:
        """The effective value of a setting."""
        return self.settings[name].value

    def command(self, unbuffered: bool = False) -> list[str]:
        """The command line of one process; `unbuffered`: a python that is stopped has written all that it printed."""
        if self.value("no_python"):
            return list(self.program)
        return [sys.executable, *(["-u"] if unbuffered else []), *self.program]

    def rank_environment(self, local_rank: int, port: int) -> dict[str, str]:
        """The variables of one process of a LOCAL launch, beyond those of all; by torchrun's names."""
        variables = {
            "RANK": str(local_rank),
            "WORLD_SIZE": str(self.processes),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(port),
        }
        if "KMP_AFFINITY" in self.environment:  # else all processes would sit on the same cores
            threads = self.value("num_cpu_threads_per_process") or (int(self.environment["OMP_NUM_THREADS"]),)
            variables["KMP_AFFINITY"] = KMP_AFFINITY.format(local_rank * threads[0])
        return variables


def plan(
    settings: Mapping[str, Value],
    script: str,
    arguments: Sequence[str] = (),
    machine: Machine | None = None,
    environ: Mapping[str, str] | None = None,
) -> LaunchSpec:
    """Decide how to start `script`.

    Args:
        settings: every setting of the launcher, resolved.
        script: path, module or program.
        arguments: what goes to it, untouched.
        machine: what this machine has; looked up by default.
        environ: environment variables; the process's own by default.

    Raises:
        ValueError: the settings contradict each other or this machine; the message says what to change.
    """
    settings = dict(settings)
    _refuse_contradictions(settings)
    _refuse_without_effect(settings)
    if settings["use_fsdp"].value:
        from hasten.launch.sharding import refuse_contradictions

        refuse_contradictions(settings)
    if settings["multi_gpu"].value and settings["use_cpu"].origin != FLAG:
        settings["use_cpu"] = Value(False, FLAG, "--multi_gpu")
    program = _program(settings, script, arguments)
    machine = machine or look(not settings["use_cpu"].value, environ)
    low, high = settings["num_machines"].value
    total = _process_count(settings, machine, high)
    engine = _engine(settings, total, high)
    _check_machines(settings)
    local = total // high
    return LaunchSpec(
        engine=engine,
        program=program,
        processes=total,
        local_processes=local,
        machines=(low, high),
        machine_rank=settings["machine_rank"].value or 0,
        address=settings["main_process_ip"].value or LOCALHOST,
        port=settings["main_process_port"].value or None,
        environment=_environment(settings, machine, local, engine, environ),
        settings=settings,
    )


def _named(setting: str, value: Value) -> str:
    """`num_processes is 4 (--num_processes)`."""
    return f"{setting} is {value.value} ({value.where})"


def _refuse_contradictions(settings: Mapping[str, Value]) -> None:
    typed = {name for name, value in settings.items() if value.origin == FLAG and value.value}
    for row in TABLE:
        for other in row.excludes:
            if row.name in typed and other in typed:
                flags = " and ".join(f"--{name.dest}" for name in TABLE if name.name in (row.name, other))
                raise ValueError(f"{flags} contradict each other; give one of them.")
    count = settings["num_processes"]
    if "multi_gpu" in typed and count.origin == FLAG and count.value < 2:
        raise ValueError("--multi_gpu asks for several processes, but --num_processes is 1. Leave --multi_gpu out.")


def _refuse_without_effect(settings: Mapping[str, Value]) -> None:
    """Refuse what is set for a feature that is off. Variables stay, as scripts may read them; so does a file that is overruled."""
    for row in TABLE:
        value = settings.get(row.name)
        if not row.needs or value is None or value.origin not in (FLAG, FILE):
            continue
        switch, needed = BY_NAME[row.needs], settings[row.needs]
        if needed.value or (value.origin == FILE and (needed.chosen or not value.value)):
            continue
        otherwise = f"leave {row.flags[0]} out" if value.origin == FLAG else f"--no_{switch.dest} to run without"
        raise ValueError(
            f"{_named(row.name, value)}, which has no effect without {switch.flags[0]}. Give {switch.flags[0]}, too, "
            f"or {otherwise}."
        )


def _program(settings: Mapping[str, Value], script: str, arguments: Sequence[str]) -> tuple[str, ...]:
    if settings["module"].value:
        _check_module(script)
        target: tuple[str, ...] = ("-m", script)
    elif settings["no_python"].value:
        from shutil import which  # costs as much as a small launch; needed here alone

        if which(script) is None:
            raise ValueError(f"The program {script!r} does not exist, or may not be executed (--no_python).")
        return (script, *arguments)
    else:
        _check_script(script)
        target = (script,)
    if settings["as_accelerate"].value:
        target = ("-m", "hasten.shadow", *target)
    return (*target, *arguments)


def _check_script(script: str) -> None:
    if os.path.exists(script):
        return
    folder = os.path.dirname(script)
    try:
        others = [os.path.join(folder, name) for name in os.listdir(folder or ".") if name.endswith(".py")]
    except OSError:
        others = []
    raise ValueError(f"The script {script!r} does not exist in {os.getcwd()}{nearest(script, others)}.")


def _check_module(module: str) -> None:
    top = module.partition(".")[0]
    if top not in sys.builtin_module_names and PathFinder.find_spec(top, ["", *sys.path]) is None:
        raise ValueError(
            f"The module {module!r} cannot be found: no {top!r} in {os.getcwd()} or among the installed ones."
        )


def _process_count(settings: Mapping[str, Value], machine: Machine, machines: int) -> int:
    """Processes of the whole job."""
    wanted = settings["num_processes"]
    usable = _usable_accelerators(settings, machine)
    if not wanted.chosen:
        if settings["multi_gpu"].value and not usable:
            raise ValueError(
                "--multi_gpu starts one process per accelerator, but this machine has none. Say how many CPU processes you "
                "want: --num_processes N."
            )
        return (usable or 1) * machines
    total: int = wanted.value
    if total % machines:
        raise ValueError(
            f"{_named('num_processes', wanted)}, which cannot be shared equally by {machines} machines "
            f"({settings['num_machines'].where}). It counts the processes of the whole job."
        )
    if usable and total // machines > usable:
        raise ValueError(
            f"{_named('num_processes', wanted)}: {total // machines} processes on this machine, which has only {usable} "
            f"accelerator{'s' if usable > 1 else ''} to use. Ask for at most {usable * machines}, or run on the CPU with --cpu."
        )
    return total


def _usable_accelerators(settings: Mapping[str, Value], machine: Machine) -> int:
    """Accelerators of this machine that the job may use; 0 on the CPU."""
    if settings["use_cpu"].value:
        return 0
    chosen = settings["gpu_ids"]
    if chosen.value in (None, ("all",)):
        return machine.accelerators
    if not machine.accelerators:
        raise ValueError(f"{chosen.where} names accelerators, but this machine has none. Leave it out, or give --cpu.")
    return len(chosen.value)


def _engine(settings: Mapping[str, Value], total: int, machines: int) -> str:
    special = any(
        row.applies == ELASTIC and settings[row.name].value != row.default
        for row in TABLE
        if row.name != "same_network"  # accelerate's files say it of one machine, too
    )
    if machines > 1 or special:
        return DISTRIBUTED
    return LOCAL if total > 1 else REPLACE


def _check_machines(settings: Mapping[str, Value]) -> None:
    """Refuse what cannot find the other machines."""
    low, high = settings["num_machines"].value
    names = ("machine_rank", "main_process_port", "rdzv_backend", "max_restarts")
    rank, port, backend, restarts = (settings[name] for name in names)
    if rank.value is not None and rank.value >= high:
        raise ValueError(
            f"{_named('machine_rank', rank)}, but there are {high} machines ({settings['num_machines'].where}): ranks go "
            f"from 0 to {high - 1}."
        )
    if high == 1 and backend.value in ("static", "c10d"):
        return
    needed = ["main_process_ip", "main_process_port"]
    if backend.value == "static":
        needed.append("machine_rank")
        if low != high:
            raise ValueError(f"num_machines {low}:{high} is elastic, which needs --rdzv_backend c10d (or etcd).")
        if restarts.value:
            raise ValueError(
                f"{_named('max_restarts', restarts)}: several machines can only start again together if they meet anew, which "
                "needs --rdzv_backend c10d (or etcd)."
            )
    missing = [f"--{name}" for name in needed if settings[name].value is None]
    if missing:
        raise ValueError(
            f"{_named('num_machines', Value(high, where=settings['num_machines'].where))}, with {_named('rdzv_backend', backend)}"
            f": that also needs {', '.join(missing)}. All machines are given the address and a free port of the machine with "
            "rank 0; each is given its own rank."
        )
    if port.value == 0:
        raise ValueError(
            f"{_named('main_process_port', port)}: all machines must know the port. Choose a free one of the main machine."
        )
    if rank.value != 0 or high == 1:
        return
    from hasten.launch.ports import is_busy  # imports socket

    if is_busy(port.value):
        raise ValueError(f"{_named('main_process_port', port)}, which is in use here. Choose another, on all machines.")


def _environment(
    settings: Mapping[str, Value], machine: Machine, local: int, engine: str, environ: Mapping[str, str] | None
) -> dict[str, str]:
    """What every process gets, beyond its rank."""
    variables = {
        row.env: write(row, settings[row.name].value)
        for row in TABLE
        if row.flags and _is_exported(row, settings[row.name]) and (not row.needs or settings[row.needs].value)
    }
    if not settings["num_cpu_threads_per_process"].chosen and local > 1:
        variables["OMP_NUM_THREADS"] = str(max(1, machine.cores // local))
    if settings["use_cpu"].value:
        if environment.raw("KMP_BLOCKTIME", environ) is None:
            variables["KMP_BLOCKTIME"] = KMP_BLOCKTIME
        # torch.distributed.run gives all processes of a machine the same value: they would share the first cores
        if environment.raw("KMP_AFFINITY", environ) is None and (engine != DISTRIBUTED or local == 1):
            variables["KMP_AFFINITY"] = KMP_AFFINITY.format(0)
    ids = settings["gpu_ids"].value
    if ids not in (None, ("all",)) and not settings["use_cpu"].value:
        variables[machine.visible] = ",".join(ids)
    return variables


def _is_exported(row: Setting, value: Value) -> bool:
    """Values from the environment reach the processes as they are."""
    return (
        row.applies == WORKER
        and value.value is not None
        and value.origin != ENVIRONMENT
        and (row.always or value.chosen)
    )

"""Which of how many processes this one is, from the variables of torchrun, SLURM or MPI."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_PORT = 29500

# rank, world size, local rank, local world size: the names that each MPI family exports
_MPI_FAMILIES = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    "Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


@dataclass(frozen=True)
class Place:
    """This process's place in its job.

    `launcher` names who started the job ("torchrun", "SLURM", an MPI family), or is None for a process on its own.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str | None = None
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT

    def __post_init__(self) -> None:
        for name, index, count in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
        ):
            if not 0 <= index < count:
                raise ValueError(
                    f"The environment says that this process has {name} {index} of {count} ({self.launcher}): a {name} must "
                    "lie between 0 and the number of processes - 1. Start the job with `hasten launch`, torchrun, srun or "
                    "mpirun, or unset RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE to run alone."
                )

    def as_environment(self) -> dict[str, str]:
        """The variables by which torch and other libraries find the same place."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def read_place(environ: Mapping[str, str] | None = None) -> Place:
    """Read this process's place from the environment.

    torchrun's variables (`RANK` and `WORLD_SIZE`) win; then MPI's; then those of a SLURM step of several tasks.

    Raises:
        ValueError: the variables are incomplete or contradict each other.
    """
    environ = os.environ if environ is None else environ
    if environ.get("RANK") and environ.get("WORLD_SIZE"):
        return _from_torchrun(environ)
    slurm = _whole(environ, "SLURM_STEP_NUM_TASKS", 1) > 1 and "SLURM_PROCID" in environ
    for family, names in _MPI_FAMILIES.items():
        # Inside an allocation mpirun starts one SLURM task per machine, so its ranks see SLURM's numbers of that task. srun in turn
        # sets PMI's rank and size, but no local rank.
        if _whole(environ, names[1], 1) > 1 and (names[2] in environ or not slurm):
            return _from_mpi(family, names, environ)
    if slurm:
        return _from_slurm(environ)
    _check_alone(environ)
    return Place()


def threads_are_chosen(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the user or a launcher has fixed the number of threads of a process."""
    environ = os.environ if environ is None else environ
    return any(environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))


def _check_alone(environ: Mapping[str, str]) -> None:
    if not environ.get("RANK") and _whole(environ, "WORLD_SIZE", 1) == 1:
        return
    missing, partner = ("WORLD_SIZE", "RANK") if environ.get("RANK") else ("RANK", "WORLD_SIZE")
    raise ValueError(
        f"The environment variable {missing} is missing although {partner}={environ[partner]} is set: a process of a job needs "
        "both. Start the job with `hasten launch` or torchrun, or unset both to run alone."
    )


def _from_torchrun(environ: Mapping[str, str]) -> Place:
    size = _whole(environ, "WORLD_SIZE")
    local_size = _whole(environ, "LOCAL_WORLD_SIZE", size)
    rank = _whole(environ, "RANK")
    return Place(
        rank=rank,
        world_size=size,
        local_rank=_whole(environ, "LOCAL_RANK", rank % local_size if local_size > 0 else 0),
        local_world_size=local_size,
        launcher="torchrun",
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_whole(environ, "MASTER_PORT", DEFAULT_PORT),
    )


def _from_slurm(environ: Mapping[str, str]) -> Place:
    size = _whole(environ, "SLURM_STEP_NUM_TASKS")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    counts = expand_task_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
    node = _whole(environ, "SLURM_NODEID", 0)
    # Jobs that share a machine must not share a port; every task of one step computes the same one.
    step = 1009 * _whole(environ, "SLURM_JOB_ID", 0) + _whole(environ, "SLURM_STEP_ID", 0)
    return Place(
        rank=_whole(environ, "SLURM_PROCID"),
        world_size=size,
        local_rank=_whole(environ, "SLURM_LOCALID", 0),
        local_world_size=counts[node] if node < len(counts) else size,
        launcher="SLURM",
        master_addr=environ.get("MASTER_ADDR") or first_host(nodes),
        master_port=_whole(environ, "MASTER_PORT", 15000 + step % 15000),
    )


def _from_mpi(family: str, names: tuple[str, str, str, str], environ: Mapping[str, str]) -> Place:
    rank_name, size_name, local_rank_name, local_size_name = names
    size = _whole(environ, size_name)
    local_size = _whole(environ, local_size_name, size)
    if local_size < size and "MASTER_ADDR" not in environ:
        raise ValueError(
            f"{family} started {size} processes, {local_size} of them on this machine, but MASTER_ADDR is not set: the "
            "processes cannot find each other. Export MASTER_ADDR=<address of the machine of rank 0> to all of them "
            "(Open MPI: mpirun -x MASTER_ADDR=...)."
        )
    rank = _whole(environ, rank_name)
    return Place(
        rank=rank,
        world_size=size,
        local_rank=_whole(environ, local_rank_name, rank % local_size if local_size > 0 else 0),
        local_world_size=local_size,
        launcher=family,
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_whole(environ, "MASTER_PORT", DEFAULT_PORT),
    )


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: `node[03-05,9],other` gives `node03`."""
    match = re.match(r"(?:[^,\[\]]|\[[^\]]+\])+", nodes)
    if match is None:
        raise ValueError(f"SLURM's node list {nodes!r} cannot be read. Export MASTER_ADDR=<host of rank 0> instead.")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[0])


def expand_task_counts(counts: str) -> list[int]:
    """Tasks per node as SLURM writes them: `2(x3),1` gives `[2, 2, 2, 1]`."""
    expanded: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"SLURM's tasks per node {counts!r} cannot be read; expected a form such as '2(x3),1'.")
        expanded += [int(match[1])] * int(match[2] or 1)
    return expanded


def _whole(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "").strip()
    if not text:
        if default is None:
            raise ValueError(f"The environment variable {name} is missing; a process of a distributed job needs it.")
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"The environment variable {name} is {text!r}, but must be a whole number.") from None

from typing import Any

import pytest

from hasten.settings.place import Place, expand_task_counts, first_host, read_place, threads_are_chosen

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "4711",
}
SLURM = {
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3",
}
MPI = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    "Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def test_a_process_without_variables_is_alone():
    assert read_place({}) == Place(0, 1, 0, 1, None, "127.0.0.1", 29500)


def test_torchrun():
    place = read_place(TORCHRUN)
    assert place == Place(5, 8, 1, 4, "torchrun", "host", 4711)
    assert place.as_environment() == TORCHRUN


def test_torchrun_without_local_variables_is_on_one_machine():
    assert read_place({"RANK": "2", "WORLD_SIZE": "4"}) == Place(2, 4, 2, 4, "torchrun")
    assert read_place({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}).local_rank == 1


def test_a_torchrun_job_of_one_process_is_a_job():
    assert read_place({"RANK": "0", "WORLD_SIZE": "1"}).launcher == "torchrun"


def test_slurm():
    place = read_place(SLURM)
    assert place == Place(4, 5, 0, 1, "SLURM", "gpu07", 15000 + (1009 * 12 + 3) % 15000)
    assert read_place({**SLURM, "MASTER_ADDR": "chosen", "MASTER_PORT": "1"}).master_addr == "chosen"


def test_slurm_steps_that_share_a_machine_do_not_share_a_port():
    ports = {
        read_place({**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).master_port
        for job in (1, 2)
        for step in (0, 1)
    }
    assert len(ports) == 4
    assert all(15000 <= port < 30000 for port in ports)
    assert read_place({**SLURM, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}).master_port == read_place(SLURM).master_port


def test_a_slurm_step_of_one_task_is_alone():
    assert read_place({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == Place()


@pytest.mark.parametrize(("family", "names"), MPI.items())
def test_mpi(family: str, names: tuple[str, str, str, str]):
    variables = dict(zip(names, ("3", "4", "1", "2"), strict=True))
    assert read_place({**variables, "MASTER_ADDR": "host"}) == Place(3, 4, 1, 2, family, "host", 29500)


@pytest.mark.parametrize("names", MPI.values())
def test_an_mpi_job_of_one_process_is_alone(names: tuple[str, str, str, str]):
    assert read_place(dict(zip(names, ("0", "1", "0", "1"), strict=True))) == Place()


def test_mpi_without_local_variables_is_on_one_machine():
    assert read_place({"PMI_RANK": "2", "PMI_SIZE": "3"}) == Place(2, 3, 2, 3, "Intel MPI")


def test_mpi_on_several_machines_needs_an_address():
    variables = dict(zip(MPI["Open MPI"], ("3", "4", "1", "2"), strict=True))
    with pytest.raises(
        ValueError, match=r"Open MPI started 4 processes, 2 of them on this machine, but MASTER_ADDR is not set"
    ):
        read_place(variables)


def test_mpirun_inside_a_slurm_allocation_is_mpi():
    # The daemons of mpirun are one SLURM task per machine; the ranks inherit their variables.
    daemon = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_NODEID": "1",
    }
    for family, names in MPI.items():
        variables = dict(zip(names, ("3", "4", "1", "2"), strict=True))
        assert read_place({**daemon, **variables, "MASTER_ADDR": "host"}) == Place(3, 4, 1, 2, family, "host")


def test_srun_with_pmi_is_slurm():
    assert read_place({**SLURM, "PMI_RANK": "4", "PMI_SIZE": "5"}).launcher == "SLURM"


def test_torchrun_wins_over_slurm_and_mpi():
    assert read_place({**SLURM, "PMI_RANK": "1", "PMI_SIZE": "2", **TORCHRUN}).rank == 5


def test_half_of_torchrun_gives_way_to_slurm_and_mpi():
    # Batch scripts export a world size, and leave the rank to srun or mpirun.
    assert read_place({**SLURM, "WORLD_SIZE": "5"}).launcher == "SLURM"
    assert read_place({"WORLD_SIZE": "2", "PMI_RANK": "1", "PMI_SIZE": "2"}).launcher == "Intel MPI"


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_an_empty_variable_is_none(name: str):
    assert read_place({name: ""}) == Place()


def test_a_world_size_of_one_needs_no_rank():
    assert read_place({"WORLD_SIZE": "1"}) == Place()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "2"}, "variable RANK is missing although WORLD_SIZE=2 is set.*hasten launch"),
        ({"RANK": "0"}, "variable WORLD_SIZE is missing although RANK=0 is set.*unset both"),
        ({"WORLD_SIZE": "two"}, "variable WORLD_SIZE is 'two', but must be a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2.5"}, "variable WORLD_SIZE is '2.5', but must be a whole number"),
        ({"RANK": "a", "WORLD_SIZE": "2"}, "variable RANK is 'a', but must be a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"rank 2 of 2 \(torchrun\): a rank must lie between 0"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "rank -1 of 2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "rank 0 of 0"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "4"}, "local rank 4 of 2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}, "local rank 0 of 0"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "http"}, "variable MASTER_PORT is 'http'"),
        ({"SLURM_STEP_NUM_TASKS": "x"}, "variable SLURM_STEP_NUM_TASKS is 'x', but must be a whole number"),
        ({**SLURM, "SLURM_PROCID": ""}, "variable SLURM_PROCID is missing"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2*3"}, r"tasks per node '2\*3' cannot be read"),
        ({**SLURM, "SLURM_STEP_NODELIST": ",a"}, "node list ',a' cannot be read. Export MASTER_ADDR"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "variable OMPI_COMM_WORLD_RANK is missing"),
        ({"PMI_SIZE": "x"}, "variable PMI_SIZE is 'x'"),
        ({"PMI_SIZE": "2", "PMI_RANK": "2"}, r"rank 2 of 2 \(Intel MPI\)"),
    ],
)
def test_bad_variables(environ: dict[str, str], message: str):
    with pytest.raises(ValueError, match=message):
        read_place(environ)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node7", "node7"),
        ("node7,node8", "node7"),
        ("node[03-05,9],other", "node03"),
        ("node[9,3-5]", "node9"),
        ("a,b[1-2]", "a"),
        ("n[1-2]-ib", "n1-ib"),
        ("n[1-2]-ib,x", "n1-ib"),
        ("rack[2-3]node[04,06-09],x", "rack2node04"),
        ("[1-2]", "1"),
        ("gpu-1.cluster.example", "gpu-1.cluster.example"),
    ],
)
def test_first_host(nodes: str, host: str):
    assert first_host(nodes) == host


@pytest.mark.parametrize(("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1, 3(x2)", [1, 3, 3])])
def test_expand_task_counts(text: str, counts: list[int]):
    assert expand_task_counts(text) == counts


@pytest.mark.parametrize("text", ["", "2x3", "(x3)", "2(x)", "-1", "2,,3"])
def test_expand_task_counts_refuses_what_it_cannot_read(text: str):
    with pytest.raises(ValueError, match="cannot be read; expected a form such as"):
        expand_task_counts(text)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_threads_are_chosen(name: str):
    assert threads_are_chosen({name: "3"})
    assert not threads_are_chosen({name: ""})
    assert not threads_are_chosen({})


def test_the_environment_of_the_process_is_the_default(monkeypatch: Any):
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert read_place() == Place()
    assert not threads_are_chosen()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert read_place().rank == 1
    assert threads_are_chosen()

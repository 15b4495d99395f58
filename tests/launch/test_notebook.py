import inspect
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from hasten.launch import notebook
from hasten.launch.machine import Machine
from hasten.launch.notebook import PrepareForLaunch, debug_launcher, notebook_launcher
from hasten.launch.processes import WorkerFailed
from hasten.settings import export
from tests.launch.jobs import wait_until_gone

fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="functions of a test cannot be sent to spawned processes")
pytestmark = fork

NAMES = (
    *(
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "FORK_LAUNCHED",
    ),
    *("OMP_NUM_THREADS", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU", "ACCELERATE_DEBUG_RDV_FILE"),
    "TORCHELASTIC_USE_AGENT_STORE",
)


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    yield
    export.reset()


@pytest.fixture
def record(tmp_path):
    """A function that writes the environment of the process that calls it, and what was written by all."""

    def write(*args):
        place = os.environ.get("RANK", "alone")
        (tmp_path / place).write_text(repr((args, {name: os.environ.get(name) for name in NAMES})))

    def read():
        return {path.name: eval(path.read_text()) for path in sorted(tmp_path.iterdir())}

    return write, read


def test_signatures_are_the_references():
    names = "function args num_processes mixed_precision use_port master_addr node_rank num_nodes rdzv_backend rdzv_endpoint "
    names += "rdzv_conf rdzv_id max_restarts monitor_interval log_line_prefix_template"
    assert list(inspect.signature(notebook_launcher).parameters) == names.split()
    assert str(inspect.signature(debug_launcher)).endswith("num_processes: 'int' = 2) -> 'None'")
    assert list(inspect.signature(PrepareForLaunch).parameters) == ["launcher", "distributed_type", "debug"]


def test_one_process_runs_here_with_its_precision(record):
    write, read = record
    notebook_launcher(write, (1, "a"), num_processes=1, mixed_precision="bf16")
    args, env = read()["alone"]
    assert args == (1, "a")
    assert {name: text for name, text in env.items() if text} == {"ACCELERATE_MIXED_PRECISION": "bf16"}
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ


def test_several_processes_know_their_place_and_precision(record):
    write, read = record
    notebook_launcher(write, ("x",), num_processes=2, mixed_precision="bf16")
    seen = read()
    assert list(seen) == ["0", "1"]
    for rank, (args, env) in seen.items():
        assert args == ("x",)
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == (rank, rank, "2", "2")
        assert (env["ACCELERATE_MIXED_PRECISION"], env["FORK_LAUNCHED"], env["MASTER_ADDR"]) == (
            "bf16",
            "1",
            "127.0.0.1",
        )
        assert env["OMP_NUM_THREADS"] == "1"  # torch is loaded here
        assert env["ACCELERATE_USE_CPU"] is None
    assert seen["0"][1]["MASTER_PORT"] == seen["1"][1]["MASTER_PORT"]
    assert "RANK" not in os.environ
    assert "WORLD_SIZE" not in os.environ


def test_debug_launcher_runs_on_the_cpu(record):
    write, read = record
    debug_launcher(write, num_processes=3)
    seen = read()
    assert list(seen) == ["0", "1", "2"]
    assert {env["ACCELERATE_USE_CPU"] for _, env in seen.values()} == {"true"}
    assert {env["WORLD_SIZE"] for _, env in seen.values()} == {"3"}
    assert len({env["ACCELERATE_DEBUG_RDV_FILE"] for _, env in seen.values()}) == 1


def test_a_busy_port_is_replaced(record):
    write, read = record
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        number = str(listener.getsockname()[1])
        notebook_launcher(write, num_processes=2, use_port=number)
    assert read()["0"][1]["MASTER_PORT"] != number


def test_a_port_of_ones_own(record):
    write, read = record
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    notebook_launcher(write, num_processes=2, use_port=number)
    assert read()["1"][1]["MASTER_PORT"] == str(number)


def test_this_machine_may_be_one_of_several(record):
    write, read = record
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    notebook_launcher(write, num_processes=2, num_nodes=3, node_rank=1, rdzv_endpoint=f"10.0.0.1:{number}")
    seen = read()
    assert list(seen) == ["2", "3"]
    env = seen["3"][1]
    assert (env["LOCAL_RANK"], env["WORLD_SIZE"], env["GROUP_RANK"]) == ("1", "6", "1")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.1", str(number))


def fails_on_rank_1():
    if os.environ["RANK"] == "1":
        raise KeyError("inner")
    time.sleep(300)


def test_an_error_comes_with_its_traceback():
    began = time.monotonic()
    with pytest.raises(WorkerFailed) as caught:
        debug_launcher(fails_on_rank_1)
    assert time.monotonic() - began < 30
    assert (caught.value.rank, caught.value.code) == (1, 1)
    assert str(caught.value).startswith("rank 1 failed: KeyError: 'inner'\n\nThe traceback of rank 1:\nTraceback")
    assert "in fails_on_rank_1" in str(caught.value)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize(
    ("function", "code", "said"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -9, "failed: signal SIGKILL"),
        (lambda: os._exit(5), 5, "failed: exit code 5"),
        (lambda: sys.exit(6), 6, "failed: SystemExit: 6"),
    ],
)
def test_every_kind_of_end(function, code, said):
    with pytest.raises(WorkerFailed) as caught:
        notebook_launcher(function, num_processes=2)
    assert caught.value.code == code
    assert said in str(caught.value)


def test_a_clean_exit_is_no_failure():
    notebook_launcher(lambda: sys.exit(0), num_processes=2)


def test_the_cause_is_reported_and_not_its_victims(tmp_path):
    def function():
        if os.environ["RANK"] == "1":
            (tmp_path / "failed").touch()
            raise ValueError("the cause")
        while not (tmp_path / "failed").exists():
            time.sleep(0.001)
        time.sleep(0.02)
        raise ConnectionError("the peer has gone")

    with pytest.raises(WorkerFailed, match="rank 1 failed: ValueError: the cause"):
        notebook_launcher(function, num_processes=2)


def test_a_failed_job_leaves_nobody(tmp_path):
    def function():
        sleep = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
        rank = os.environ["RANK"]
        (tmp_path / f"pids-{rank}").write_text(f"{os.getpid()} {sleep.pid if rank == '0' else os.getpid()}")
        if rank == "1":
            sleep.kill()
            while not (tmp_path / "pids-0").exists():
                time.sleep(0.01)
            raise ValueError
        time.sleep(300)

    with pytest.raises(WorkerFailed):
        notebook_launcher(function, num_processes=2)
    pids = [int(pid) for path in tmp_path.iterdir() for pid in path.read_text().split()]
    assert len(pids) == 4
    assert wait_until_gone(pids) == []


def test_restarts(tmp_path, capfd):
    def function():
        attempts = tmp_path / os.environ["RANK"]
        attempts.write_text(attempts.read_text() + "x" if attempts.exists() else "x")
        if os.environ["RANK"] == "0" and len(attempts.read_text()) < 3:
            raise ValueError("again")

    notebook_launcher(function, num_processes=2, max_restarts=2)
    assert (tmp_path / "0").read_text() == "xxx"
    assert "restart 2 of 2" in capfd.readouterr().err
    (tmp_path / "0").unlink()
    with pytest.raises(WorkerFailed):
        notebook_launcher(function, num_processes=2, max_restarts=1)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({}, ValueError, "specify the number of processes"),
        ({"num_processes": 0}, ValueError, "the argument num_processes is 0"),
        ({"num_processes": 2, "mixed_precision": "bf17"}, ValueError, "must be one of no, fp8, fp16, bf16"),
        ({"num_processes": 1, "mixed_precision": "bf17"}, ValueError, "must be one of no, fp8, fp16, bf16"),
        ({"num_processes": 2, "node_rank": 2, "num_nodes": 2}, ValueError, "node_rank=2 must lie between 0 and"),
        ({"num_processes": 2, "max_restarts": -1}, ValueError, "must be at least 0"),
        ({"num_processes": 2, "max_restarts": 1, "num_nodes": 2}, NotImplementedError, "restarts of a job on several"),
        ({"num_processes": 2, "rdzv_conf": {"a": 1}}, NotImplementedError, "rdzv_conf={'a': 1}"),
        ({"num_processes": 2, "rdzv_backend": "etcd"}, NotImplementedError, "rdzv_backend='etcd'"),
        ({"num_processes": 2, "rdzv_backend": "c10d", "num_nodes": 2}, NotImplementedError, "rdzv_backend='c10d'"),
        ({"num_processes": 2, "log_line_prefix_template": "x"}, NotImplementedError, "log_line_prefix_template"),
    ],
)
def test_bad_arguments(options, error, said):
    with pytest.raises(error) as caught:
        notebook_launcher(print, **options)
    assert said in str(caught.value)


def test_a_default_that_means_the_same_is_accepted(record):
    write, read = record
    notebook_launcher(write, num_processes=2, rdzv_backend="c10d", rdzv_conf={}, monitor_interval=1)
    assert len(read()) == 2


def test_an_accelerator_that_exists_is_refused():
    from hasten.world.context import CONTEXT

    CONTEXT.partial_state["device"] = "cpu"
    with pytest.raises(ValueError, match="should only be initialized inside your training function"):
        notebook_launcher(print, num_processes=2)


def test_debug_launcher_forgets_what_the_parent_was(tmp_path):
    from hasten.world.context import CONTEXT

    CONTEXT.partial_state["device"] = "cpu"

    def function():
        (tmp_path / os.environ["RANK"]).write_text(repr(CONTEXT.partial_state))

    debug_launcher(function)
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["{}", "{}"]
    assert CONTEXT.partial_state == {"device": "cpu"}


def test_debug_launcher_refuses_to_share_a_process_group(monkeypatch):
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="has a process group already"):
        debug_launcher(print)


def test_accelerators_are_counted_and_must_be_fresh(monkeypatch):
    import torch

    from hasten.launch import machine

    monkeypatch.setattr(machine, "look", lambda **_: Machine(2))
    with pytest.raises(ValueError, match="only 2 accelerators to use"):
        notebook_launcher(print, num_processes=3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="Restart the notebook"):
        notebook_launcher(print, num_processes=2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setitem(sys.modules, "bitsandbytes", torch)
    with pytest.raises(RuntimeError, match="bitsandbytes has been imported"):
        notebook_launcher(print, num_processes=2)


def test_where_a_forked_process_cannot_use_the_device_it_is_spawned():
    assert notebook._start_method(Machine(2, "ZE_AFFINITY_MASK")) == "spawn"
    assert notebook._start_method(Machine(2, "HIP_VISIBLE_DEVICES")) == "spawn"
    assert notebook._start_method(Machine(2, "CUDA_VISIBLE_DEVICES")) == "fork"
    assert notebook._start_method(Machine()) == "fork"


def test_a_message_about_a_device_in_use_is_explained():
    assert "Restart the notebook" in str(
        WorkerFailed(0, 1, "RuntimeError: Cannot re-initialize CUDA in forked subprocess")
    )


@pytest.mark.parametrize(
    ("label", "debug", "expected"),
    [
        ("NO", False, {"FORK_LAUNCHED": "1"}),
        ("MULTI_CPU", False, {"FORK_LAUNCHED": "1", "RANK": "1", "LOCAL_RANK": "1"}),
        ("MULTI_GPU", False, {"FORK_LAUNCHED": "1", "RANK": "1", "LOCAL_RANK": "1"}),
        ("NO", True, {"FORK_LAUNCHED": "1", "RANK": "1", "LOCAL_RANK": "1"}),
    ],
)
def test_prepare_for_launch(label, debug, expected):
    seen = {}
    PrepareForLaunch(lambda *args: seen.update(args=args, env=dict(os.environ)), label, debug)(1, "x")
    assert seen["args"] == ("x",)
    assert {name: seen["env"][name] for name in NAMES if name in seen["env"]} == expected
    export.reset()
    assert "FORK_LAUNCHED" not in os.environ


def test_gloo_trains_in_the_started_processes(tmp_path):
    """One real job: torch is loaded in this process already, and the processes meet at the port that they are given."""

    def function():
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(total)
        (tmp_path / os.environ["RANK"]).write_text(str((total.item(), torch.get_num_threads())))
        dist.destroy_process_group()

    debug_launcher(function, num_processes=2)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["(3.0, 1)"] * 2

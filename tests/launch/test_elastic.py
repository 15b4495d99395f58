import os
import signal
import sys

import pytest

from hasten.launch.elastic import _variables, distributed_command
from hasten.launch.machine import Machine
from hasten.launch.spec import plan
from hasten.settings.resolve import resolve
from hasten.settings.schema import TABLE
from tests.launch.jobs import FAMILY, LIMIT, Jobs, living, wait_until_gone

NAMES = [row.name for row in TABLE if row.flags]
TWO = {"num_machines": 2, "main_process_ip": "host", "main_process_port": 4000, "num_processes": 4}


def command(script=sys.executable, arguments=("x",), **flags) -> list[str]:
    settings = resolve(NAMES, flags={"use_cpu": True, **flags}, environ={})
    words = distributed_command(plan(settings, script, arguments, Machine(cores=4), {}))
    assert words[:3] == [sys.executable, "-m", "hasten.world.agent"]
    return words[3:]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            {"max_restarts": 3, "num_processes": 2},
            "--nnodes=1 --nproc_per_node=2 --max_restarts=3 --rdzv_backend=c10d --rdzv_endpoint=localhost:0 "
            "--local_addr=127.0.0.1",
        ),
        (
            {"max_restarts": 1, "main_process_port": 4000},
            "--nnodes=1 --nproc_per_node=1 --max_restarts=1 --rdzv_backend=c10d --rdzv_endpoint=127.0.0.1:4000 "
            "--local_addr=127.0.0.1",
        ),
        (
            {"tee": "3", "main_process_port": 4000},
            "--nnodes=1 --nproc_per_node=1 --tee=3 --node_rank=0 --master_addr=127.0.0.1 --master_port=4000",
        ),
        (
            {**TWO, "machine_rank": 1},
            "--nnodes=2 --nproc_per_node=2 --rdzv_backend=hasten-static --rdzv_endpoint=host:4000 --rdzv_conf=rank=1",
        ),
        (
            {**TWO, "machine_rank": 1, "same_network": True},
            "--nnodes=2 --nproc_per_node=2 --rdzv_backend=hasten-static --rdzv_endpoint=host:4000 --rdzv_conf=rank=1",
        ),
        (
            {**TWO, "num_machines": "1:4", "rdzv_backend": "c10d", "rdzv_id": "job7", "rdzv_conf": "timeout=3,a=b"},
            "--nnodes=1:4 --nproc_per_node=1 --rdzv_id=job7 --rdzv_backend=hasten-c10d --rdzv_endpoint=host:4000 "
            "--rdzv_conf=timeout=3,a=b",
        ),
        (
            {"tee": "3", "log_dir": "logs", "role": "trainer", "monitor_interval": 0.5},
            "--nnodes=1 --nproc_per_node=1 --monitor_interval=0.5 --tee=3 --log_dir=logs --role=trainer --rdzv_backend=c10d "
            "--rdzv_endpoint=localhost:0 --local_addr=127.0.0.1",
        ),
    ],
)
def test_command_lines(flags, expected):
    assert command(**flags) == [*expected.split(), sys.executable, "x"]


def test_programs_and_modules():
    assert command(max_restarts=1, no_python=True)[-3:] == ["--no_python", sys.executable, "x"]
    assert command(script="json.tool", max_restarts=1, module=True)[-3:] == ["-m", "json.tool", "x"]
    assert command(max_restarts=1, as_accelerate=True)[-4:] == ["-m", "hasten.shadow", sys.executable, "x"]


@pytest.mark.parametrize(("seconds", "expected"), [(10.0, None), (90.5, "91")])
def test_torch_gives_the_processes_the_grace_period_too(seconds, expected):
    flags = {"use_cpu": True, "max_restarts": 1, "grace_period": seconds}
    settings = resolve(NAMES, flags=flags, environ={})
    spec = plan(settings, sys.executable, ("x",), Machine(cores=4), {})
    assert _variables(spec, None).get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") == expected


@pytest.fixture(scope="module")
def shared_jobs(tmp_path_factory):
    jobs = Jobs(tmp_path_factory.mktemp("elastic"))
    yield jobs
    jobs.end_all()


def test_a_failing_job_is_restarted(shared_jobs):
    text = """
import os, sys
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("attempt", attempt, "rank", os.environ["RANK"], os.environ["ACCELERATE_MIXED_PRECISION"], sys.argv[1:], flush=True)
sys.exit(attempt == "0")
"""
    script = shared_jobs.script(text)
    done = shared_jobs.run("--cpu", "--max_restarts", "1", "--mixed_precision", "bf16", script, "--num_processes", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"attempt {i} rank 0 bf16 ['--num_processes', '2']" for i in (0, 1)]


def test_the_exit_code_of_a_process_is_the_jobs(shared_jobs):
    done = shared_jobs.run("--cpu", "--rdzv_backend", "c10d", shared_jobs.script("raise SystemExit(7)", "seven.py"))
    assert done.returncode == 7


def test_processes_that_have_saved_are_not_started_again_here(shared_jobs):
    text = "import os\nprint(os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\nraise SystemExit(75)"
    done = shared_jobs.run("--cpu", "--max_restarts", "3", shared_jobs.script(text, "saved.py"))
    assert (done.returncode, done.stdout) == (75, "0\n")
    assert "failed with" not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_the_end_of_the_parent_leaves_nobody(jobs, name):
    job = jobs.start("--cpu", "--num_processes", "2", "--rdzv_backend", "c10d", jobs.script(FAMILY))
    pids = jobs.pids(2)
    job.send_signal(getattr(signal, name))
    job.communicate(timeout=LIMIT)
    assert wait_until_gone(pids) == []
    assert job.returncode == (143 if name == "SIGTERM" else -9)
    assert living(pids) == []

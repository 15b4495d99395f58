"""Launches over two machines: network namespaces with host names that nobody can resolve."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.launch.jobs import LIMIT, PREEMPTIBLE, Jobs

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("unshare")),
    reason="network namespaces need root, `ip` and `unshare`",
)
PREFIX = f"hasten{os.getpid()}"
MAIN = "10.77.0.1"
WHOLE = """
import torch, hasten
torch.set_num_threads(1)
accelerator = hasten.Accelerator()
rank = accelerator.process_index
ranks = accelerator.gather(torch.tensor([rank])).tolist()
with accelerator.main_process_first():
    pass
model = accelerator.prepare(torch.nn.Linear(1, 1))
accelerator.backward(model(torch.full((1, 1), float(rank))).sum())
place = (rank, accelerator.num_processes, accelerator.local_process_index)
print(place, ranks, next(model.parameters()).grad.item(), flush=True)
accelerator.end_training()
"""
WAIT = """
import os, sys, time
rank = os.environ["RANK"]
if sys.argv[1:] == [rank]:
    sys.exit(7)
with open(f"up-{rank}", "w") as file:
    file.write("\\n")
time.sleep(300)
"""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=LIMIT)


@pytest.fixture(scope="module", autouse=True)
def two_machines() -> Iterator[None]:
    made: list[str] = []
    try:
        for number in (0, 1):
            name = f"{PREFIX}-{number}"
            try:
                _ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespace can be made: {error.stderr.decode()}")
            made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        first, second = made
        _ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
        for number, name in enumerate(made):
            _ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield
    finally:
        for name in made:  # their interfaces and addresses go with them
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=LIMIT)


def start(jobs: Jobs, number: int, *options: str) -> subprocess.Popen[str]:
    """`hasten launch` on one of the two machines, one process each."""
    # every step takes the place of the one before, so that the process is the launcher
    name = f'hostname {PREFIX}-{number}; exec "$@"'
    words = ["ip", "netns", "exec", f"{PREFIX}-{number}", "unshare", "--uts", "sh", "-c", name, "sh"]
    words += [sys.executable, "-m", "hasten", "launch", "--cpu", "--num_machines", "2", "--num_processes", "2"]
    words += ["--machine_rank", str(number), "--main_process_ip", MAIN, "--main_process_port", "29511", *options]
    job = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=jobs.folder, env=jobs.environ
    )
    jobs._started.append(job)
    return job


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_machines_are_one_job(jobs, backend):
    script = jobs.script(WHOLE)
    launches = [start(jobs, number, "--rdzv_backend", backend, script) for number in (0, 1)]
    said = [job.communicate(timeout=LIMIT) for job in launches]
    assert [job.returncode for job in launches] == [0, 0], said
    # c10d gives the ranks to the machines as they come
    assert sorted(out for out, _ in said) == [f"({rank}, 2, 0) [0, 1] 0.5\n" for rank in (0, 1)]


def test_a_failure_ends_the_job_on_the_other_machine(jobs):
    script = jobs.script(WAIT)
    launches = [start(jobs, number, script, "1") for number in (0, 1)]
    (_, at_main), _ = (job.communicate(timeout=LIMIT) for job in launches)
    assert [job.returncode for job in launches] == [1, 7]
    assert f"rank 1 on {PREFIX}-1 failed with exit code 7; the processes of this machine are stopped" in at_main


def test_an_interrupt_ends_the_job_on_the_other_machine(jobs):
    script = jobs.script(WAIT)
    launches = [start(jobs, number, script) for number in (0, 1)]
    jobs.wait_for_files("up-*", 2)
    launches[1].send_signal(signal.SIGINT)
    (_, at_main), _ = (job.communicate(timeout=LIMIT) for job in launches)
    assert [job.returncode for job in launches] == [1, 130]
    assert f"{PREFIX}-1 was stopped by SIGINT" in at_main


@pytest.mark.parametrize(("name", "number"), [("SIGTERM", 1), ("SIGTERM", 0), ("SIGUSR1", 1)])
def test_a_machine_that_is_taken_away_lets_all_save_and_leave(jobs, name, number):
    script = jobs.script(PREEMPTIBLE)
    launches = [start(jobs, index, script) for index in (0, 1)]
    jobs.wait_for_files("up-*", 2)
    launches[number].send_signal(getattr(signal, name))
    said = [job.communicate(timeout=LIMIT) for job in launches]
    assert [job.returncode for job in launches] == [75, 75], said
    assert [path.name for path in (jobs.folder / "run" / "checkpoints").iterdir()] == ["checkpoint_0"]

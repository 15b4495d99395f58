import os
import subprocess
import sys

import pytest

from tests.launch.jobs import LIMIT

SHOW = """
import os, sys
print(os.getpid(), sorted(name for name in os.environ if name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS")))
print(os.environ["KMP_AFFINITY"], os.environ["KMP_BLOCKTIME"], os.environ["ACCELERATE_USE_CPU"], sys.argv)
"""


@pytest.mark.skipif(os.name != "posix", reason="processes cannot be replaced there")
def test_the_process_itself_becomes_the_script(jobs):
    job = jobs.start("--cpu", jobs.script(SHOW), "--num_processes", "2")
    out, err = job.communicate(timeout=LIMIT)
    assert (job.returncode, err) == (0, "")
    first, second = out.splitlines()
    assert first == f"{job.pid} []"
    assert second == "granularity=fine,compact,1,0 1 true ['script.py', '--num_processes', '2']"


def test_the_exit_code_is_the_scripts(jobs):
    assert jobs.run("--cpu", jobs.script("raise SystemExit(9)")).returncode == 9


def test_where_processes_cannot_be_replaced_the_script_is_waited_for(jobs):
    text = """
import os, sys
from hasten.launch import single
single.os = type(sys)("os")  # Windows, as far as that module can see
single.os.name = "nt"
from hasten.cli.main import main
print("before", flush=True)
code = main(["launch", "--cpu", "script.py"])
print("after", code)
"""
    jobs.script("print('script', flush=True); raise SystemExit(5)")
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=jobs.folder, env=jobs.environ, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.stdout.splitlines() == ["before", "script", "after 5"], done.stderr

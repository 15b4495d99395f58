import os
import queue
import sys

import pytest

from hasten.launch.worker import Worker
from tests.launch.jobs import LIMIT


@pytest.fixture
def run(capfd):
    def run(code: str, rank: int | None = 0, keep: bool = True) -> Worker:
        ended: queue.SimpleQueue[Worker | int] = queue.SimpleQueue()
        worker = Worker([sys.executable, "-c", code], os.environ, rank, keep, ended)
        assert ended.get(timeout=LIMIT) is worker
        return worker

    return run


def test_stderr_passes_through_and_its_end_is_kept(run, capfd):
    worker = run("import sys; sys.stderr.write('loss 1\\rloss 0'); sys.exit(3)")
    worker.drain()
    failure = worker.failure()
    assert (failure.rank, failure.code, failure.stderr) == (0, 3, "loss 1\rloss 0")
    assert capfd.readouterr().err == "loss 1\rloss 0"
    assert worker.failed
    assert not worker.running


def test_stderr_may_be_left_alone(run, capfd):
    worker = run("import sys; sys.stderr.write('x'); sys.exit(1)", keep=False)
    assert worker.failure().stderr is None
    assert capfd.readouterr().err == "x"


def test_success_is_no_failure(run):
    assert not run("pass").failed


def test_whom_we_stop_has_not_failed():
    ended: queue.SimpleQueue[Worker | int] = queue.SimpleQueue()
    worker = Worker([sys.executable, "-c", "import time; time.sleep(300)"], os.environ, 1, False, ended)
    worker.stopped = True
    worker.kill()
    ended.get(timeout=LIMIT)
    assert worker.process.returncode != 0
    assert not worker.failed
    worker.send(15)  # nobody is there; nothing happens
    worker.kill()


def test_a_failure_is_dated_by_the_traceback_that_led_to_it(run):
    worker = run("import atexit, time; atexit.register(time.sleep, 0.5); raise ValueError")
    assert worker.ended_at - worker.failed_at > 0.3
    silent = run("import os; os._exit(1)")
    assert silent.failed_at == silent.ended_at


def test_the_process_has_a_session_of_its_own(run, capfd):
    run("import os; print(os.getsid(0) == os.getpid())" if os.name == "posix" else "print(True)")
    assert capfd.readouterr().out == "True\n"

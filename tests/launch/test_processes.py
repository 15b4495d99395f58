import os
import pickle

import pytest

from hasten.launch import processes
from hasten.launch.processes import WorkerFailed


def touch(index: int, folder: str) -> None:
    with open(os.path.join(folder, str(index)), "w") as file:
        file.write(str(os.getpid()))


def fail(index: int) -> None:
    raise ValueError(f"from {index} " + "x" * 100_000)


@pytest.mark.parametrize("method", ["spawn", *(["fork"] if hasattr(os, "fork") else [])])
def test_each_process_gets_its_number(tmp_path, method):
    processes.run(touch, (str(tmp_path),), 2, method)
    pids = {path.read_text() for path in tmp_path.iterdir()}
    assert len(pids) == 2
    assert str(os.getpid()) not in pids


@pytest.mark.skipif(not hasattr(os, "fork"), reason="spawning costs seconds")
def test_a_long_traceback_does_not_block():
    with pytest.raises(WorkerFailed) as caught:
        processes.run(fail, (), 2, "fork")
    assert "xxx" in caught.value.trace
    assert len(caught.value.trace) == 10_000


def test_failures_pickle():
    failure = pickle.loads(pickle.dumps(WorkerFailed(1, -9, "")))
    assert (failure.rank, failure.code, str(failure)) == (1, -9, str(WorkerFailed(1, -9, "")))

import subprocess
import sys
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from hasten.world import agent


@pytest.fixture
def codes(monkeypatch):
    monkeypatch.setattr(SubprocessContext, "close", lambda self, *arguments: None)
    return agent._exit_codes()


def ended(*found):
    handlers = {rank: SimpleNamespace(proc=SimpleNamespace(returncode=code)) for rank, code in enumerate(found)}
    return SimpleNamespace(subprocess_handlers=handlers)


def test_the_exit_codes_of_the_processes_that_ended_last_are_kept(codes):
    SubprocessContext.close(ended(0, 3))
    assert codes == [0, 3]
    SubprocessContext.close(ended(-15, None))
    assert codes == [-15, 0]


def test_processes_that_have_saved_end_the_job(codes):
    with pytest.raises(agent.Preempted) as left:
        SubprocessContext.close(ended(-15, 75))
    assert left.value.code == 75


def test_torch_closes_its_processes_as_is_assumed():
    code = """
import sys
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from hasten.world import agent
codes = agent._exit_codes()
context = start_processes(
    "test", sys.executable, {0: ("-c", "raise SystemExit(4)")}, {0: {}}, DefaultLogsSpecs()
)
context.wait(period=0.05)
print(codes)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[4]\n", done.stderr

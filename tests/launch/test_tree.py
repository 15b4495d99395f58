import os
import signal
import subprocess
import sys
import time

import pytest

from hasten.launch import tree
from tests.launch.jobs import LIMIT, living, wait_until_gone

pytestmark = pytest.mark.skipif(os.name != "posix", reason="process groups are POSIX's")

SLEEP = "import time; time.sleep(300)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); {SLEEP}"
# A process that ends at once and leaves a child in its group, which says its pid.
PARENT = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid, flush=True)"


@pytest.fixture
def start():
    started = []

    def start(code: str, mark: str | None = None, session: bool = True) -> subprocess.Popen[str]:
        environ = {**os.environ, **({tree.MARK: mark} if mark else {})}
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=environ, start_new_session=session, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_marks_are_chained():
    launch_id, mark = tree.new_mark(None)
    assert mark == launch_id
    inner, chained = tree.new_mark(mark)
    assert inner != launch_id
    assert chained == f"{launch_id},{inner}"


def test_a_family_is_found_by_its_mark_wherever_it_went(start):
    marked = [start(SLEEP, "outer,mine,inner"), start(SLEEP, "mine", session=False)]
    others = [start(SLEEP, "mine2"), start(SLEEP)]
    assert tree.end_family("mine", grace=5)
    assert [process.wait(LIMIT) for process in marked] == [-signal.SIGTERM] * 2
    assert living([process.pid for process in others]) == [process.pid for process in others]


def test_who_ignores_the_request_is_killed(start):
    process = start(DEAF, "mine")
    assert process.stdout.readline() == "deaf\n"
    assert tree.end_family("mine", grace=0.1)
    assert process.wait(LIMIT) == -signal.SIGKILL


def test_members_of_a_group_need_no_mark(start):
    process = start(PARENT)
    orphan = int(process.stdout.readline())
    process.wait(LIMIT)
    assert living([orphan]) == [orphan]
    assert tree.end_family("nobody", 1.0, [process.pid])
    assert living([orphan]) == []


def test_groups_get_their_time_and_are_killed_then(start):
    process = start(PARENT)
    orphan = int(process.stdout.readline())
    process.wait(LIMIT)
    assert tree.signal_group(process.pid, 0)
    tree.end_groups([process.pid], grace=0.1)
    assert wait_until_gone([orphan]) == []
    began = time.monotonic()
    tree.end_groups([process.pid], grace=60)
    assert time.monotonic() - began < 30


def test_an_empty_group_takes_no_signal(start):
    process = start("pass")
    process.communicate(timeout=LIMIT)
    assert not tree.signal_group(process.pid, signal.SIGTERM)


def test_descendants_end_with_their_roots(start):
    own_session = f"subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)"
    process = start(f"import subprocess, sys, time; print({own_session}.pid, flush=True); time.sleep(300)")
    child = int(process.stdout.readline())
    tree.end_descendants([process.pid], grace=5)
    assert process.wait(LIMIT) == -signal.SIGTERM
    assert living([child]) == []


@pytest.mark.parametrize(("words", "ended"), [("", True), ("done\n", False)])
def test_the_guard_acts_if_the_launcher_dies_without_a_word(start, words, ended):
    marked, member = start(SLEEP, f"guarded{words[:1]}"), start(SLEEP)
    said = f"+{marked.pid}\n+{member.pid}\n-{marked.pid}\n{words}"
    subprocess.run([sys.executable, "-I", tree.__file__, f"guarded{words[:1]}"], input=said, text=True, timeout=LIMIT)
    assert (living([marked.pid, member.pid]) == []) == ended


def test_a_signal_for_children_spares_their_parent_and_their_children(start):
    sleep = [sys.executable, "-c", SLEEP]
    code = f"import subprocess; c = subprocess.Popen({sleep!r}); print(c.pid, flush=True); print(c.wait(), flush=True); {SLEEP}"
    process = start(code)
    child = int(process.stdout.readline())
    tree.signal_children(process.pid, signal.SIGUSR1)
    assert int(process.stdout.readline()) == -signal.SIGUSR1
    assert living([child, process.pid]) == [process.pid]
    process.kill()
    process.wait(LIMIT)
    tree.signal_children(process.pid, signal.SIGUSR1)  # nobody is there any more

"""Jobs on this machine, from start to end: output, failures, signals, and what is left behind."""

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time

import pytest

from hasten.launch.machine import core_count
from tests.launch.jobs import FAMILY, LIMIT, living, wait_until_gone

posix = pytest.mark.skipif(os.name != "posix", reason="signals and terminals are POSIX's")

SHOW = """
import json, os, sys
with open("env-" + os.environ.get("RANK", "alone"), "w") as file:
    file.write(json.dumps({"argv": sys.argv, "env": dict(os.environ)}) + "\\n")
"""


def shown(jobs, count):
    return [json.loads(file.read_text()) for file in jobs.wait_for_files("env-*", count)]


def test_each_process_knows_its_place(jobs):
    done = jobs.run(
        "--cpu", "--num_processes", "3", "--mixed_precision", "bf16", jobs.script(SHOW), "--cpu", "--", "a b"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    seen = shown(jobs, 3)
    assert [one["argv"] for one in seen] == [["script.py", "--cpu", "--", "a b"]] * 3
    ports = {one["env"]["MASTER_PORT"] for one in seen}
    assert len(ports) == 1
    for rank, one in enumerate(seen):
        env = one["env"]
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == (
            str(rank),
            str(rank),
            "3",
            "3",
        )
        assert (env["MASTER_ADDR"], env["GROUP_RANK"]) == ("127.0.0.1", "0")
        assert (env["ACCELERATE_MIXED_PRECISION"], env["ACCELERATE_USE_CPU"]) == ("bf16", "true")
        assert env["OMP_NUM_THREADS"] == str(max(1, core_count() // 3))
        assert env["KMP_BLOCKTIME"] == "1"


def test_what_the_user_has_set_stays(jobs):
    jobs.environ |= {"OMP_NUM_THREADS": "5", "KMP_BLOCKTIME": "7", "TORCHELASTIC_USE_AGENT_STORE": "True", "MINE": "x"}
    assert jobs.run("--cpu", "--num_processes", "2", jobs.script(SHOW)).returncode == 0
    env = shown(jobs, 2)[1]["env"]
    assert (env["OMP_NUM_THREADS"], env["KMP_BLOCKTIME"], env["MINE"]) == ("5", "7", "x")
    assert "TORCHELASTIC_USE_AGENT_STORE" not in env
    assert env["KMP_AFFINITY"] == "granularity=fine,compact,1,5"


def test_stdin_is_rank_0s(jobs):
    script = jobs.script("import os, sys; sys.stdout.write(f'{os.environ[\"RANK\"]} {sys.stdin.read()!r}\\n')")
    job = jobs.start("--cpu", "--num_processes", "2", script, stdin=subprocess.PIPE)
    out, _ = job.communicate("hello", timeout=LIMIT)
    assert sorted(out.splitlines()) == ["0 'hello'", "1 ''"]


FAILING = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("a word of rank 1", file=sys.stderr)
    try:
        {}["key"]
    except KeyError as error:
        raise RuntimeError("boom") from error
time.sleep(300)
"""


def test_a_failing_rank_stops_the_job_and_is_named(jobs):
    began = time.monotonic()
    done = jobs.run("--cpu", "--num_processes", "3", jobs.script(FAILING))
    assert time.monotonic() - began < 30
    assert done.returncode == 1
    live, _, report = done.stderr.partition("hasten: ")
    assert "a word of rank 1" in live
    assert live.count("RuntimeError: boom") == 1
    assert report.startswith("rank 1 of 3 failed with exit code 1 (on ")
    assert "KeyError: 'key'" in report
    assert report.rstrip().endswith("RuntimeError: boom")


def test_quiet_prints_no_report(jobs):
    done = jobs.run("--cpu", "-q", "--num_processes", "2", jobs.script(FAILING))
    assert done.returncode == 1
    assert "hasten:" not in done.stderr
    assert done.stderr.rstrip().endswith("RuntimeError: boom")


@pytest.mark.parametrize(
    ("statement", "code", "said"),
    [
        ("sys.exit(3)", 3, "rank 1 of 2 failed with exit code 3"),
        ("os.write(2, b'last words'); os._exit(4)", 4, "last words"),
        ("os.kill(os.getpid(), 9)", 137, "failed with signal SIGKILL (perhaps the kernel's"),
        ("os.kill(os.getpid(), 11)", 139, "Fatal Python error: Segmentation fault"),
        ("os.abort()", 134, "failed with signal SIGABRT"),
        ("sys.exit('no luck')", 1, "no luck"),
    ],
)
@posix
def test_every_kind_of_end(jobs, statement, code, said):
    text = f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {statement}\ntime.sleep(300)"
    done = jobs.run("--cpu", "--num_processes", "2", jobs.script(text))
    assert done.returncode == code
    assert said in done.stderr.partition("hasten: ")[2]


def test_the_first_failure_is_reported_even_if_another_ends_sooner(jobs):
    text = """
import os, sys, time
if os.environ["RANK"] == "0":
    while not os.path.exists("failed"):
        time.sleep(0.01)
    raise ConnectionError("the peer has gone")
import atexit
atexit.register(time.sleep, 0.3)
def tell(*error):
    sys.__excepthook__(*error)
    sys.stderr.flush()
    time.sleep(0.05)
    open("failed", "w").close()
sys.excepthook = tell
raise ValueError("the cause")
"""
    done = jobs.run("--cpu", "--num_processes", "2", jobs.script(text))
    report = done.stderr.partition("hasten: ")[2]
    assert report.startswith("rank 1 of 2 failed")
    assert "rank 0 (exit code 1)" in report
    assert report.rstrip().endswith("ValueError: the cause")


# As gloo does it: the others miss rank 1 before its interpreter has left.
LEAVING = """
import os, sys, time
if os.environ["RANK"] == "1":
    import atexit
    atexit.register(time.sleep, 1.5)
    sys.exit(7)
time.sleep(0.3)
raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
"""


def test_the_rank_that_left_is_reported_and_not_those_that_miss_it(jobs):
    done = jobs.run("--cpu", "--num_processes", "3", jobs.script(LEAVING))
    assert done.returncode == 7
    assert "hasten: rank 1 of 3 failed with exit code 7" in done.stderr
    assert "Failed after it, perhaps because of it: rank" in done.stderr


def test_a_rank_that_ends_well_does_not_end_the_job(jobs):
    text = "import os, time\nif os.environ['RANK'] == '0': time.sleep(0.5); print('done')"
    done = jobs.run("--cpu", "--num_processes", "2", jobs.script(text))
    assert (done.returncode, done.stdout.strip()) == (0, "done")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@posix
def test_signals_to_the_parent_leave_nobody(jobs, name):
    job = jobs.start("--cpu", "--num_processes", "2", jobs.script(FAMILY))
    pids = jobs.pids(2)
    assert len(living(pids)) == 6
    job.send_signal(getattr(signal, name))
    _, err = job.communicate(timeout=LIMIT)
    assert job.returncode == 128 + getattr(signal, name)
    assert living(pids) == []
    assert f"hasten: {name}: the processes have 10 s to finish" in err


@posix
def test_who_does_not_listen_is_killed_after_the_grace_period(jobs):
    job = jobs.start("--cpu", "--num_processes", "2", "--grace_period", "0.3", jobs.script(FAMILY), "stubborn")
    pids = jobs.pids(2)
    job.terminate()
    job.communicate(timeout=LIMIT)
    assert job.returncode == 143
    assert living(pids) == []


@posix
def test_a_second_signal_kills_at_once(jobs):
    job = jobs.start("--cpu", "--num_processes", "2", "--grace_period", "200", jobs.script(FAMILY), "stubborn")
    pids = jobs.pids(2)
    job.send_signal(signal.SIGINT)
    assert "SIGINT" in job.stderr.readline()
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=LIMIT)
    assert job.returncode == 130
    assert living(pids) == []


@posix
def test_a_killed_parent_leaves_nobody(jobs):
    job = jobs.start("--cpu", "--num_processes", "2", jobs.script(FAMILY))
    pids = jobs.pids(2)
    job.kill()
    assert wait_until_gone(pids) == []


@posix
def test_a_killed_rank_leaves_nobody(jobs):
    job = jobs.start("--cpu", "--num_processes", "2", jobs.script(FAMILY))
    pids = jobs.pids(2)
    os.kill(pids[3], signal.SIGKILL)  # rank 1; its child in a session of its own has lost its parent by now
    _, err = job.communicate(timeout=LIMIT)
    assert job.returncode == 137
    assert "rank 1 of 2 failed with signal SIGKILL" in err
    assert living(pids) == []


@posix
def test_children_do_not_outlive_a_job_that_ends_well(jobs):
    text = FAMILY.replace("time.sleep(300)\n", "").replace("(False, True)", "(False,)")
    job = jobs.start("--cpu", "--num_processes", "2", jobs.script(text))
    job.communicate(timeout=LIMIT)
    assert job.returncode == 0
    assert living(jobs.pids(2)) == []


@posix
def test_a_launch_within_a_launch_ends_with_it(jobs):
    jobs.script(FAMILY, "inner.py")
    text = """
import os, subprocess, sys
inner = [sys.executable, "-m", "hasten", "launch", "--cpu", "--num_processes", "2", "inner.py"]
os.makedirs(os.environ["RANK"])
subprocess.run(inner if os.environ["RANK"] == "0" else ["sleep", "300"])
"""
    job = jobs.start("--cpu", "--num_processes", "2", "--grace_period", "1", jobs.script(text))
    pids = jobs.pids(2)
    job.terminate()
    job.communicate(timeout=LIMIT)
    assert wait_until_gone(pids) == []


@posix
def test_a_script_that_saves_before_it_ends_chooses_the_exit_code(jobs):
    text = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))
with open("pids-" + os.environ["RANK"], "w") as file:
    file.write(str(os.getpid()) + "\\n")
time.sleep(300)
"""
    job = jobs.start("--cpu", "--num_processes", "2", jobs.script(text))
    jobs.pids(2)
    job.terminate()
    job.communicate(timeout=LIMIT)
    assert job.returncode == 85


@posix
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_what_the_script_may_use_is_passed_on_and_ends_nothing(jobs, name):
    text = f"""
import os, signal, time
heard = []
signal.signal(signal.{name}, lambda *_: heard.append(1))
rank = os.environ["RANK"]
open(f"up-{{rank}}", "w").write("\\n")
while not heard:
    time.sleep(0.01)
open(f"heard-{{rank}}", "w").write("\\n")
while not os.path.exists("end"):
    time.sleep(0.01)
"""
    job = jobs.start("--cpu", "--num_processes", "2", "--grace_period", "0", jobs.script(text))
    jobs.wait_for_files("up-*", 2)
    job.send_signal(getattr(signal, name))
    jobs.wait_for_files("heard-*", 2)
    (jobs.folder / "end").touch()
    out, err = job.communicate(timeout=LIMIT)
    assert (job.returncode, out, err) == (0, "", "")


def test_after_a_rank_that_has_saved_the_others_have_the_grace_period(jobs):
    text = "import os, sys, time\ntime.sleep(2 * int(os.environ['RANK']))\nprint('saved', flush=True)\nsys.exit(75)"
    done = jobs.run("--cpu", "--num_processes", "2", jobs.script(text))
    assert (done.returncode, done.stdout) == (75, "saved\n" * 2)
    assert done.stderr == "hasten: the job has saved and can be started again (exit code 75)\n"


@posix
def test_stop_and_continue_reach_the_processes(jobs):
    job = jobs.start("--cpu", "--num_processes", "2", jobs.script(FAMILY))
    pids = jobs.pids(2)
    import psutil

    def states(expected):
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            if all((psutil.Process(pid).status() == psutil.STATUS_STOPPED) == expected for pid in (pids[0], pids[3])):
                return True
            time.sleep(0.02)
        return False

    job.send_signal(signal.SIGTSTP)
    assert states(True)
    job.send_signal(signal.SIGCONT)
    assert states(False)
    job.terminate()
    job.communicate(timeout=LIMIT)
    assert living(pids) == []


def test_a_busy_port_is_replaced_with_a_note(jobs):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        number = str(listener.getsockname()[1])
        done = jobs.run("--cpu", "--num_processes", "2", "--main_process_port", number, jobs.script(SHOW))
    assert done.returncode == 0
    assert f"hasten: port {number} is in use; the processes meet on the free port" in done.stderr
    assert shown(jobs, 2)[0]["env"]["MASTER_PORT"] != number


LISTEN = """
import os, socket, time
listener = socket.socket(socket.AF_INET6)
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
if os.environ["RANK"] == "0":
    listener.bind(("::", int(os.environ["MASTER_PORT"])))
    listener.listen()
    time.sleep(0.5)
"""


def test_launches_at_once_never_collide(jobs):
    jobs.script(LISTEN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = str(free.getsockname()[1])
    started = [jobs.start("--cpu", "--num_processes", "2", "script.py") for _ in range(3)]
    started += [
        jobs.start("--cpu", "--num_processes", "2", "--main_process_port", number, "script.py") for _ in range(3)
    ]
    notes = [job.communicate(timeout=LIMIT)[1] for job in started]
    assert [job.returncode for job in started] == [0] * 6, notes
    assert sorted(f"port {number} is in use" in note for note in notes) == [False] * 4 + [True] * 2


@posix
def test_rank_0_has_a_terminal_where_the_launcher_has_one(jobs):
    text = """
import os, sys
line = f"{os.environ['RANK']} {sys.stderr.isatty()} {os.get_terminal_size(2).columns if sys.stderr.isatty() else None}"
sys.stderr.write(line + "\\n")
"""
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 91, 0, 0))
    job = jobs.start("--cpu", "--num_processes", "2", jobs.script(text), stderr=theirs)
    os.close(theirs)
    written = b""
    try:
        while chunk := os.read(ours, 1000):
            written += chunk
    except OSError:
        pass
    os.close(ours)
    job.communicate(timeout=LIMIT)
    assert job.returncode == 0
    assert sorted(written.split(b"\r\n")) == [b"", b"0 True 91", b"1 False None"]


def test_no_python_and_modules_and_folders(jobs):
    done = jobs.run(
        "--cpu", "--num_processes", "2", "--no_python", sys.executable, "-c", "import os; os.write(1, b'hi\\n')"
    )
    assert (done.returncode, done.stdout.split()) == (0, ["hi", "hi"])
    jobs.script("import os, sys; sys.stdout.write(__name__ + os.environ['RANK'] + chr(10))", "mine.py")
    done = jobs.run("--cpu", "--num_processes", "2", "-m", "mine")
    assert sorted(done.stdout.splitlines()) == ["__main__0", "__main__1"]
    (jobs.folder / "package").mkdir()
    jobs.script("print('from a folder')", "package/__main__.py")
    assert jobs.run("--cpu", "package").stdout == "from a folder\n"


@posix
def test_the_address_of_another_machine_is_refused(jobs):
    done = jobs.run("--cpu", "--num_processes", "2", "--main_process_ip", "203.0.113.9", jobs.script("pass"))
    assert done.returncode != 0
    assert done.stderr.startswith("hasten launch: main_process_ip is 203.0.113.9, which is no address of this machine")
    assert (
        jobs.run("--cpu", "--num_processes", "2", "--main_process_ip", "localhost", jobs.script("pass")).returncode == 0
    )


def test_what_cannot_be_started_is_one_line(jobs):
    program = jobs.folder / "broken"
    program.write_bytes(b"\x00\x01 no program")
    program.chmod(0o755)
    for count in ("1", "2"):
        done = jobs.run("--cpu", "--num_processes", count, "--no_python", "./broken")
        assert done.returncode == 2
        assert done.stderr == "hasten launch: ./broken cannot be started: Exec format error.\n"


def test_on_a_system_without_posix_signals(jobs):
    text = """
import os, signal, sys
for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGTSTP", "SIGWINCH"):
    delattr(signal, name)
sys.modules["fcntl"] = sys.modules["termios"] = sys.modules["resource"] = None
from hasten.cli.main import main
sys.exit(main(["launch", "--cpu", "--num_processes", "2", "script.py"]))
"""
    jobs.script("import os; os.write(1, os.environ['RANK'].encode())")
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=jobs.folder, env=jobs.environ, capture_output=True, text=True, timeout=LIMIT
    )
    assert (done.returncode, sorted(done.stdout), done.stderr) == (0, ["0", "1"], "")


def test_lines_are_not_lost_when_a_rank_is_stopped(jobs):
    text = """
import os, time
if os.environ["RANK"] == "0":
    print("a line of rank 0")
    open("printed", "w").close()
    time.sleep(300)
while not os.path.exists("printed"):
    time.sleep(0.01)
os._exit(1)
"""
    jobs.environ.pop("PYTHONUNBUFFERED", None)
    done = jobs.run("--cpu", "--num_processes", "2", jobs.script(text))
    assert (done.returncode, done.stdout) == (1, "a line of rank 0\n")


READS = """
from torch.utils.data import DataLoader
from hasten import Accelerator, DataLoaderConfiguration
accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
print(sum(batch.sum().item() for batch in accelerator.prepare(DataLoader(range(6), batch_size=2))))
"""


@pytest.mark.full
def test_a_job_never_aborts_at_its_end(jobs):
    script = jobs.script(READS)
    ends = [jobs.run("--cpu", "--num_processes", "2", script).returncode for _ in range(20)]
    assert ends == [0] * 20


FAILS = """
import torch
from hasten import Accelerator, FullyShardedDataParallelPlugin
accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
for _ in range(3):
    accelerator.backward(model(torch.ones(2, 4)).sum())
raise ValueError("of the script")
"""


@pytest.mark.full
def test_an_error_is_what_a_job_ends_with(jobs):
    """And not a thread of the backend that finds no interpreter."""
    script = jobs.script(FAILS)
    for _ in range(20):
        job = jobs.run("--cpu", "--num_processes", "2", script)
        assert job.returncode == 1
        assert "ValueError: of the script" in job.stderr.splitlines()[-1]


def test_last_words_arrive_however_slowly_they_are_read(jobs):
    """More than a pipe holds, written right before the end."""
    text = """
import sys
sys.stderr.write("x" * 400_000 + "\\nthe end\\n")
"""
    job = jobs.start("--cpu", "--num_processes", "2", jobs.script(text))
    time.sleep(2.5)  # both ranks have ended, and the launcher can not write on
    _, err = job.communicate(timeout=LIMIT)
    assert job.returncode == 0
    assert err.count("x") == 800_000
    assert err.count("the end") == 2

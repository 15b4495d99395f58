"""Starts `hasten launch` as a user does, in a folder of its own, and looks at what it leaves behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

LIMIT = 60.0  # seconds after which a launch is hung

# Trains for a long time, and saves when a signal comes; "up-RANK" says that it trains.
PREEMPTIBLE = """
import os, sys, time, torch, hasten
torch.set_num_threads(1)
project = hasten.ProjectConfiguration("run", automatic_checkpoint_naming=True, save_on_signal=("SIGTERM", "SIGUSR1"))
accelerator = hasten.Accelerator(cpu=True, project_config=project)
model = torch.nn.Linear(2, 1)
loader = torch.utils.data.DataLoader(torch.ones(20000, 2), 1)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
for number, batch in enumerate(loader):
    accelerator.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()
    if number == 3:
        with open(f"up-{accelerator.process_index}", "w") as file:
            file.write("\\n")
    time.sleep(0.005)
"""


class Jobs:
    """A folder for scripts, and launches in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        unwanted = (
            "ACCELERATE_",
            "HASTEN_",
            "KMP_",
            "OMP_NUM_THREADS",
            "CUDA_VISIBLE",
            "MASTER_",
            "RANK",
            "WORLD_SIZE",
        )
        self.environ = {name: text for name, text in os.environ.items() if not name.startswith(unwanted)}
        self.environ |= {"HASTEN_HOME": str(folder / "home"), "HF_HOME": str(folder / "hf")}
        self._started: list[subprocess.Popen[str]] = []

    def script(self, text: str, name: str = "script.py") -> str:
        (self.folder / name).write_text(text)
        return name

    def start(self, *arguments: str, **options) -> subprocess.Popen[str]:
        """Start `hasten launch` with these arguments; its output is piped unless the options say otherwise."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": self.folder, **options}
        options.setdefault("env", self.environ)
        job = subprocess.Popen([sys.executable, "-m", "hasten", "launch", *arguments], **options)
        self._started.append(job)
        return job

    def run(self, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
        """Launch and wait."""
        job = self.start(*arguments, **options)
        out, err = job.communicate(timeout=LIMIT)
        return subprocess.CompletedProcess(job.args, job.returncode, out, err)

    def wait_for_files(self, pattern: str, count: int) -> list[Path]:
        """The files that the script's processes write, once there are `count` of them, each with its end mark."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            files = sorted(self.folder.glob(pattern))
            if len(files) >= count and all(file.read_text().endswith("\n") for file in files):
                return files
            time.sleep(0.02)
        raise TimeoutError(f"{pattern}: {sorted(self.folder.iterdir())}")

    def pids(self, count: int) -> list[int]:
        """The process ids in `count` files pids-*, as FAMILY writes them."""
        return [int(pid) for file in self.wait_for_files("pids-*", count) for pid in file.read_text().split()]

    def end_all(self) -> None:
        for job in self._started:
            if job.poll() is None:
                job.send_signal(signal.SIGKILL)
            job.communicate(timeout=LIMIT)


def living(pids: list[int]) -> list[int]:
    """Those that run; the dead whom nobody has collected do not."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.Error:
            pass
    return found


def wait_until_gone(pids: list[int]) -> list[int]:
    """Wait for the processes to end; those that have not after the limit."""
    deadline = time.monotonic() + LIMIT
    while (left := living(pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


# A process with a child in its group and a child in a session of its own, that tells its ids and then waits.
FAMILY = """
import os, signal, subprocess, sys, time
pids = [os.getpid()]
for own_session in (False, True):
    sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
    pids.append(subprocess.Popen(sleep, start_new_session=own_session).pid)
if "stubborn" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = os.environ.get("RANK", "0")
with open(f"pids-{rank}", "w") as file:
    file.write(" ".join(map(str, pids)) + "\\n")
time.sleep(300)
"""

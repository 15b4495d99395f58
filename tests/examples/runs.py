"""Runs of the example scripts through `hasten launch`, as a user starts them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).parents[2]
LIMIT = 300.0  # seconds after which a run is hung


def command(processes: int, script: str, *arguments: str | Path) -> list[str]:
    """The command line of a run on the CPU."""
    launch = [sys.executable, "-m", "hasten", "launch", "--cpu", "--num_processes", str(processes)]
    return [*launch, str(REPOSITORY / "examples" / script), *map(str, arguments)]


def environment() -> dict[str, str]:
    """This process's environment without what other launches left there, and with one thread for each process."""
    unwanted = ("ACCELERATE_", "HASTEN_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}


def run(processes: int, script: str, *arguments: str | Path) -> str:
    """Run a script to its end and return what it printed.

    Raises:
        AssertionError: it failed; the text is its standard error.
    """
    done = subprocess.run(
        command(processes, script, *arguments),
        env=environment(),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def started(processes: int, script: str, *arguments: str | Path) -> Iterator[psutil.Popen]:
    """A run that goes on in the background, and is killed with all its processes when the body ends."""
    job = psutil.Popen(
        command(processes, script, *arguments),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield job
    finally:
        kill(job)


def kill(job: psutil.Popen) -> None:
    """End the launcher and all its workers at once, without a chance to tidy up (SIGKILL where there are signals)."""
    with suppress(psutil.NoSuchProcess):
        family = [job, *job.children(recursive=True)]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _, alive = psutil.wait_procs(family, timeout=LIMIT)
        assert not alive
    job.wait(timeout=LIMIT)


def wait_for(path: Path, job: psutil.Popen) -> bool:
    """Wait until `path` exists; False if the job ended without it."""
    deadline = time.monotonic() + LIMIT
    while not path.exists():
        if job.poll() is not None:
            return path.exists()
        if time.monotonic() > deadline:
            raise TimeoutError(f"There is no {path} after {LIMIT} s.")
        time.sleep(0.002)
    return True


def losses(folder: Path) -> Any:
    """The history that a run of the language model left: `step`, and lists of (step, loss) by name."""
    return json.loads((folder / "losses.json").read_text())

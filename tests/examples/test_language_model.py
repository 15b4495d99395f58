"""The language model is trained through the launcher, killed and resumed."""

import math
import random
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.examples import runs

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

SCRIPT = "language_model.py"
TINY = ("--size", "tiny", "--epochs", "2", "--save_every", "7")
STEPS = 2 * ((32_000 - 1) // 32 // 12)  # sequences of 32 bytes, 12 in a batch
CHECKPOINTS = math.ceil(STEPS / 7)


class Run(NamedTuple):
    folder: Path
    output: str

    @property
    def result(self) -> str:
        """The sample of text and the final losses, as they were printed."""
        return self.output[self.output.index("\ndef ") :]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Run]:
    """For a number of processes, the run that was left alone."""

    @cache
    def run(processes: int) -> Run:
        folder = tmp_path_factory.mktemp(f"uninterrupted-{processes}-")
        return Run(folder, runs.run(processes, SCRIPT, *TINY, "--output_dir", folder))

    return run


@pytest.mark.parametrize("processes", [1, 2])
def test_learns_and_leaves_its_files(processes: int, uninterrupted: Callable[[int], Run]) -> None:
    folder, output = uninterrupted(processes)
    history = runs.losses(folder)
    assert history["step"] == STEPS
    assert [step for step, _ in history["train"]] == [*range(10, STEPS, 10), STEPS]
    assert [step for step, _ in history["validation"]] == [0, *range(7, STEPS, 7), STEPS]
    first, last = history["validation"][0][1], history["validation"][-1][1]
    assert first == pytest.approx(math.log(256), abs=0.1)  # nothing is known yet: 256 equally likely bytes
    assert last < 3.5
    assert f"{processes} processes, 30,176 parameters, step 0 of {STEPS}" in output
    final = f"final losses: training {history['train'][-1][1]!r}, validation {last!r}"
    assert output.splitlines()[-1] == final
    assert (folder / "losses.png").read_bytes().startswith(b"\x89PNG")
    kept = [f"checkpoint_{number}" for number in (CHECKPOINTS - 2, CHECKPOINTS - 1)]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == sorted(kept)


def test_validation_is_the_same_on_any_number_of_processes(uninterrupted: Callable[[int], Run]) -> None:
    """156 sequences in batches of 12, split among the processes: each counts once, whoever reads it."""
    before = [runs.losses(uninterrupted(processes).folder)["validation"][0] for processes in (1, 2)]
    assert before[0] == pytest.approx(before[1], abs=1e-6)


def train_with_kills(processes: int, folder: Path, kills: int, chance: random.Random) -> tuple[str, int]:
    """Start and kill a run until it has been killed `kills` times, then let it end; its output, and how often it was killed."""
    killed = 0
    arguments = (*TINY, "--resume", "--output_dir", folder)
    for attempt in range(1, kills + 1):
        first = (attempt - 1) * CHECKPOINTS // kills  # so that there is something left to do for the last attempt
        wanted = folder / "checkpoints" / f"checkpoint_{chance.randrange(first, attempt * CHECKPOINTS // kills)}"
        delay = chance.uniform(0, 0.1)  # a few steps, one of them with a checkpoint
        with runs.started(processes, SCRIPT, *arguments) as job:
            if runs.wait_for(wanted, job):
                time.sleep(delay)
            killed += job.poll() is None
    return runs.run(processes, SCRIPT, *arguments), killed


@pytest.mark.parametrize(
    ("processes", "kills"),
    [(2, 1), *(pytest.param(processes, 5, marks=pytest.mark.full) for processes in (1, 2, 3))],
)
def test_a_killed_run_resumes_exactly(
    processes: int, kills: int, tmp_path: Path, uninterrupted: Callable[[int], Run]
) -> None:
    whole = uninterrupted(processes)
    seed = random.randrange(2**32)
    print(f"the moments follow from the seed {seed}")
    output, killed = train_with_kills(processes, tmp_path, kills, random.Random(seed))
    assert killed > 0
    assert runs.losses(tmp_path) == runs.losses(whole.folder)
    assert Run(tmp_path, output).result == whole.result

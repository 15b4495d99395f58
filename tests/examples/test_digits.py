"""The digits are read on any number of processes, and the two loops differ in a few lines only."""

import ast
import difflib
import re
import subprocess
import sys

import pytest

from tests.examples import runs

pytest.importorskip("sklearn")

LAST_LINE = re.compile(r"epoch 12: (\d+) of (\d+) test images are right")


@pytest.mark.parametrize(
    "processes", [2, pytest.param(1, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)]
)
def test_reads_digits(processes: int) -> None:
    lines = runs.run(processes, "digits.py").splitlines()
    assert len(lines) == 12  # one for each epoch, from one process
    found = LAST_LINE.match(lines[-1])
    assert found is not None
    right, total = map(int, found.groups())
    assert total == 360  # every test image once, although 64 * processes does not divide them
    assert right / total > 0.97


@pytest.mark.full
def test_one_process_does_the_same_as_plain_pytorch() -> None:
    plain = subprocess.run(
        [sys.executable, runs.REPOSITORY / "examples" / "digits_plain.py"],
        env=runs.environment(),
        capture_output=True,
        text=True,
        timeout=runs.LIMIT,
        check=True,
    )
    assert runs.run(1, "digits.py") == plain.stdout


def code_lines(name: str) -> list[str]:
    """The lines of an example below its docstring, without the empty ones."""
    text = (runs.REPOSITORY / "examples" / name).read_text()
    docstring = ast.parse(text).body[0]
    return [line for line in text.splitlines()[docstring.end_lineno :] if line]


def test_few_lines_change_and_the_readme_shows_them() -> None:
    delta = difflib.ndiff(code_lines("digits_plain.py"), code_lines("digits.py"))
    changed = [line for line in delta if line[0] in "+-"]
    assert sum(line[0] == "-" for line in changed) == 2
    assert sum(line[0] == "+" for line in changed) == 6
    readme = (runs.REPOSITORY / "README.md").read_text()
    (block,) = re.findall(r"```diff\n(.*?)```", readme, re.DOTALL)
    # ndiff marks a line with two characters, the README with one.
    assert [line for line in block.splitlines() if line[:1] in ("+", "-")] == [line[0] + line[2:] for line in changed]


def test_the_readme_shows_the_plain_loop() -> None:
    readme = (runs.REPOSITORY / "README.md").read_text()
    (shown,) = re.findall(r"```python\n(train_loader.*?)```", readme, re.DOTALL)
    left_out = "model = nn.Sequential(...)"  # the layers
    plain = code_lines("digits_plain.py")
    assert [line for line in shown.splitlines() if line and line != left_out and line not in plain] == []

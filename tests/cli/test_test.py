import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hasten.cli import test as command
from hasten.cli.selfcheck import BEGUN, CHECKS, FAILED, OK, SKIPPED

FACTS = {"device": "cpu", "backend": "gloo", "precision": "no"}


def run(*words: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    code = "import sys; from hasten.cli.main import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, "test", *words], capture_output=True, text=True, timeout=120, cwd=cwd, env=env
    )


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HASTEN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.mark.usefixtures("environ")
def test_two_processes_by_a_configuration_file(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("distributed_type: FSDP\nuse_cpu: true\nnum_processes: 2\nmixed_precision: bf16\n"
                      "fsdp_config: {fsdp_version: 2, fsdp_offload_params: false}\n")  # fmt: skip
    done = run("--config_file", str(config), cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[0] == f"hasten test: 2 processes by the settings of {config} ..."
    assert lines[1] == "  devices cpu; backend gloo; mixed precision bf16"
    assert [line.split("ok")[0].strip() for line in lines[2:-1]] == [check.name for check in CHECKS]
    assert lines[-1] == "Everything works."
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml"]


# Rank 1 finds a wrong sum, which rank 0 does not, and both go on; then it dies.
BREAKS = """
import os, sys
if os.environ.get("RANK") == "1":
    from hasten.cli import selfcheck

    def wrong(job, right=selfcheck._collectives):
        right(job)
        selfcheck.expect("sum", 4, 3)

    swapped = {"collectives": wrong, "data": lambda job: os._exit(9)}
    selfcheck.CHECKS = tuple(each._replace(run=swapped.get(each.name, each.run)) for each in selfcheck.CHECKS)
    os._exit(selfcheck.main(sys.orig_argv[sys.orig_argv.index("hasten.cli.selfcheck") + 1 :]))
"""


@pytest.mark.usefixtures("environ")
def test_a_rank_that_breaks_is_named(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BREAKS)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = run("--cpu", "--num_processes", "2", cwd=tmp_path, env=env)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "  processes        ok" in done.stdout
    assert "  collectives      FAILED on rank 1\n" in done.stdout
    assert "collectives, rank 1: AssertionError: sum: got 4, the right answer is 3\n" in done.stdout
    assert "  data             not finished by ranks 0, 1\n" in done.stdout
    assert "  checkpoint       not run\n" in done.stdout
    assert "5 of 6 checks did not pass." in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("hasten: rank 1 of 2 failed with exit code 9 (on ")


@pytest.mark.usefixtures("environ")
def test_settings_that_contradict_each_other(tmp_path: Path) -> None:
    done = run("--cpu", "--multi_gpu", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("hasten test: --cpu and --multi_gpu contradict each other")
    done = run("--frobnicate", cwd=tmp_path)
    assert done.returncode == 2
    assert "unknown option --frobnicate" in done.stderr


def diary(*states: str | None, text: str = "", trace: str = "") -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = [FACTS]
    for check, state in zip(CHECKS, states, strict=False):
        if state is not None:
            entries.append({"check": check.name, "state": BEGUN})
        if state not in (None, BEGUN):
            entries.append({"check": check.name, "state": state, "text": text, "trace": trace, "seconds": 0.5})
    return entries


ALL = [OK] * len(CHECKS)


def test_a_report_of_success() -> None:
    text, passed = command.report({0: diary(*ALL, text="fine"), 1: diary(*ALL, text="fine")}, 0, "")
    assert passed
    assert text.splitlines()[1] == "  processes        ok        0.5 s  fine"
    assert text.splitlines()[-1] == "Everything works."


def test_a_check_that_cannot_run_here_is_no_failure() -> None:
    text, passed = command.report({0: diary(*ALL[:-1], SKIPPED, text="why")}, 0, "")
    assert passed
    assert "  checkpoint       skipped   0.5 s  why" in text


def test_ranks_with_the_same_error_are_told_together() -> None:
    broken = diary(OK, FAILED, text="ValueError: wrong\nand more", trace="a.py:1 in f\nb.py:2 in g\n")
    text, passed = command.report({0: broken, 1: diary(OK, BEGUN), 2: broken, 3: broken}, 1, "")
    assert not passed
    assert "  collectives      FAILED on ranks 0, 2, 3, not finished by rank 1" in text
    assert "collectives, ranks 0, 2, 3: ValueError: wrong\n  and more\n  at b.py:2 in g\n" in text
    assert "collectives, rank 1: was still in it when the job ended.\n  To do: check that the processes reach" in text
    assert "5 of 6 checks did not pass." in text


def test_a_rank_that_never_began_brings_the_log() -> None:
    text, passed = command.report({0: diary(BEGUN), 1: []}, 3, "one\n\nCannot start\n")
    assert not passed
    assert "not finished by rank 0, not begun by rank 1" in text
    assert "rank 1 never began: the process could not start, or died before." in text
    assert text.endswith("The job ended with 3. It printed last:\n  one\n  Cannot start")


def test_the_limit() -> None:
    text, passed = command.report({0: diary(OK, BEGUN)}, None, "")
    assert not passed
    assert "The limit was reached, and the job was ended; --timeout allows more." in text


def test_a_job_that_fails_after_its_checks() -> None:
    text, passed = command.report({0: diary(*ALL)}, 7, "Segmentation fault\n")
    assert not passed
    assert "The checks passed, but the job failed." in text
    assert "Segmentation fault" in text


def test_help_is_light() -> None:
    code = "import sys\nfrom hasten.cli.main import main\n"
    for name in ("test", "env", "estimate-memory", "to-fsdp2"):
        code += f"try: main(['{name}', '--help'])\nexcept SystemExit: pass\n"
    code += "print(sorted({'torch', 'yaml', 'rich', 'huggingface_hub'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"

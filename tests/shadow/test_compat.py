"""The packaging of the drop-in distribution in `compat/`."""

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from hasten.cli import main as command
from hasten.shadow.table import VERSION

COMPAT = Path(__file__).parents[2] / "compat"
PROJECT = (COMPAT / "pyproject.toml").read_text()
SCRIPTS = dict(re.findall(r'^([\w-]+) = "([\w.]+:\w+)"$', PROJECT, re.MULTILINE))


def test_it_has_the_version_that_the_alias_modules_report():
    assert re.findall(r'^version = "(.*)"$', PROJECT, re.MULTILINE) == [VERSION]


def test_the_home_page_says_what_it_is_a_drop_in_for():
    assert "drop-in-for-huggingface-accelerate" in (COMPAT / "setup.py").read_text()


def test_every_console_script_can_be_called_without_arguments():
    assert set(SCRIPTS) == {
        "accelerate",
        "accelerate-launch",
        "accelerate-estimate-memory",
        "accelerate-merge-weights",
    }
    for target in SCRIPTS.values():
        module, name = target.split(":")
        inspect.signature(getattr(import_module(module), name)).bind()


def test_accelerate_launch_is_hasten_launch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["accelerate-launch", "missing.py"])
    assert command.launch() == 2
    assert "missing.py" in capsys.readouterr().err

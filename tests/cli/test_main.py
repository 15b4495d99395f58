import subprocess
import sys

import pytest

import hasten
from hasten.cli.main import COMMANDS, main


def test_alone_it_prints_help_and_fails(capsys):
    assert main([]) == 1
    assert capsys.readouterr().out.startswith("usage: hasten <command>")


@pytest.mark.parametrize("flag", ["-h", "--help", "help"])
def test_help(capsys, flag):
    assert main([flag]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name}" in printed for name in COMMANDS)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hasten {hasten.__version__}\n"


def test_an_unknown_command_is_corrected(capsys):
    assert main(["lunch"]) == 2
    assert capsys.readouterr().err == (
        "hasten: there is no command 'lunch' (did you mean 'launch'?). `hasten --help` lists them.\n"
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(capsys, name):
    try:
        code = main([name, "--help"])
    except SystemExit as error:
        code = error.code
    assert code == 0
    assert capsys.readouterr().out.startswith(f"usage: hasten {name}")


def test_as_a_module_and_light():
    code = "import sys, runpy; sys.argv = ['hasten', '--help']\ntry: runpy.run_module('hasten', run_name='__main__')\n"
    code += "except SystemExit: print(*(set(sys.modules) & {'argparse', 'torch', 'yaml', 'dataclasses', 'subprocess'}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "usage: hasten" in found.stdout
    assert found.stdout.splitlines()[-1] == ""

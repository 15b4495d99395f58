import argparse
import builtins
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hasten
from hasten.cli.env import env_command, env_command_parser, mps_chip
from hasten.world import devices
from hasten.world.devices import DEVICES, Device


@pytest.fixture(autouse=True)
def no_default_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HASTEN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def shown(*words: str) -> dict[str, Any]:
    return env_command(env_command_parser().parse_args(words))


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make one device type available and no other."""

    def choose(kind: str) -> None:
        monkeypatch.setattr(Device, "is_available", property(lambda row: row.type in (kind, "cpu")))
        monkeypatch.setattr(Device, "count", property(lambda row: 2))

    return choose


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a machine without accelerators")
def test_a_machine_without_accelerators(capsys: pytest.CaptureFixture[str]) -> None:
    info = shown()
    assert info["`hasten` version"] == hasten.__version__
    assert info["Python version"] == ".".join(map(str, sys.version_info[:3]))
    assert info["PyTorch version"] == torch.__version__
    assert info["PyTorch accelerator"] == "N/A"
    assert float(info["System RAM"].removesuffix(" GB")) > 0.1
    assert info["Processor cores"] >= 1
    assert list(info["Devices"]) == list(DEVICES)
    assert info["Devices"]["cuda"] == "not available"
    assert info["Devices"]["cpu"].endswith(", gloo")
    assert info["`hasten` configs"] == "Not found"
    printed = capsys.readouterr().out
    assert f"- PyTorch version: {torch.__version__}\n" in printed
    assert "\t- mps: not available\n" in printed
    assert printed.endswith("- `hasten` default config:\n\tNot found\n")


def test_mps_with_the_name_of_its_chip(only: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only("mps")
    answer = subprocess.CompletedProcess((), 0, stdout="Apple M9 Max\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    info = shown()
    assert info["PyTorch accelerator"] == "MPS"
    assert info["MPS type"] == "Apple M9 Max"
    assert "2 x Apple M9 Max, " in info["Devices"]["mps"]


@pytest.mark.parametrize(("processor", "name"), [("arm", "arm"), ("", "Apple Silicon")])
@pytest.mark.parametrize("error", [FileNotFoundError("sysctl"), subprocess.CalledProcessError(1, "sysctl")])
def test_a_chip_that_sysctl_does_not_know(
    monkeypatch: pytest.MonkeyPatch, processor: str, name: str, error: Exception
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", fails)
    monkeypatch.setattr("platform.processor", lambda: processor)
    assert mps_chip() == name


@pytest.mark.parametrize("kind", [kind for kind in DEVICES if kind not in ("cpu", "mps")])
def test_every_row_shows_its_name(only: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    only(kind)
    module = argparse.Namespace(get_device_name=lambda: "Chip 7", mem_get_info=lambda: (1 << 30, 4 << 30))
    monkeypatch.setattr(Device, "module", module)
    info = shown()
    assert info["PyTorch accelerator"] == kind.upper()
    assert info["GPU type" if kind == "cuda" else f"{kind.upper()} type"] == "Chip 7"
    assert info["Devices"][kind].startswith(f"2 x Chip 7, 4.00 GB, {DEVICES[kind].backend}")


def test_a_device_that_cannot_be_asked_is_no_crash(only: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only("npu")
    monkeypatch.setattr(devices.Device, "module", argparse.Namespace())
    info = shown()
    assert info["NPU type"].startswith("Not found (AttributeError: ")
    assert info["Devices"]["npu"].startswith("Not found (AttributeError: ")
    assert info["Devices"]["cpu"].endswith("gloo")


def test_nothing_that_is_missing_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **options: Any) -> Any:
        if name in ("psutil", "torch"):
            raise ImportError(f"no {name}")
        return real(name, *rest, **options)

    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setitem(sys.modules, "numpy", None)
    info = shown()
    assert info["`hasten` bash location"] == "Not found"
    assert info["Numpy version"].startswith("Not found (ModuleNotFoundError")
    assert info["System RAM"] == "Not found (ImportError: no psutil)"


def test_the_default_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hf" / "accelerate" / "default_config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("mixed_precision: no\nnum_processes: 2\n")
    assert shown()["`hasten` configs"] == {"mixed_precision": "no", "num_processes": "2"}
    out, err = capsys.readouterr()
    assert out.endswith(f"- `hasten` default config ({path}):\n\t- mixed_precision: no\n\t- num_processes: 2\n")
    assert err == ""


def test_a_file_that_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("mixed_precison: bf16\n")
    assert shown("--config_file", str(path))["`hasten` configs"] == {"mixed_precison": "bf16"}
    assert "unknown key 'mixed_precison' (did you mean 'mixed_precision'?)" in capsys.readouterr().err
    missing = shown("--config-file", str(tmp_path / "no.yaml"))["`hasten` configs"]
    assert missing.startswith("cannot be read: ")


def test_variables_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert shown()["Variables"]["ACCELERATE_MIXED_PRECISION"] == "bf16"

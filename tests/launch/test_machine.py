import os
import sys

import pytest

from hasten.launch import machine
from hasten.launch.machine import Machine, core_count, look, shown

VERSION = """from typing import Optional
__version__ = '2.13.0'
debug = False
cuda: Optional[str] = {cuda}
hip: Optional[str] = {hip}
xpu: Optional[str] = {xpu}
"""


@pytest.mark.parametrize(
    ("count", "text", "left"),
    [
        (8, None, 8),
        (None, None, None),
        (8, "", 0),
        (8, "0,1", 2),
        (8, "-1", 0),
        (8, "0,-1,1", 1),
        (2, "1,7,0", 1),
        (8, "GPU-aa,GPU-bb", 2),
        (8, " 3 , 4 ", 2),
        (None, "0,1,2", 3),
    ],
)
def test_visible_devices(count, text, left):
    assert shown(count, text) == left


def fake_torch(monkeypatch, tmp_path, **builds):
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").touch()
    texts = {name: repr(builds[name]) if name in builds else "None" for name in ("cuda", "hip", "xpu")}
    (folder / "version.py").write_text(VERSION.format(**texts))
    monkeypatch.syspath_prepend(str(tmp_path))


def test_the_build_is_read_from_the_version_file(monkeypatch, tmp_path):
    fake_torch(monkeypatch, tmp_path, cuda="12.8")
    builds = machine._torch_builds()
    assert builds >= {"cuda"}
    assert not builds & {"hip", "xpu", "debug"}


def test_gpus_count_only_if_torch_can_use_them(monkeypatch, tmp_path):
    files = tmp_path / "nvidia0"
    files.touch()
    kind = machine._KINDS[0]._replace(files=str(tmp_path / "nvidia[0-9]*"), counter=lambda: 4)
    monkeypatch.setattr(machine, "_KINDS", (kind,))
    monkeypatch.setattr(machine, "_torch_builds", lambda: {"cuda"})
    assert look(environ={}).accelerators == 4
    assert look(environ={"CUDA_VISIBLE_DEVICES": "0,1"}).accelerators == 2
    assert look(environ={"CUDA_VISIBLE_DEVICES": ""}).accelerators == 0
    assert look(count_accelerators=False).accelerators == 0
    monkeypatch.setattr(machine, "_torch_builds", lambda: {"hip"})
    assert look(environ={}).accelerators == 0
    monkeypatch.setattr(machine, "_torch_builds", lambda: None)
    assert look(environ={}).accelerators == 0


def test_without_a_driver_there_is_no_gpu(monkeypatch, tmp_path):
    kind = machine._KINDS[0]._replace(files=str(tmp_path / "nvidia*"), counter=lambda: 4)
    monkeypatch.setattr(machine, "_KINDS", (kind,))
    monkeypatch.setattr(machine, "_torch_builds", lambda: {"cuda"})
    assert look(environ={}).accelerators == 0


def test_torch_is_asked_in_a_process_of_its_own_where_nothing_else_knows(monkeypatch, tmp_path):
    (tmp_path / "renderD128").touch()
    kind = machine._KINDS[2]._replace(files=str(tmp_path / "renderD*"))
    assert kind.type == "xpu"
    monkeypatch.setattr(machine, "_KINDS", (kind,))
    monkeypatch.setattr(machine, "_torch_builds", lambda: {"xpu"})
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("class accelerator:\n    device_count = staticmethod(lambda: 6)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    assert look() == Machine(6, "ZE_AFFINITY_MASK", core_count())
    (package / "__init__.py").write_text("raise ImportError")
    assert look().accelerators == 0


def test_this_machine_agrees_with_torch():
    import torch

    expected = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    assert look().accelerators == expected


def test_nvidias_library_answers_or_is_missing():
    count = machine._nvidia_count()
    assert count is None or count >= 0


def test_cores_respect_affinity():
    assert 1 <= core_count() <= (os.cpu_count() or 1)
    if sys.platform == "linux":
        before = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, {min(before)})
            assert core_count() == 1
        finally:
            os.sched_setaffinity(0, before)


def test_threads_of_one_core_are_one_core(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(machine, "_siblings", lambda processor: f"{processor % 2},{processor % 2 + 2}")
    monkeypatch.setattr(machine, "_quota", lambda cores: cores)
    assert core_count() == 2
    monkeypatch.setattr(machine, "_quota", lambda cores: 1)
    assert core_count() == 1


def test_without_affinity_all_processors_count(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert core_count() == os.cpu_count()


def test_the_variables_are_those_of_the_device_table():
    from hasten.world.devices import DEVICES

    ours = {
        kind.type: kind.visible for kind in machine._KINDS if kind.type != "rocm"
    }  # there, torch's device is "cuda"
    assert ours == {name: DEVICES[name].visible for name in ours}
    assert Machine().visible == DEVICES["cuda"].visible

"""What a plan derives from settled settings; command lines and their plans are in tests/cli/test_launch.py."""

import sys

import pytest

from hasten.launch.machine import Machine
from hasten.launch.spec import DISTRIBUTED, LOCAL, REPLACE, plan
from hasten.settings.resolve import resolve
from hasten.settings.schema import TABLE

CPU = Machine(cores=8)
FOUR = Machine(4, "CUDA_VISIBLE_DEVICES", 32)
NAMES = [row.name for row in TABLE if row.flags]


@pytest.fixture(autouse=True)
def _script(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").touch()


def make(machine=CPU, environ=None, arguments=(), **flags):
    environ = environ or {}
    return plan(resolve(NAMES, flags=flags, environ=environ), "s.py", arguments, machine, environ)


def test_one_process_is_replaced():
    spec = make(arguments=("--cpu", "x"))
    assert spec.engine == REPLACE
    assert spec.command() == [sys.executable, "s.py", "--cpu", "x"]
    assert (spec.processes, spec.local_processes, spec.port) == (1, 1, None)


def test_several_have_ranks():
    spec = make(num_processes=2, use_cpu=True)
    assert spec.engine == LOCAL
    assert spec.command() == [sys.executable, "s.py"]
    assert spec.command(unbuffered=True) == [sys.executable, "-u", "s.py"]
    assert spec.rank_environment(1, 4444) == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4444",
        "KMP_AFFINITY": "granularity=fine,compact,1,4",
    }


def test_the_environment_of_a_default_launch_is_the_references():
    assert make().environment == {
        "ACCELERATE_USE_CPU": "false",
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "false",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "false",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "false",
    }


def test_kmp_on_the_cpu_alone():
    environment = make(use_cpu=True).environment
    assert environment["KMP_AFFINITY"] == "granularity=fine,compact,1,0"
    assert environment["KMP_BLOCKTIME"] == "1"
    assert "KMP_AFFINITY" not in make().environment
    theirs = make(use_cpu=True, environ={"KMP_AFFINITY": "none", "KMP_BLOCKTIME": "200"}).environment
    assert not {"KMP_AFFINITY", "KMP_BLOCKTIME"} & set(theirs)
    shared = make(use_cpu=True, num_processes=2, max_restarts=1)
    assert shared.engine == DISTRIBUTED
    assert "KMP_AFFINITY" not in shared.environment
    assert shared.environment["KMP_BLOCKTIME"] == "1"


@pytest.mark.parametrize(
    ("flags", "environ", "threads"),
    [
        ({}, {}, None),
        ({"num_processes": 2}, {}, "4"),
        ({"num_processes": 3}, {}, "2"),
        ({"num_processes": 16}, {}, "1"),
        ({"num_processes": 2}, {"OMP_NUM_THREADS": "7"}, None),
        ({"num_processes": 2, "num_cpu_threads_per_process": 3}, {}, "3"),
        ({"num_processes": 2, "num_cpu_threads_per_process": 3}, {"OMP_NUM_THREADS": "7"}, "3"),
        ({"num_cpu_threads_per_process": 5}, {}, "5"),
    ],
)
def test_threads(flags, environ, threads):
    assert make(use_cpu=True, environ=environ, **flags).environment.get("OMP_NUM_THREADS") == threads


def test_offsets_of_processes_follow_the_users_threads():
    spec = make(use_cpu=True, num_processes=2, environ={"OMP_NUM_THREADS": "3,2"})
    assert spec.rank_environment(1, 1)["KMP_AFFINITY"] == "granularity=fine,compact,1,3"


def test_values_of_the_environment_are_left_as_they_are():
    spec = make(environ={"ACCELERATE_MIXED_PRECISION": "BF16", "ACCELERATE_USE_CPU": "1"})
    assert not {"ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU"} & set(spec.environment)
    assert spec.value("mixed_precision") == "bf16"
    assert spec.settings["use_cpu"].where == "the environment variable ACCELERATE_USE_CPU"


def test_a_switch_can_be_turned_off():
    spec = make(use_cpu=False, environ={"ACCELERATE_USE_CPU": "1"}, machine=FOUR)
    assert spec.environment["ACCELERATE_USE_CPU"] == "false"
    assert spec.processes == 4


def test_accelerators_are_all_used():
    spec = make(machine=FOUR)
    assert (spec.engine, spec.processes) == (LOCAL, 4)
    assert "CUDA_VISIBLE_DEVICES" not in spec.environment
    assert "KMP_AFFINITY" not in spec.rank_environment(0, 1)


def test_some_accelerators():
    spec = make(machine=FOUR, gpu_ids=("0", "2"))
    assert spec.processes == 2
    assert spec.environment["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert make(machine=FOUR, gpu_ids=("all",)).processes == 4


def test_machines_multiply():
    flags = {"num_machines": 2, "main_process_ip": "10.0.0.1", "main_process_port": 4444, "machine_rank": 1}
    spec = make(machine=FOUR, **flags)
    assert (spec.engine, spec.processes, spec.local_processes) == (DISTRIBUTED, 8, 4)
    assert (spec.address, spec.port, spec.machine_rank) == ("10.0.0.1", 4444, 1)
    assert make(num_processes=6, **flags).local_processes == 3


@pytest.mark.parametrize(
    "flag", [{"max_restarts": 1}, {"tee": "3"}, {"log_dir": "logs"}, {"role": "a"}, {"rdzv_backend": "c10d"}]
)
def test_what_torchrun_obeys_starts_torchrun(flag):
    assert make(use_cpu=True, **flag).engine == DISTRIBUTED


@pytest.mark.parametrize(
    "flag", [{"max_restarts": 0}, {"same_network": True}, {"rdzv_backend": "static"}, {"tee": "0"}]
)
def test_what_changes_nothing_starts_nothing_else(flag):
    assert make(use_cpu=True, **flag).engine == REPLACE


def test_programs_and_modules():
    assert make().program == ("s.py",)
    settings = resolve(NAMES, flags={"module": True}, environ={})
    assert plan(settings, "json.tool", ["x"], CPU, {}).command() == [sys.executable, "-m", "json.tool", "x"]
    settings = resolve(NAMES, flags={"no_python": True}, environ={})
    assert plan(settings, sys.executable, ["-V"], CPU, {}).command() == [sys.executable, "-V"]
    settings = resolve(NAMES, flags={"as_accelerate": True}, environ={})
    assert plan(settings, "s.py", ["x"], CPU, {}).program == ("-m", "hasten.shadow", "s.py", "x")
    settings = resolve(NAMES, flags={"as_accelerate": True, "module": True}, environ={})
    assert plan(settings, "json.tool", [], CPU, {}).program == ("-m", "hasten.shadow", "-m", "json.tool")


def test_multi_gpu_beats_a_file_that_says_cpu():
    from hasten.settings.files import ConfigFile

    file = ConfigFile("c", {"use_cpu": True}, {"use_cpu": "use_cpu"})
    spec = plan(resolve(NAMES, flags={"multi_gpu": True}, file=file, environ={}), "s.py", (), FOUR, {})
    assert spec.processes == 4
    assert spec.environment["ACCELERATE_USE_CPU"] == "false"

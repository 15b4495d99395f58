"""Command lines and their plans, refusals, and every setting's way from the command line to the process."""

import argparse
import json
import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hasten.cli import launch
from hasten.launch import spec as spec_module
from hasten.launch.machine import Machine
from hasten.settings import environment
from hasten.settings.resolve import FILE, FLAG
from hasten.settings.schema import BY_NAME, TABLE, WORKER
from hasten.settings.values import write
from tests.settings.strategies import legal_values

TWO_MACHINES = "--num_machines 2 --main_process_ip h --main_process_port 4000 --machine_rank 1"
CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_processes: 2
mixed_precision: fp16
gpu_ids: all
same_network: true
rdzv_backend: static
machine_rank: 0
num_machines: 1
dynamo_config: {dynamo_backend: INDUCTOR}
"""


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """A folder with a script and a configuration, no default file, no variables of ours, and a machine of our choice."""
    for row in TABLE:
        if row.env:
            monkeypatch.delenv(row.env, raising=False)
    for name in ("KMP_AFFINITY", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HASTEN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").touch()
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "bad.yaml").write_text("num_proceses: 2")
    (tmp_path / "gpu.yaml").write_text("gpu_ids: 0,1")
    (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}")
    (tmp_path / "leftover.yaml").write_text("distributed_type: MULTI_GPU\nfsdp_config: {fsdp_version: 2}")
    (tmp_path / "cpu.yaml").write_text("use_cpu: true\nnum_processes: 2")
    monkeypatch.setattr(spec_module, "look", lambda accelerators, environ: machine(0))
    return tmp_path


def machine(accelerators: int) -> Machine:
    return Machine(accelerators, "CUDA_VISIBLE_DEVICES", 8)


def make(line: str, monkeypatch=None, accelerators: int = 0):
    if monkeypatch is not None:
        monkeypatch.setattr(spec_module, "look", lambda wanted, environ: machine(accelerators if wanted else 0))
    return launch.make_spec(launch.launch_command_parser().parse_args(line.split()))


@pytest.mark.parametrize(
    ("line", "accelerators", "engine", "processes", "expected"),
    [
        ("s.py", 0, "replace", 1, {}),
        ("s.py", 1, "replace", 1, {}),
        ("s.py", 4, "local", 4, {}),
        ("--cpu s.py", 4, "replace", 1, {"ACCELERATE_USE_CPU": "true", "KMP_BLOCKTIME": "1"}),
        ("--cpu --num_processes 2 s.py", 0, "local", 2, {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "4"}),
        ("--cpu --num-processes=2 s.py", 4, "local", 2, {}),
        ("--cpu --num_processes 9 s.py", 4, "local", 9, {"OMP_NUM_THREADS": "1"}),
        ("--num_processes 2 s.py", 0, "local", 2, {"ACCELERATE_USE_CPU": "false"}),
        ("--num_processes 1 s.py", 4, "replace", 1, {}),
        ("--num_processes 4 s.py", 4, "local", 4, {}),
        ("--multi_gpu --num_processes 2 s.py", 0, "local", 2, {}),
        ("--multi-gpu s.py", 4, "local", 4, {}),
        ("--multi_gpu s.py", 1, "replace", 1, {}),
        ("--gpu_ids 1,3 s.py", 4, "local", 2, {"CUDA_VISIBLE_DEVICES": "1,3"}),
        ("--gpu_ids=all s.py", 4, "local", 4, {"CUDA_VISIBLE_DEVICES": None}),
        ("--gpu_ids 2 s.py", 4, "replace", 1, {"CUDA_VISIBLE_DEVICES": "2"}),
        ("--mixed_precision bf16 s.py", 0, "replace", 1, {"ACCELERATE_MIXED_PRECISION": "bf16"}),
        ("--mixed-precision FP16 s.py", 0, "replace", 1, {"ACCELERATE_MIXED_PRECISION": "fp16"}),
        ("--mixed_precision=fp8 s.py", 0, "replace", 1, {"ACCELERATE_MIXED_PRECISION": "fp8"}),
        ("--gradient_accumulation_steps 4 s.py", 0, "replace", 1, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}),
        ("s.py --gradient_accumulation_steps 4", 0, "replace", 1, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": None}),
        ("--debug s.py", 0, "replace", 1, {"ACCELERATE_DEBUG_MODE": "true"}),
        ("--debug --no_debug s.py", 0, "replace", 1, {"ACCELERATE_DEBUG_MODE": "false"}),
        ("s.py", 0, "replace", 1, {"ACCELERATE_DEBUG_MODE": None}),
        ("--dynamo_backend inductor s.py", 0, "replace", 1, {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}),
        ("--dynamo_backend neuron s.py", 0, "replace", 1, {"ACCELERATE_DYNAMO_BACKEND": "NEURON"}),
        ("--dynamo-mode max-autotune s.py", 0, "replace", 1, {"ACCELERATE_DYNAMO_MODE": "max-autotune"}),
        ("--dynamo_use_fullgraph s.py", 0, "replace", 1, {"ACCELERATE_DYNAMO_USE_FULLGRAPH": "true"}),
        (
            "--dynamo_use_regional_compilation s.py",
            0,
            "replace",
            1,
            {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true"},
        ),
        ("--num_cpu_threads_per_process 3 s.py", 0, "replace", 1, {"OMP_NUM_THREADS": "3"}),
        ("--max_restarts 2 s.py", 0, "distributed", 1, {}),
        ("--monitor_interval 5 s.py", 0, "distributed", 1, {}),
        ("-t 3 --log_dir logs --cpu --num_processes 2 s.py", 0, "distributed", 2, {}),
        ("--rdzv_backend c10d s.py", 0, "distributed", 1, {}),
        (TWO_MACHINES + " s.py", 4, "distributed", 8, {}),
        (TWO_MACHINES + " --num_processes 2 s.py", 0, "distributed", 2, {}),
        (TWO_MACHINES + " --cpu --num_processes 4 s.py", 4, "distributed", 4, {"OMP_NUM_THREADS": "4"}),
        (
            "--num_machines 1:4 --rdzv_backend c10d --main_process_ip h --main_process_port 4000 s.py",
            2,
            "distributed",
            8,
            {},
        ),
        ("--main_process_port 0 --cpu --num_processes 2 s.py", 0, "local", 2, {}),
        ("--num_machines 1 --machine_rank 0 --same_network s.py", 0, "replace", 1, {}),
        ("--config_file c.yaml s.py", 4, "local", 2, {"ACCELERATE_MIXED_PRECISION": "fp16"}),
        ("--config-file c.yaml --mixed_precision no s.py", 4, "local", 2, {"ACCELERATE_MIXED_PRECISION": "no"}),
        ("--config_file c.yaml --num_processes 1 s.py", 4, "replace", 1, {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}),
        ("--config_file c.yaml --cpu s.py", 4, "local", 2, {"ACCELERATE_USE_CPU": "true"}),
        ("--config_file cpu.yaml s.py", 4, "local", 2, {"ACCELERATE_USE_CPU": "true", "KMP_BLOCKTIME": "1"}),
        (
            "--config_file cpu.yaml --multi_gpu s.py",
            4,
            "local",
            2,
            {"ACCELERATE_USE_CPU": "false", "KMP_BLOCKTIME": None},
        ),
        ("--config_file cpu.yaml --no_cpu --num_processes 4 s.py", 4, "local", 4, {"ACCELERATE_USE_CPU": "false"}),
        ("--config_file gpu.yaml --cpu s.py", 0, "replace", 1, {"CUDA_VISIBLE_DEVICES": None}),
        ("-m json.tool --cpu", 4, "local", 4, {"ACCELERATE_USE_CPU": "false"}),
        ("--quiet --no-config s.py", 0, "replace", 1, {}),
    ],
)
def test_command_lines(monkeypatch, line, accelerators, engine, processes, expected):
    spec = make(line, monkeypatch, accelerators)
    assert (spec.engine, spec.processes) == (engine, processes)
    assert {name: spec.environment.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("line", "accelerators", "said"),
    [
        ("nosuch.py", 0, "The script 'nosuch.py' does not exist in"),
        ("t.py", 0, "(did you mean 's.py'?)"),
        ("-m nosuch.thing", 0, "The module 'nosuch.thing' cannot be found"),
        ("--no_python ./nosuch", 0, "The program './nosuch' does not exist"),
        ("--module --no_python s.py", 0, "--module and --no_python contradict each other"),
        ("--as_accelerate --no_python s.py", 0, "--no_python and --as_accelerate contradict each other"),
        ("--cpu --multi_gpu s.py", 0, "--cpu and --multi_gpu contradict each other; give one of them."),
        ("--cpu --gpu_ids 0 s.py", 4, "--cpu and --gpu_ids contradict each other"),
        ("--config_file c.yaml --no_config s.py", 0, "--config_file and --no_config contradict each other"),
        ("--multi_gpu --num_processes 1 s.py", 4, "asks for several processes, but --num_processes is 1"),
        ("--multi_gpu s.py", 0, "this machine has none. Say how many CPU processes you want: --num_processes N."),
        (
            "--num_processes 5 s.py",
            4,
            "has only 4 accelerators to use. Ask for at most 4, or run on the CPU with --cpu.",
        ),
        ("--num_processes 2 s.py", 1, "has only 1 accelerator to use"),
        ("--gpu_ids 0,1 --num_processes 3 s.py", 4, "has only 2 accelerators to use"),
        ("--gpu_ids 0 s.py", 0, "--gpu_ids names accelerators, but this machine has none"),
        ("--config_file gpu.yaml s.py", 0, "gpu.yaml: gpu_ids names accelerators, but this machine has none"),
        ("--config_file nosuch.yaml s.py", 0, "The configuration file nosuch.yaml cannot be read"),
        ("--config_file bad.yaml s.py", 0, "unknown key 'num_proceses' (did you mean 'num_processes'?)"),
        ("--fsdp_version 2 s.py", 0, "fsdp_version is 2 (--fsdp_version), which has no effect without --use_fsdp"),
        ("--fsdp_offload_params false s.py", 0, "Give --use_fsdp, too, or leave --fsdp_offload_params out."),
        ("--config_file fsdp.yaml --no_use_fsdp --fsdp_version 1 s.py", 0, "has no effect without --use_fsdp"),
        (
            "--config_file leftover.yaml s.py",
            0,
            "fsdp_version is 2 (leftover.yaml: fsdp_config.fsdp_version), which has no effect without --use_fsdp. Give --use_fsdp, "
            "too, or --no_use_fsdp to run without.",
        ),
        (
            "--use_fsdp --fsdp_version 2 --fsdp_sharding_strategy SHARD_GRAD_OP s.py",
            0,
            "of version 1, but --fsdp_version is 2. Write --fsdp_reshard_after_forward false.",
        ),
        ("--use_fsdp --fsdp_version 2 --fsdp_sharding_strategy NO_SHARD s.py", 0, "Write it without --use_fsdp."),
        (
            "--use_fsdp --fsdp_version 2 --fsdp_sharding_strategy HYBRID_SHARD s.py",
            0,
            "true and, in the script, Parallel",
        ),
        ("--use_fsdp --fsdp_version 1 --fsdp_reshard_after_forward false s.py", 0, "Write --fsdp_version 2."),
        (
            "--config_file fsdp.yaml --fsdp_reshard_after_forward FULL_SHARD s.py",
            0,
            "version 1, but fsdp_version is 2 (fsdp.yaml: fsdp_config.fsdp_version). Write --fsdp_reshard_after_forward true.",
        ),
        (
            "--use_fsdp --fsdp_activation_checkpointing_offload true s.py",
            0,
            "which needs --fsdp_activation_checkpointing true",
        ),
        (
            "--use_fsdp --fsdp_version 1 --fsdp_activation_checkpointing true --fsdp_activation_checkpointing_offload true s.py",
            0,
            "which needs --fsdp_version 2, but fsdp_version is 1 (--fsdp_version).",
        ),
        ("--num_machines 2 s.py", 0, "that also needs --main_process_ip, --main_process_port, --machine_rank"),
        ("--num_machines 2 --rdzv_backend c10d s.py", 0, "that also needs --main_process_ip, --main_process_port."),
        (TWO_MACHINES.replace("rank 1", "rank 2") + " s.py", 0, "ranks go from 0 to 1"),
        (TWO_MACHINES.replace("4000", "0") + " s.py", 0, "all machines must know the port"),
        (TWO_MACHINES + " --num_processes 3 s.py", 0, "cannot be shared equally by 2 machines (--num_machines)"),
        (
            TWO_MACHINES.replace("machines 2", "machines 2:3") + " s.py",
            0,
            "is elastic, which needs --rdzv_backend c10d",
        ),
        ("--machine_rank 1 s.py", 0, "machine_rank is 1 (--machine_rank), but there are 1 machines"),
        ("--rdzv_backend etcd s.py", 0, "with rdzv_backend is etcd (--rdzv_backend)"),
    ],
)
def test_plans_that_are_refused(monkeypatch, line, accelerators, said):
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        make(line, monkeypatch, accelerators)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "no script is given. usage: hasten launch"),
        ("--cpu", "no script is given"),
        ("--num_processes 0 s.py", "--num_processes is 0, but must be a whole number of at least 1; the nearest"),
        ("--num_processes=-2 s.py", "--num_processes is -2, but must be"),
        ("--num_processes two s.py", "--num_processes is 'two', but must be"),
        ("--num_processes", "--num_processes expected one argument"),
        ("--main_process_port 65536 s.py", "must be a whole number from 0 to 65535; the nearest legal value is 65535"),
        ("--mixed_precision bf61 s.py", "must be one of no, fp8, fp16, bf16 (did you mean 'bf16'?)"),
        ("--num_proceses 2 s.py", "unknown option --num_proceses (did you mean '--num_processes'?)"),
        ("--num_proc 2 s.py", "unknown option --num_proc"),
        ("--cpu=true s.py", "--cpu ignored explicit argument 'true'"),
        ("--use_fsdp --fsdp_version 3 s.py", "must be a whole number from 1 to 2; the nearest legal value is 2"),
        ("--use_fsdp --fsdp_offload_params s.py", "--fsdp_offload_params is 's.py', but must be true or false"),
        ("--use_fsdp --fsdp_verson 2 s.py", "unknown option --fsdp_verson (did you mean '--fsdp_version'?)"),
        ("--use_fsdp --fsdp_state_dict_type LOCAL_STATE_DICT s.py", "(did you mean 'full_state_dict'?)"),
        ("--use-deepspeed --zero-stage 3 s.py", "--use-deepspeed, --zero-stage (DeepSpeed): not built yet"),
        ("--fp8_backend te s.py", "--fp8_backend (FP8 recipes): not built yet"),
        ("--enable_cpu_affinity s.py", "(NUMA affinity): not built yet"),
    ],
)
def test_command_lines_that_are_refused(capsys, line, said):
    with pytest.raises(SystemExit) as caught:
        launch.main(line.split())
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.startswith("hasten launch: ")
    assert "Traceback" not in printed


def test_a_plan_that_is_refused_is_one_paragraph_and_exit_code_2(capsys):
    assert launch.main(["nosuch.py"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("hasten launch: The script 'nosuch.py' does not exist")
    assert printed.count("\n") == 1


def test_what_follows_the_script_is_untouched():
    words = ["--cpu", "s.py", "--cpu", "--num_processes", "3", "--", "-x", "", "a b", "--", "--help"]
    args = launch.launch_command_parser().parse_args(words)
    assert args.training_script == "s.py"
    assert args.training_script_args == words[2:]
    assert launch.make_spec(args).program == tuple(words[1:])


def test_both_spellings_of_every_flag():
    parser = launch.launch_command_parser()
    for row in TABLE:
        for flag in row.flags:
            spellings = {flag, f"--{flag[2:].replace('_', '-')}" if flag.startswith("--") else flag}
            assert spellings <= set(parser._option_string_actions), row.name


def test_nothing_is_chosen_by_default():
    args = launch.launch_command_parser().parse_args(["s.py"])
    assert {row.dest: getattr(args, row.dest) for row in TABLE if row.flags} == {
        row.dest: None for row in TABLE if row.flags
    }


def test_other_programs_may_set_attributes():
    args = launch.launch_command_parser().parse_args(["s.py"])
    args.num_processes, args.cpu, args.mixed_precision = 2, True, "bf16"
    spec = launch.make_spec(args)
    assert (spec.processes, spec.value("use_cpu"), spec.value("mixed_precision")) == (2, True, "bf16")
    args.use_fsdp, args.fsdp_offload_params = True, "true"
    assert launch.make_spec(args).environment["FSDP_OFFLOAD_PARAMS"] == "true"
    args.use_deepspeed = True
    with pytest.raises(NotImplementedError, match=r"--use_deepspeed \(DeepSpeed"):
        launch.make_spec(args)


def test_as_a_command_of_another_parser():
    parser = argparse.ArgumentParser("other", allow_abbrev=False)
    launch.launch_command_parser(parser.add_subparsers())
    args = parser.parse_args(["launch", "--cpu", "s.py", "--x"])
    assert args.func is launch.launch_command
    assert (args.cpu, args.training_script, args.training_script_args) == (True, "s.py", ["--x"])


def test_launch_command_returns_or_exits_with_the_jobs_code(place):
    (place / "s.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    parser = launch.launch_command_parser()
    assert launch.launch_command(parser.parse_args(["--cpu", "s.py", "0"])) is None
    with pytest.raises(SystemExit) as caught:
        launch.launch_command(parser.parse_args(["--cpu", "--quiet", "s.py", "7"]))
    assert caught.value.code == 7


def test_the_default_file_is_announced_and_can_be_ignored(place, capsys):
    (place / "home").mkdir()
    default = place / "home" / "config.yaml"
    default.write_text("mixed_precision: bf16")
    assert make("s.py").value("mixed_precision") == "bf16"
    assert capsys.readouterr().err == f"hasten: settings from {default} (--no_config ignores it)\n"
    assert make("--quiet s.py").value("mixed_precision") == "bf16"
    assert make("--no-config s.py").value("mixed_precision") == "no"
    assert make("--config_file cpu.yaml s.py").value("mixed_precision") == "no"
    assert capsys.readouterr().err == ""


def test_accelerates_default_file_is_announced_but_not_read_on_the_cpu(place, capsys):
    theirs = place / "hf" / "accelerate" / "default_config.yaml"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 8")
    assert make("--num_processes 1 s.py").value("use_fsdp") is True
    assert str(theirs) in capsys.readouterr().err
    assert make("--cpu s.py").processes == 1
    assert capsys.readouterr().err == ""


def test_variables_of_the_launcher(monkeypatch):
    monkeypatch.setenv("HASTEN_NUM_PROCESSES", "3")
    monkeypatch.setenv("HASTEN_CONFIG_FILE", "c.yaml")
    spec = make("--cpu s.py")
    assert spec.processes == 3
    assert spec.value("mixed_precision") == "fp16"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "ture")
    with pytest.raises(ValueError, match="ACCELERATE_USE_CPU is 'ture'"):
        make("s.py")


FLAGGED = [row for row in TABLE if row.flags]
QUICK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)


def as_flags(row, value) -> list[str]:
    if row.kind != "bool":  # the others have a value after them
        return [f"{row.flags[0]}={write(row, value)}"]
    if not value and row.dest.startswith("no_"):
        return []
    return [row.flags[0] if value else f"--no_{row.dest}"]


def companions(row):
    """What must be on for a setting to be accepted."""
    names = [row.needs] if row.needs else []
    if row.name == "fsdp_activation_checkpointing_offload":
        names.append("fsdp_activation_checkpointing")
    return [BY_NAME[name] for name in names]


@QUICK
@given(data=st.data(), row=st.sampled_from(FLAGGED))
def test_every_flag_reaches_the_plan(data, row):
    value = data.draw(legal_values(row))
    words = as_flags(row, value)
    parsed = launch.launch_command_parser().parse_args([*words, "s.py"])
    if words:
        assert getattr(parsed, row.dest) == value


@QUICK
@given(data=st.data(), row=st.sampled_from([row for row in FLAGGED if row.applies == WORKER]))
def test_every_setting_of_the_workers_goes_from_flag_to_worker(data, row):
    value = data.draw(legal_values(row))
    words = [word for other in companions(row) for word in as_flags(other, True)] + [*as_flags(row, value), "s.py"]
    spec = launch.make_spec(launch.launch_command_parser().parse_args(words))
    assert spec.settings[row.name].origin == FLAG
    assert environment.get(row.name, spec.environment) == value


@QUICK
@given(data=st.data(), row=st.sampled_from([row for row in FLAGGED if row.applies == WORKER and row.key]))
def test_every_setting_of_the_workers_goes_from_file_to_worker(place, data, row):
    value = data.draw(legal_values(row))
    content = write(row, value)
    for part in reversed(row.key.split(".")):
        content = {part: content}
    for other in companions(row):
        section, _, part = other.key.rpartition(".")
        (content.setdefault(section, {}) if section else content)[part] = "true"
    (place / "one.json").write_text(json.dumps(content))
    spec = launch.make_spec(launch.launch_command_parser().parse_args(["--config_file", "one.json", "s.py"]))
    assert spec.settings[row.name].origin == FILE
    assert environment.get(row.name, spec.environment) == value


def test_neither_parent_nor_plan_imports_what_is_heavy(place):
    code = (
        "import sys\nfrom hasten.cli.launch import launch_command_parser, make_spec\n"
        "import hasten.launch.local, hasten.launch.elastic, hasten.launch.notebook, hasten.__main__\n"
        "make_spec(launch_command_parser().parse_args(['--cpu', '--num_processes', '2', 's.py']))\n"
        "print(*(set(sys.modules) & {'torch', 'numpy', 'yaml', 'psutil', 'rich', 'dataclasses', 'inspect'}))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert found.stdout.split() == []

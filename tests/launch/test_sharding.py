"""Every setting of sharding, on its way from the command line or a file through the launcher to the plugin in the script."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hasten.cli import launch
from hasten.parallel.fsdp import FullyShardedDataParallelPlugin, setting_of
from hasten.settings import environment, export
from hasten.settings.resolve import FILE, FLAG
from hasten.settings.schema import BY_NAME, TABLE
from hasten.settings.values import write
from tests.settings.strategies import legal_values

ROWS = [row for row in TABLE if row.needs == "use_fsdp"]
FIELDS = {setting_of(field.name): field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)}
OFFLOAD = BY_NAME["fsdp_activation_checkpointing_offload"]
QUICK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    for row in TABLE:
        if row.env:
            monkeypatch.delenv(row.env, raising=False)
    for name in ("HASTEN_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").touch()
    return tmp_path


def make(*words: str):
    return launch.make_spec(launch.launch_command_parser().parse_args([*words, "s.py"]))


def seen(variables: dict[str, str]) -> dict[str, Any]:
    """What a plugin without arguments holds in a process that has these variables."""
    with export.exported(variables):
        return vars(FullyShardedDataParallelPlugin())


def given_in_python(name: str, value: Any) -> dict[str, Any]:
    fields = {FIELDS[name]: value} | ({"activation_checkpointing": True} if name == OFFLOAD.name else {})
    try:
        return vars(FullyShardedDataParallelPlugin(**fields))
    finally:
        export.reset()


def test_every_row_is_a_field_of_the_plugin():
    assert {row.name for row in ROWS} <= set(FIELDS)


@QUICK
@given(data=st.data(), row=st.sampled_from(ROWS))
def test_a_flag_means_what_the_argument_means(data, row):
    value = data.draw(legal_values(row))
    companions = ["--fsdp_activation_checkpointing=true"] if row is OFFLOAD else []
    spec = make("--use_fsdp", *companions, f"{row.flags[0]}={write(row, value)}")
    assert spec.settings[row.name].origin == FLAG
    assert environment.get("use_fsdp", spec.environment) is True
    assert seen(spec.environment) == given_in_python(row.name, value)


@QUICK
@given(data=st.data(), row=st.sampled_from(ROWS), prefixed=st.booleans())
def test_a_key_means_what_the_argument_means(place, data, row, prefixed):
    value = data.draw(legal_values(row))
    section = {row.name if prefixed else row.name.removeprefix("fsdp_"): write(row, value)}
    if row is OFFLOAD:
        section["fsdp_activation_checkpointing"] = True
    (place / "c.json").write_text(json.dumps({"distributed_type": "FSDP", "num_processes": 1, "fsdp_config": section}))
    spec = make("--config_file", "c.json")
    assert spec.settings[row.name].origin == FILE
    assert seen(spec.environment) == given_in_python(row.name, value)


# As accelerate's documentation and its questions write them.
VERSION_1 = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: {strategy}
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: {cpu}
"""
VERSION_2 = """
distributed_type: FSDP
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: false
  fsdp_offload_params: true
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: Block,Head
  fsdp_version: 2
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: true
"""


@pytest.mark.parametrize(
    ("strategy", "frees"), [("FULL_SHARD", True), ("1", True), ("SHARD_GRAD_OP", False), ("2", False)]
)
def test_a_file_of_version_1_is_translated(place, strategy, frees):
    (place / "c.yaml").write_text(VERSION_1.format(strategy=strategy, cpu="false"))
    spec = make("--config_file", "c.yaml", "--cpu")
    assert spec.processes == 2
    found = seen(spec.environment)
    assert (found["fsdp_version"], found["reshard_after_forward"], found["_prefetch"]) == (2, frees, (0, 0))
    assert found["transformer_cls_names_to_wrap"] == ["BertLayer"]
    assert (found["state_dict_type"].name, found["cpu_ram_efficient_loading"]) == ("SHARDED_STATE_DICT", True)


def test_a_file_that_only_reshards_in_the_words_of_version_1(place):
    (place / "c.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_reshard_after_forward: SHARD_GRAD_OP}")
    found = seen(make("--config_file", "c.yaml").environment)
    assert (found["reshard_after_forward"], found["state_dict_type"].name) == (False, "FULL_STATE_DICT")


def test_a_file_of_version_2_keeps_leftovers_of_version_1(place):
    (place / "c.yaml").write_text(
        VERSION_2.replace("  fsdp_version", "  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_version")
    )
    found = seen(make("--config_file", "c.yaml").environment)
    assert (found["reshard_after_forward"], found["activation_checkpointing"]) == (False, True)


def test_what_is_off_is_not_told_to_the_processes(place):
    (place / "c.yaml").write_text(VERSION_2)
    spec = make("--config_file", "c.yaml", "--no_use_fsdp")
    assert spec.environment["ACCELERATE_USE_FSDP"] == "false"
    assert not [name for name in spec.environment if name.startswith("FSDP_")]


def test_origins(place, monkeypatch):
    (place / "c.yaml").write_text(VERSION_2)
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "false")
    spec = make("--config_file", "c.yaml", "--fsdp_min_num_params", "7")
    where = {name: spec.settings[f"fsdp_{name}"].where for name in ("min_num_params", "offload_params", "version")}
    assert where == {
        "min_num_params": "--fsdp_min_num_params",
        "offload_params": "the environment variable FSDP_OFFLOAD_PARAMS",
        "version": "c.yaml: fsdp_config.fsdp_version",
    }
    assert spec.settings["use_fsdp"].where == "c.yaml: use_fsdp"


SCRIPT = """
import json, os, torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from hasten import Accelerator

torch.set_num_threads(1)

class Block(nn.Sequential): pass
class Head(nn.Linear): pass

accelerator = Accelerator()
model = accelerator.prepare(nn.Sequential(Block(nn.Linear(4, 4)), Block(nn.Linear(4, 4)), Head(4, 2)))
model(torch.ones(2, 4)).sum().backward()
plugin = accelerator.state.fsdp_plugin
found = {
    "label": accelerator.distributed_type.value,
    "is_fsdp2": accelerator.is_fsdp2,
    "units": [name for name, module in model.named_modules() if isinstance(module, FSDPModule)],
    "frees": plugin.reshard_after_forward,
    "offload": type(plugin.cpu_offload).__name__,
    "classes": plugin.transformer_cls_names_to_wrap,
    "again": plugin.activation_checkpointing,
    "saved": plugin.state_dict_type.name,
    "use": os.environ["ACCELERATE_USE_FSDP"],
}
with open(f"found-{accelerator.process_index}.json", "w") as file:
    file.write(json.dumps(found))
accelerator.end_training()
"""


@pytest.mark.parametrize("from_file", [False, True])
def test_a_sharded_job(place, jobs, from_file):
    script = jobs.script(SCRIPT)
    (place / "c.yaml").write_text(VERSION_2)
    words = "--cpu --num_processes 2 --use_fsdp --fsdp_version 2 --fsdp_transformer_layer_cls_to_wrap Block"
    words += " --fsdp_reshard_after_forward false --fsdp_state_dict_type full_state_dict"
    done = jobs.run(*(["--config_file", "c.yaml"] if from_file else words.split()), script)
    assert done.returncode == 0, done.stderr
    found = [json.loads((place / f"found-{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    assert found[0] == {
        "label": "FSDP",
        "is_fsdp2": True,
        "units": ["", "0", "1", "2"],  # the output is a unit of its own
        "frees": False,
        "offload": "CPUOffloadPolicy" if from_file else "OffloadPolicy",
        "classes": ["Block", "Head"] if from_file else ["Block"],
        "again": from_file,
        "saved": "SHARDED_STATE_DICT" if from_file else "FULL_STATE_DICT",
        "use": "true",
    }

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hasten.settings import files
from hasten.settings.schema import TABLE
from hasten.settings.values import write
from tests.settings.strategies import legal_values

ACCELERATE = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_mode: default
  dynamo_use_dynamic: false
  dynamo_use_fullgraph: true
"""


@pytest.fixture
def load(tmp_path):
    def load(text: str, name: str = "config.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return files.load(str(path))

    return load


def test_a_file_of_accelerate(load):
    file = load(ACCELERATE)
    assert file.values == {
        "debug": False,
        "gpu_ids": ("all",),
        "machine_rank": 0,
        "mixed_precision": "bf16",
        "num_machines": (1, 1),
        "num_processes": 8,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
        "dynamo_backend": "INDUCTOR",
        "dynamo_mode": "default",
        "dynamo_use_dynamic": False,
        "dynamo_use_fullgraph": True,
    }
    assert file.keys["dynamo_backend"] == "dynamo_config.dynamo_backend"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", {}),
        ("mixed_precision: no", {"mixed_precision": "no"}),
        ("num_machines: 1:4", {"num_machines": (1, 4)}),
        ("num_processes: null\ngpu_ids:\n", {}),
        ("use_cpu: yes", {"use_cpu": True}),
        ("gpu_ids: [0, 1]", {"gpu_ids": ("0", "1")}),
        ("distributed_type: 'NO'\nnum_processes: 1", {"num_processes": 1}),
        ("distributed_type: NO", {"num_processes": 1}),
        ("distributed_type: MULTI_CPU\nnum_processes: 4", {"num_processes": 4, "use_cpu": True}),
        ("distributed_type: MULTI_CPU\nuse_cpu: false", {"use_cpu": False}),
        ("fp16: true", {"mixed_precision": "fp16"}),
        ("fp16: false", {"mixed_precision": "no"}),
        ("dynamo_backend: EAGER", {"dynamo_backend": "EAGER"}),
        ("dynamo_config: {backend: eager}", {"dynamo_backend": "EAGER"}),
        ("distributed_type: FSDP", {"use_fsdp": True}),
        ("distributed_type: FSDP\nuse_fsdp: false", {"use_fsdp": False}),
        ("fsdp_config: {sharding_strategy: 2}", {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}),
        ("fsdp_config: {transformer_layer_cls_to_wrap: [A, B]}", {"fsdp_transformer_layer_cls_to_wrap": ("A", "B")}),
        ("fsdp_config: {fsdp_min_num_params: null}", {}),
        ("dynamo_config: {}\nfsdp_config: {}\ndeepspeed_config: {}", {}),
        ('{"use_cpu": true}', {"use_cpu": True}),
    ],
)
def test_yaml(load, text, values):
    assert load(text).values == values


def test_json(load):
    text = '{"use_cpu": true, "num_processes": 2, "gpu_ids": null, "monitor_interval": 0.5, "dynamo_config": {}}'
    assert load(text, "config.json").values == {"use_cpu": True, "num_processes": 2, "monitor_interval": 0.5}


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("mixed_precison: no", ValueError, "unknown key 'mixed_precison' (did you mean 'mixed_precision'?)"),
        ("a: 1\nb: 2", ValueError, "unknown key 'a'; unknown key 'b'"),
        ("dynamo_config: {dynamo_bakend: no}", ValueError, "did you mean 'dynamo_config.dynamo_backend'?"),
        ("num_processes: many", ValueError, "num_processes is 'many', but must be a whole number of at least 1."),
        ("num_processes: -1", ValueError, "num_processes is -1; write the number"),
        ("- a\n- b", ValueError, "must hold keys and values, not a list"),
        ("a: [", ValueError, "is not valid"),
        ("dynamo_backend: EAGER\ndynamo_config: {dynamo_backend: TVM}", ValueError, "set the same thing"),
        (
            "fsdp_config: {fsdp_verson: 2}",
            ValueError,
            "'fsdp_config.fsdp_verson' (did you mean 'fsdp_config.fsdp_version'?)",
        ),
        (
            "fsdp_config: {fsdp_version: 3}",
            ValueError,
            "fsdp_config.fsdp_version is 3, but must be a whole number from 1 to 2",
        ),
        ("fsdp_config: {fsdp_offload_params: ja}", ValueError, "fsdp_config.fsdp_offload_params is 'ja'"),
        ("fsdp_config: {version: 1, fsdp_version: 2}", ValueError, "set the same thing to different values"),
        ("distributed_type: TPU", NotImplementedError, "distributed_type TPU is not built yet"),
        ("compute_environment: AMAZON_SAGEMAKER", NotImplementedError, "SageMaker"),
        ("enable_cpu_affinity: true", NotImplementedError, "NUMA affinity"),
        ("main_training_function: train", NotImplementedError, "main_training_function asks for TPU"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(load, tmp_path, text, error, said):
    with pytest.raises(error) as caught:
        load(text)
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_file_that_is_not_there():
    with pytest.raises(ValueError, match=r"The configuration file /no/such\.yaml cannot be read: No such file"):
        files.load("/no/such.yaml")


def test_a_broken_json(load):
    with pytest.raises(ValueError, match="is not valid"):
        load("{", "config.json")


def test_ours_comes_before_accelerates(tmp_path):
    environ = {"HASTEN_HOME": str(tmp_path / "ours"), "HF_HOME": str(tmp_path / "hf")}
    assert files.default_file(environ=environ) is None
    theirs = tmp_path / "hf" / "accelerate" / "default_config.yaml"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    assert files.default_file(environ=environ) == str(theirs)
    assert files.default_file(use_cpu=True, environ=environ) is None
    ours = tmp_path / "ours" / "config.yaml"
    ours.parent.mkdir()
    ours.touch()
    assert files.default_file(environ=environ) == str(ours)
    assert files.default_file(use_cpu=True, environ=environ) == str(ours)


def test_homes(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.home({}) == os.path.join(str(tmp_path), ".cache", "hasten")
    theirs = tmp_path / "xdg" / "huggingface" / "accelerate" / "default_config.json"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    assert files.default_file(environ={"XDG_CACHE_HOME": str(tmp_path / "xdg")}) == str(theirs)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), row=st.sampled_from([row for row in TABLE if row.key]), as_json=st.booleans())
def test_every_key_is_read_as_it_was_written(tmp_path, data, row, as_json):
    value = data.draw(legal_values(row))
    content = write(row, value)
    for part in reversed(row.key.split(".")):
        content = {part: content}
    path = tmp_path / ("c.json" if as_json else "c.yaml")
    path.write_text(json.dumps(content))
    assert files.load(str(path)).values == {row.name: value}

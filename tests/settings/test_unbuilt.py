import pytest

from hasten.settings.unbuilt import flag_area, is_off, key_areas, used


@pytest.mark.parametrize(
    ("flag", "area"),
    [
        ("--use_fsdp", None),
        ("--zero-stage=2", "DeepSpeed"),
        ("--zero_stage", "DeepSpeed"),
        ("--offload-optimizer-nvme-path", "DeepSpeed"),
        ("--megatron_lm_tp_degree", "Megatron-LM"),
        ("--parallelism_config_cp_size", "parallelism over several axes"),
        ("--fp8_backend", "FP8 recipes"),
        ("--tpu", "TPU"),
        ("--mpirun_hostfile", "MPI"),
        ("--enable_cpu_affinity", "NUMA affinity"),
        ("--num_processes", None),
        ("--fs", None),
    ],
)
def test_areas_of_flags(flag, area):
    assert flag_area(flag) == area


@pytest.mark.parametrize("value", [None, False, "", "no", "False", {}, [], {"a": None, "b": "no"}, ["", None]])
def test_off(value):
    assert is_off(value)


@pytest.mark.parametrize("value", [True, "yes", "0", 1, {"a": "1"}, ["x"]])
def test_on(value):
    assert not is_off(value)


def test_what_a_parsed_command_line_asks_for():
    attributes = {"use_deepspeed": True, "tpu": False, "vm": [], "zero_stage": 2, "num_processes": 2}
    assert dict(used(attributes)) == {"--use_deepspeed": "DeepSpeed", "--zero_stage": "DeepSpeed"}


def test_keys_have_areas():
    assert key_areas()["deepspeed_config"] == "DeepSpeed"

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.settings.schema import BY_NAME, TABLE, Setting
from hasten.settings.values import convert, describe, nearest, parse, write
from tests.settings.strategies import legal_values


@settings(deadline=None)
@given(data=st.data(), row=st.sampled_from(TABLE))
def test_what_is_written_reads_back(data, row):
    value = data.draw(legal_values(row))
    assert parse(row, write(row, value)) == value
    assert convert(row, value) == value


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("use_cpu", "TRUE", True),
        ("use_cpu", "1", True),
        ("use_cpu", "on", True),
        ("use_cpu", "f", False),
        ("use_cpu", "No", False),
        ("mixed_precision", "BF16", "bf16"),
        ("dynamo_backend", "inductor", "INDUCTOR"),
        ("num_processes", " 4 ", 4),
        ("num_machines", "2", (2, 2)),
        ("num_machines", "1:4", (1, 4)),
        ("num_cpu_threads_per_process", "4,2", (4, 2)),
        ("gpu_ids", "0, 2", ("0", "2")),
        ("rdzv_conf", "timeout=3, x = y=z", (("timeout", "3"), ("x", "y=z"))),
        ("monitor_interval", "1e-1", 0.1),
        ("main_process_port", "0", 0),
        ("tee", "0:1,1:2", "0:1,1:2"),
        ("fsdp_offload_params", "True", True),
        ("fsdp_forward_prefetch", "false", False),
        ("fsdp_forward_prefetch", "3", 3),
        ("fsdp_reshard_after_forward", "yes", True),
        ("fsdp_reshard_after_forward", "shard_grad_op", "SHARD_GRAD_OP"),
        ("fsdp_sharding_strategy", "4", "HYBRID_SHARD"),
        ("fsdp_sharding_strategy", "_HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2"),
        ("fsdp_state_dict_type", "3", "SHARDED_STATE_DICT"),
    ],
)
def test_legal_text(name, text, value):
    assert parse(BY_NAME[name], text) == value


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("use_cpu", "ture", "is 'ture', but must be true or false (did you mean 'true'?)"),
        ("mixed_precision", "bf17", "is 'bf17', but must be one of no, fp8, fp16, bf16 (did you mean 'bf16'?)"),
        ("mixed_precision", "8", "is '8', but must be one of no, fp8, fp16, bf16"),
        ("num_processes", "0", "is 0, but must be a whole number of at least 1; the nearest legal value is 1"),
        ("num_processes", "-1", "is -1, but must be a whole number of at least 1; the nearest legal value is 1"),
        ("num_processes", "2.5", "is '2.5', but must be a whole number of at least 1"),
        ("num_processes", "1_0", "is '1_0', but must be a whole number of at least 1"),
        ("num_processes", "", "is empty, but must be a whole number of at least 1"),
        ("main_process_port", "70000", "must be a whole number from 0 to 65535; the nearest legal value is 65535"),
        ("num_machines", "4:1", "is '4:1', but must be fewest:most (did you mean 1:4?)"),
        ("monitor_interval", "nan", "is 'nan', but must be a number of at least 0.001"),
        ("monitor_interval", "0", "the nearest legal value is 0.001"),
        ("fsdp_version", "3", "is 3, but must be a whole number from 1 to 2; the nearest legal value is 2"),
        (
            "fsdp_forward_prefetch",
            "-1",
            "must be true, false, or a whole number of at least 0; the nearest legal value is 0",
        ),
        (
            "fsdp_reshard_after_forward",
            "NO_RESHARD",
            "must be true, false, a whole number of at least 1, or one of full_shard, shard_grad_op, no_shard, hybrid_shard, "
            "hybrid_shard_zero2 (did you mean 'no_shard'?)",
        ),
        (
            "fsdp_state_dict_type",
            "LOCAL_STATE_DICT",
            "must be one of full_state_dict, sharded_state_dict (did you mean",
        ),
        ("gpu_ids", "0,,1", "each once"),
        ("gpu_ids", "0,0", "each once"),
        ("rdzv_conf", "timeout", "must be a list key=value,key=value"),
        ("tee", "4", "must be 0, 1, 2 or 3"),
        ("dynamo_mode", "reduce_overhead", "did you mean 'reduce-overhead'?"),
    ],
)
def test_illegal_text_names_the_nearest_legal_value(name, text, said):
    with pytest.raises(ValueError) as caught:
        parse(BY_NAME[name], text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "given_value", "value"),
    [
        ("mixed_precision", False, "no"),  # what YAML 1.1 makes of `no`
        ("use_cpu", 1, True),
        ("num_processes", 2, 2),
        ("num_machines", 3, (3, 3)),
        ("gpu_ids", [0, 1], ("0", "1")),
        ("monitor_interval", 2, 2.0),
    ],
)
def test_values_from_python(name, given_value, value):
    assert convert(BY_NAME[name], given_value) == value


def test_values_from_python_are_checked():
    with pytest.raises(ValueError, match="must be a whole number"):
        convert(BY_NAME["num_processes"], 2.5)
    with pytest.raises(ValueError, match="must be a whole number"):
        convert(BY_NAME["num_processes"], True)


def test_enum_members_stand_for_their_values():
    from hasten.settings.enums import DynamoBackend, PrecisionType

    assert convert(BY_NAME["mixed_precision"], PrecisionType.BF16) == "bf16"
    assert convert(BY_NAME["dynamo_backend"], DynamoBackend.NO) == "NO"


def test_descriptions():
    assert describe(BY_NAME["machine_rank"]) == "a whole number of at least 0"
    assert describe(Setting("x", "int", "", "")) == "a whole number"
    assert describe(BY_NAME["rdzv_backend"]) == "one of static, c10d, etcd, etcd-v2"


def test_nearest():
    assert nearest("--num_proceses", ["--num_processes", "--cpu"]) == " (did you mean '--num_processes'?)"
    assert nearest("zebra", ["--cpu"]) == ""

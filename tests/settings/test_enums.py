import pickle

import pytest

from hasten.settings import enums

VALUES = {
    enums.PrecisionType: ["no", "fp8", "fp16", "bf16"],
    enums.RNGType: ["torch", "cuda", "mlu", "sdaa", "musa", "npu", "xla", "xpu", "hpu", "neuron", "generator"],
    enums.DDPCommunicationHookType: ["no", "fp16", "bf16", "power_sgd", "batched_power_sgd"],
    enums.LoggerType: [
        "all",
        "aim",
        "tensorboard",
        "wandb",
        "trackio",
        "comet_ml",
        "mlflow",
        "clearml",
        "dvclive",
        "swanlab",
    ],
    enums.ComputeEnvironment: ["LOCAL_MACHINE", "AMAZON_SAGEMAKER"],
    enums.FP8BackendType: ["NO", "TE", "MSAMP", "AO"],
}


@pytest.mark.parametrize(("kind", "values"), VALUES.items())
def test_values_in_order(kind: type[enums.BaseEnum], values: list[str]):
    assert kind.list() == values
    assert [str(member) for member in kind] == values
    assert [f"{member}" for member in kind] == values


@pytest.mark.parametrize("kind", [*VALUES, enums.DynamoBackend])
def test_values_and_members_are_in_and_others_are_not(kind: type[enums.BaseEnum]):
    for member in kind:
        assert member in kind
        assert member.value in kind
        assert kind(member.value) is kind(member) is member
        assert pickle.loads(pickle.dumps(member)) is member
    for other in ("none of them", "", None, 3, [], object()):
        assert other not in kind


@pytest.mark.parametrize(
    "kind", [enums.PrecisionType, enums.DynamoBackend, enums.FP8BackendType, enums.DistributedType]
)
def test_members_are_strings_where_users_compare_them_with_strings(kind: type[enums.BaseEnum]):
    for member in kind:
        assert isinstance(member, str)
        assert member == member.value


def test_every_device_type_has_a_label():
    assert [member.value for member in enums.DistributedType] == [
        "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "DEEPSPEED", "FSDP",
        "XLA", "MEGATRON_LM", "MULTI_HPU", "MULTI_NEURON",
    ]  # fmt: skip
    assert str(enums.DistributedType.MULTI_CPU) == "DistributedType.MULTI_CPU"


def test_backends_of_compile_are_in_upper_case():
    assert "INDUCTOR" in enums.DynamoBackend
    assert "HPU_BACKEND" in enums.DynamoBackend
    assert "inductor" not in enums.DynamoBackend


def test_all_names_every_enum():
    assert sorted(enums.__all__) == enums.__all__
    assert all(hasattr(enums, name) for name in enums.__all__)

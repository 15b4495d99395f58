import pickle
from datetime import timedelta

import pytest

from hasten.settings.enums import DDPCommunicationHookType
from hasten.settings.handlers import (
    AutocastKwargs,
    DistributedDataParallelSettings,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from hasten.settings.kwargs import KwargsHandler

HANDLERS: list[type[KwargsHandler]] = [
    AutocastKwargs,
    DistributedDataParallelSettings,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
]


@pytest.mark.parametrize("kind", HANDLERS)
def test_defaults_forward_nothing_and_objects_compare_and_pickle(kind: type[KwargsHandler]):
    assert kind().to_kwargs() == {}
    assert kind() == kind() == pickle.loads(pickle.dumps(kind()))


def test_arguments_can_be_given_by_position_in_the_order_of_the_reference():
    assert AutocastKwargs(False, True).to_kwargs() == {"enabled": False, "cache_enabled": True}
    assert GradScalerKwargs(8.0, 3.0, 0.25, 5, False).to_kwargs() == {
        "init_scale": 8.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 5, "enabled": False,
    }  # fmt: skip
    assert InitProcessGroupKwargs("gloo", "file:///x", timedelta(seconds=3)).to_kwargs() == {
        "backend": "gloo", "init_method": "file:///x", "timeout": timedelta(seconds=3),
    }  # fmt: skip
    assert ProfileKwargs(["cpu"], {"wait": 1}, None, True, True, True, True, True, "traces").to_kwargs() == {
        "activities": ["cpu"], "schedule_option": {"wait": 1}, "record_shapes": True, "profile_memory": True,
        "with_stack": True, "with_flops": True, "with_modules": True, "output_trace_dir": "traces",
    }  # fmt: skip


@pytest.mark.parametrize("seconds", [7, 600, 1800])
def test_every_timeout_that_was_asked_for_is_forwarded(seconds: int):
    timeout = timedelta(seconds=seconds)
    assert InitProcessGroupKwargs(timeout=timeout).to_kwargs() == {"timeout": timeout}


def test_the_settings_of_the_hook_are_never_arguments_of_ddp():
    settings = DistributedDataParallelSettings(
        1,
        False,
        3,
        True,
        True,
        True,
        True,
        DDPCommunicationHookType.POWER_SGD,
        DDPCommunicationHookType.BF16,
        {"rank": 2},
    )
    arguments = {
        "dim": 1, "broadcast_buffers": False, "bucket_cap_mb": 3, "find_unused_parameters": True, "check_reduction": True,
        "gradient_as_bucket_view": True, "static_graph": True,
    }  # fmt: skip
    assert settings.to_kwargs() == settings.to_dict() == arguments
    assert set(DistributedDataParallelSettings().to_dict()) == set(arguments)
    assert settings.comm_state_option == {"rank": 2}


def test_objects_do_not_share_the_options_of_the_hook():
    DistributedDataParallelSettings().comm_state_option["rank"] = 2
    assert DistributedDataParallelSettings().comm_state_option == {}

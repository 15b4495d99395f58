import os
import pickle
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from hasten.settings import export
from hasten.settings.enums import DistributedType
from hasten.state.accelerator import AcceleratorState, is_initialized, read_precision
from hasten.state.partial import PartialState
from hasten.world.context import CONTEXT
from hasten.world.mesh import ParallelismConfig
from hasten.world.process import World
from tests.ranks import run_ranks

ALONE = """Distributed environment: DistributedType.NO
Num processes: 1
Process index: 0
Local process index: 0
Device: cpu

Mixed precision type: {}
"""


def build(*args: Any, **kwargs: Any) -> AcceleratorState:
    return AcceleratorState(*args, _from_accelerator=True, **kwargs)


def test_it_is_built_by_an_accelerator():
    with pytest.raises(
        ValueError, match="Please make sure to properly initialize your accelerator via `accelerator = Accelerator"
    ):
        AcceleratorState()
    assert not is_initialized()
    build()
    assert is_initialized()
    assert AcceleratorState().mixed_precision == "no"


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_the_text_is_that_of_the_reference(precision: str):
    assert repr(build(precision)) == str(AcceleratorState()) == ALONE.format(precision)


def test_it_shows_what_the_partial_state_shows():
    PartialState().mine = 3  # type: ignore[attr-defined]
    state = build(cpu=True)
    assert state.mine == 3
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert (state.device, state.distributed_type, state.backend) == (torch.device("cpu"), DistributedType.NO, None)
    assert (state.fsdp_plugin, state.megatron_lm_plugin, state.dynamo_plugin, state.deepspeed_plugin) == (None,) * 4
    assert (state.parallelism_config, state.device_mesh, state.is_fsdp2) == (None, None, False)
    assert not state.use_distributed
    assert state.is_main_process
    assert state.initialized


def test_all_instances_share_their_attributes():
    first = build()
    first.mine = 3  # type: ignore[attr-defined]
    assert AcceleratorState().mine == 3
    assert AcceleratorState().__dict__ is first.__dict__ is AcceleratorState._shared_state


# ---- the precision ----


@pytest.mark.parametrize(("given", "chosen"), [(None, "no"), ("no", "no"), ("BF16", "bf16"), ("fp16", "fp16")])
def test_precisions(given: str | None, chosen: str):
    assert read_precision(given) == chosen


def test_the_environment_chooses_where_nothing_is_given(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert read_precision(None) == "bf16"
    assert read_precision("no") == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "")
    assert read_precision(None) == "no"


@pytest.mark.parametrize("given", ["fp32", "", "bf", 16, object()])
def test_unknown_precisions_are_refused_with_a_list(given: Any):
    with pytest.raises(
        ValueError, match=r"Unknown mixed_precision mode: .*. Choose between \['no', 'fp8', 'fp16', 'bf16'\]"
    ):
        build(given)
    assert not is_initialized()


def test_what_is_not_built_is_refused():
    with pytest.raises(
        NotImplementedError, match=r"mixed_precision='fp8' is not built yet \(area: precision\). Choose 'no'"
    ):
        build("fp8")
    assert not is_initialized()


def test_a_precision_that_the_device_lacks_is_refused_and_another_can_be_chosen():
    world = World(device=torch.device("meta"))
    with pytest.raises(
        ValueError, match=r"mixed_precision='bf16' is not supported on 'meta' with torch .*; supported here: \['no'\]"
    ):
        build("bf16", _world=world)
    CONTEXT.world = world
    with pytest.raises(ValueError, match="mixed_precision='fp16' is not supported on 'meta'"):
        build("fp16")
    assert not is_initialized()
    assert build("no").mixed_precision == "no"


def test_it_cannot_be_changed():
    build("bf16")
    assert build().mixed_precision == build("bf16").mixed_precision == "bf16"
    with pytest.raises(
        ValueError,
        match=r"AcceleratorState has already been initialized and cannot be changed, restart your runtime completely and pass "
        r"`mixed_precision='no'` to `Accelerator\(\)`. It is now 'bf16'",
    ):
        build("no")
    with pytest.raises(ValueError, match="Unknown mixed_precision mode"):
        build("half")


def test_the_cpu_must_be_asked_for_first():
    CONTEXT.world = World(device=torch.device("meta"))
    build()
    with pytest.raises(ValueError, match="cpu=True was asked for, but this process already uses meta"):
        build(cpu=True)


def test_a_later_mesh_is_shown():
    build()
    given = ParallelismConfig(dp_replicate_size=1)
    assert build(parallelism_config=given).parallelism_config is AcceleratorState().parallelism_config is given


# ---- worlds of their own ----


def test_a_state_for_a_part_of_the_job_is_its_own():
    shared = build("no")
    own = build("bf16", _world=World())
    assert (shared.mixed_precision, own.mixed_precision, AcceleratorState().mixed_precision) == ("no", "bf16", "no")
    assert own.__dict__ is not shared.__dict__


# ---- resets ----


def test_after_a_reset_known_attributes_say_why_they_are_gone():
    state = build()
    shared = state.__dict__
    AcceleratorState._reset_state()
    assert AcceleratorState._shared_state is shared == {}
    assert not is_initialized()
    assert PartialState._shared_state
    for name in ("device", "num_processes", "backend", "distributed_type", "_mixed_precision", "debug", "fsdp_plugin"):
        with pytest.raises(
            AttributeError,
            match=f"`AcceleratorState` object has no attribute `{name}`. This happens if `AcceleratorState._reset_state",
        ):
            getattr(state, name)
    for name in ("other", "mixed_precision"):
        with pytest.raises(AttributeError, match=f"^'AcceleratorState' object has no attribute '{name}'$"):
            getattr(state, name)


def test_a_reset_can_take_the_world_with_it():
    build("bf16")
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == {}
    assert CONTEXT.world is None
    assert build().mixed_precision == "no"


def test_it_pickles():
    state = pickle.loads(pickle.dumps(build("bf16")))
    assert state.mixed_precision == "bf16"
    assert state.world is CONTEXT.world


# ---- together ----


def together() -> list[Any]:
    state = build("bf16", timeout=timedelta(seconds=40))
    found: list[Any] = [str(state), state.world.timeout]
    build(timeout=timedelta(seconds=4))
    found.append(state.world.timeout)
    state.destroy_process_group()
    state.destroy_process_group()
    return [*found, torch.distributed.is_initialized()]


def test_arguments_of_the_group_are_obeyed_whenever_they_come():
    for rank, found in enumerate(run_ranks(together, 2, initialise=False)):
        assert found == [
            ALONE.format("bf16")
            .replace("DistributedType.NO", "DistributedType.MULTI_CPU  Backend: gloo")
            .replace("processes: 1", "processes: 2")
            .replace("ndex: 0", f"ndex: {rank}"),
            timedelta(seconds=40),
            timedelta(seconds=4),
            False,
        ]


# ---- sharding ----


@pytest.fixture
def unsharded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    yield
    export.reset()


def test_other_libraries_see_that_a_job_is_sharded(unsharded: None):
    build()
    assert os.environ.get("ACCELERATE_USE_FSDP") is None
    AcceleratorState._reset_state()
    plugin = object()
    state = build(fsdp_plugin=plugin)
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    assert state.fsdp_plugin is AcceleratorState().fsdp_plugin is plugin
    assert state.distributed_type is DistributedType.NO  # one process has nobody to share with
    assert not state.is_fsdp2
    AcceleratorState._reset_state()
    assert "ACCELERATE_USE_FSDP" not in os.environ


def test_what_the_user_has_set_is_not_undone(unsharded: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "1")
    build(fsdp_plugin=object())
    AcceleratorState._reset_state()
    assert os.environ["ACCELERATE_USE_FSDP"] == "1"


def test_a_world_of_its_own_says_nothing_of_the_whole_job(unsharded: None):
    state = build(fsdp_plugin=(plugin := object()), _world=World(device=torch.device("cpu")))
    assert state.fsdp_plugin is plugin
    assert "ACCELERATE_USE_FSDP" not in os.environ


def labels() -> list[Any]:
    plain = build()
    before = plain.distributed_type
    state = build(fsdp_plugin=(plugin := object()))
    told = os.environ["ACCELERATE_USE_FSDP"]
    return [before, state.distributed_type, state.is_fsdp2, plain.fsdp_plugin is plugin, told]


def test_several_ranks_are_labelled():
    assert run_ranks(labels, 2) == [[DistributedType.MULTI_CPU, DistributedType.FSDP, True, True, "true"]] * 2

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hasten.settings.enums import DistributedType
from hasten.state.partial import PartialState, ProcessView
from hasten.world import process
from hasten.world.context import CONTEXT
from tests.ranks import run_ranks

ALONE = """Distributed environment: DistributedType.NO
Num processes: 1
Process index: 0
Local process index: 0
Device: cpu
"""
LOST = (
    r"`PartialState` object has no attribute `{}`. This happens if `PartialState._reset_state\(\)` was called and an `Accelerator` "
    "or `PartialState` was not reinitialized."
)


# ---- alone ----


def test_attributes():
    state = PartialState()
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert (state.device, state.default_device) == (torch.device("cpu"), torch.device("cpu"))
    assert (state.distributed_type, state.backend, state._cpu) == (DistributedType.NO, None, False)
    assert not state.debug
    assert not state.fork_launched
    assert not state.use_distributed
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.is_last_process
    assert state.initialized


def test_the_text_is_that_of_the_reference():
    assert repr(PartialState()) == str(PartialState()) == ALONE


def test_all_instances_share_attributes_and_those_that_users_add_stay():
    first, second = PartialState(), PartialState()
    first.mine = 3  # type: ignore[attr-defined]
    assert second.mine == PartialState().mine == 3  # type: ignore[attr-defined]
    assert first.__dict__ is second.__dict__ is PartialState._shared_state


def test_the_environment_sets_flags(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "yes")
    monkeypatch.setenv("FORK_LAUNCHED", "1")
    state = PartialState()
    assert state.debug
    assert state._cpu
    assert state.fork_launched


def test_after_a_reset_known_attributes_say_why_they_are_gone():
    state = PartialState()
    shared = state.__dict__
    PartialState._reset_state()
    assert PartialState._shared_state is shared == {}
    assert CONTEXT.world is None
    assert not state.initialized
    for name in PartialState._known_attrs:
        with pytest.raises(AttributeError, match=LOST.format(name)):
            getattr(state, name)
    with pytest.raises(AttributeError, match=r"^'PartialState' object has no attribute 'other'$"):
        state.other  # noqa: B018
    assert PartialState().device == state.device


@pytest.mark.parametrize(
    "use",
    [
        lambda state: state.is_main_process,
        lambda state: state.use_distributed,
        lambda state: state.wait_for_everyone(),
        lambda state: state.on_main_process(print),
        lambda state: state.main_process_first().__enter__(),
        lambda state: state.print("x"),
    ],
)
def test_after_a_reset_nothing_is_joined_by_accident(use: Any):
    state = PartialState()
    PartialState._reset_state()
    with pytest.raises(
        ValueError, match="The `PartialState` or `Accelerator` must be initialized before calling this function"
    ):
        use(state)
    assert CONTEXT.world is None


def test_what_is_not_built_is_refused():
    with pytest.raises(
        NotImplementedError, match=r"SageMaker's data-parallel backend is not built yet \(area: launchers\)"
    ):
        PartialState(_use_sagemaker_dp=True)


def test_ending_is_safe_at_any_time():
    state = PartialState()
    state.set_device()
    state.destroy_process_group()
    state.destroy_process_group()


# ---- decorators, in any world ----


class View(ProcessView):
    def __init__(self, world: process.World) -> None:
        self._world = world

    @property
    def world(self) -> process.World:
        return self._world


def view(rank: int = 0, size: int = 4, local_size: int = 2) -> View:
    return View(process.World(rank=rank, size=size, local_rank=rank % local_size, local_size=local_size))


@pytest.mark.parametrize(
    ("decorate", "expected"),
    [
        (lambda state: state.on_main_process, [0]),
        (lambda state: state.on_local_main_process, [0, 2]),
        (lambda state: state.on_last_process, [3]),
        (lambda state: state.on_process(process_index=2), [2]),
        (lambda state: partial(state.on_process, process_index=1), [1]),
        (lambda state: state.on_process(process_index=9), []),
        (lambda state: state.on_local_process(local_process_index=1), [1, 3]),
        (lambda state: partial(state.on_local_process, local_process_index=0), [0, 2]),
    ],
)
def test_decorators_choose_who_runs(decorate: Any, expected: list[int]):
    ran = []
    for rank in range(4):

        @decorate(view(rank))
        def run(value: int, *, rank: int = rank) -> int:
            """What it does."""
            ran.append(rank)
            return value

        assert run(7) == (7 if rank in expected else None)
        assert (run.__name__, run.__doc__) == ("run", "What it does.")
    assert ran == expected


@pytest.mark.parametrize(
    "name", ["on_main_process", "on_local_main_process", "on_last_process", "on_process", "on_local_process"]
)
def test_alone_everything_runs(name: str):
    extra = {"on_process": {"process_index": 5}, "on_local_process": {"local_process_index": 5}}.get(name, {})
    assert getattr(view(0, 1, 1), name)(lambda: "ran", **extra)() == "ran"


@pytest.mark.parametrize("name", ["on_main_process", "on_local_main_process"])
def test_decorators_without_a_function_say_how_they_are_written(name: str):
    with pytest.raises(
        ValueError, match=rf"`{name}` decorates a function: write `@{name}` above it or call `{name}\(function\)`"
    ):
        getattr(view(), name)()


@pytest.mark.parametrize(
    ("name", "argument"), [("on_process", "process_index"), ("on_local_process", "local_process_index")]
)
@pytest.mark.parametrize("arguments", [(), (print,)])
def test_decorators_without_an_index_say_how_they_are_written(name: str, argument: str, arguments: tuple[Any, ...]):
    with pytest.raises(ValueError, match=rf"`{name}` needs to know which process: `@{name}\({argument}=0\)`"):
        getattr(view(), name)(*arguments)


def test_who_runs_is_decided_by_each_call():
    state = view(0)
    run = state.on_main_process(lambda: "ran")
    assert run() == "ran"
    state._world = view(1).world
    assert run() is None


def test_an_error_in_a_decorated_function_is_the_callers():
    @view(0).on_main_process
    def run() -> None:
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        run()


def test_print_prints_once_per_machine(capsys: pytest.CaptureFixture[str]):
    for rank in range(4):
        view(rank).print("rank", rank, sep="=", end=";")
    assert capsys.readouterr().out == "rank=0;rank=2;"


# ---- together ----


def attributes() -> list[Any]:
    state = PartialState(cpu=True)
    return [
        str(state),
        state.use_distributed,
        state.is_main_process,
        state.is_last_process,
        state.backend,
        state.initialized,
    ]


def test_attributes_of_a_job():
    for rank, found in enumerate(run_ranks(attributes, 2, initialise=False)):
        text = ALONE.replace("DistributedType.NO", "DistributedType.MULTI_CPU  Backend: gloo").replace(
            "processes: 1", "processes: 2"
        )
        assert found[0] == text.replace("ndex: 0", f"ndex: {rank}")
        assert found[1:] == [True, rank == 0, rank == 1, "gloo", True]


def test_a_job_of_one_is_not_distributed():
    assert run_ranks(attributes, 1, initialise=False)[0][1:4] == [False, True, True]


def reference_arguments() -> list[Any]:
    state = PartialState(backend="gloo", timeout=timedelta(seconds=11))
    again = PartialState(timeout=timedelta(seconds=5))
    group = dist.new_group([0, 1])
    dist.barrier(group)
    again.destroy_process_group(group)
    before = dist.is_initialized()
    again.destroy_process_group()
    again.destroy_process_group()
    return [state.world is again.world, state.world.timeout, before, dist.is_initialized(), state.process_index]


def test_arguments_of_the_group_and_its_end():
    expected = [True, timedelta(seconds=5), True, False]
    assert run_ranks(reference_arguments, 2, initialise=False) == [[*expected, 0], [*expected, 1]]


def forked() -> bool:
    PartialState().destroy_process_group()
    return dist.is_initialized()


def test_the_group_of_forked_processes_is_left_to_those_that_forked_them():
    assert run_ranks(forked, 2, env={"FORK_LAUNCHED": "1"}) == [True, True]


def split(inputs: Any, apply_padding: bool = False) -> Any:
    with PartialState().split_between_processes(inputs, apply_padding=apply_padding) as mine:
        return mine


def test_inputs_are_split():
    assert run_ranks(split, 2, [1, 2, 3]) == [[1, 2], [3]]
    assert run_ranks(split, 2, [1, 2, 3], apply_padding=True) == [[1, 2], [3, 3]]


def test_alone_inputs_stay_what_they_are():
    inputs = [1, 2]
    assert split(inputs) is inputs

import pickle
from contextlib import contextmanager
from typing import Any

import pytest

from hasten.settings.accumulation import GradientAccumulationPlugin
from hasten.training.accumulation import GradientState, Window
from hasten.world.context import CONTEXT


class Loader:
    """What a state asks of a loader that is being iterated."""

    def __init__(self, remainder: int = 0) -> None:
        self.end_of_dataloader = False
        self.remainder = remainder


class Engine:
    """Notes which models are held back."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    @contextmanager
    def no_sync(self, model: Any) -> Any:
        if model == "bad":
            raise KeyError("cannot hold")
        self.held.append(model)
        try:
            yield
        finally:
            self.held.remove(model)


def state(**settings: Any) -> GradientState:
    return GradientState.for_accelerator(GradientAccumulationPlugin(**settings))


# ---- the state ----


def test_defaults():
    found = GradientState()
    assert (found.num_steps, found.sync_with_dataloader, found.sync_each_batch, found.adjust_scheduler) == (
        1,
        True,
        False,
        False,
    )
    assert (found.sync_gradients, found.step, found.plugin_kwargs) == (True, 0, {})
    assert (found.end_of_dataloader, found.remainder, found.active_dataloader, found.in_dataloader) == (
        False,
        -1,
        None,
        False,
    )
    assert found.dataloader_references == [None]
    assert not found.is_xla_gradients_synced
    assert found.initialized


def test_the_text_is_that_of_the_reference():
    assert (
        repr(state(num_steps=1))
        == str(GradientState())
        == (
            "Sync Gradients: True\n"
            "At end of current dataloader: False\n"
            "Extra samples added: -1\n"
            "Gradient accumulation plugin: {'num_steps': 1}\n"
        )
    )


def test_settings_may_be_changed_at_any_time():
    found = state(num_steps=2, sync_each_batch=True, sync_with_dataloader=False)
    assert (found.num_steps, found.sync_each_batch, found.sync_with_dataloader) == (2, True, False)
    found.plugin_kwargs["num_steps"] = 5
    assert GradientState().num_steps == 5
    GradientState(GradientAccumulationPlugin(num_steps=7))
    assert found.num_steps == 7


def test_each_accelerator_has_a_state_and_the_newest_is_the_shown_one():
    first = state(num_steps=2)
    second = state(num_steps=3)
    first.advance()
    assert (first.num_steps, first.step, first.sync_gradients) == (2, 1, False)
    assert (second.num_steps, second.step, second.sync_gradients) == (3, 0, True)
    assert GradientState().__dict__ is second.__dict__


def test_after_a_reset_attributes_say_why_they_are_gone():
    found = state()
    GradientState._reset_state()
    assert not found.initialized
    for name in ("sync_gradients", "step", "plugin_kwargs"):
        with pytest.raises(
            AttributeError,
            match=rf"`GradientState` object has no attribute `{name}`. This happens if `GradientState._reset_state\(\)`",
        ):
            getattr(found, name)
    with pytest.raises(AttributeError, match=r"^'GradientState' object has no attribute 'other'$"):
        found.other  # noqa: B018
    assert GradientState().num_steps == 1


def test_it_pickles_by_value():
    found = state(num_steps=3)
    found.advance()
    again = pickle.loads(pickle.dumps(found))
    assert (again.num_steps, again.step, again.sync_gradients) == (3, 1, False)
    again.advance()
    assert found.step == 1


def test_it_shows_the_loader_of_the_innermost_loop():
    found, outer, inner = state(), Loader(3), Loader(5)
    found._add_dataloader(outer)
    found._add_dataloader(inner)
    assert found.in_dataloader
    assert found.active_dataloader is inner
    assert found.dataloader_references == [None, outer, inner]
    inner.end_of_dataloader = True
    assert (found.end_of_dataloader, found.remainder) == (True, 5)
    found._remove_dataloader(inner)
    assert (found.end_of_dataloader, found.remainder) == (False, 3)
    found._remove_dataloader(outer)
    assert not found.in_dataloader


# ---- windows ----


def advance(found: GradientState, batches: int, loader: bool = True) -> list[bool]:
    loop = Loader()
    if loader:
        CONTEXT.loaders.push(loop)
    result = []
    for batch in range(batches):
        loop.end_of_dataloader = batch == batches - 1
        result.append(found.advance())
        assert found.sync_gradients == result[-1]
    CONTEXT.loaders.remove(loop)
    return result


def test_the_end_of_the_loader_ends_a_window():
    found = state(num_steps=2)
    assert advance(found, 5) == [False, True, False, True, True]
    assert found.step == 0
    assert advance(found, 3) == [False, True, True]


def test_without_the_loader_windows_go_over_its_end():
    found = state(num_steps=2, sync_with_dataloader=False)
    assert advance(found, 5) == [False, True, False, True, False]
    assert advance(found, 3) == [True, False, True]


def test_a_loop_without_a_prepared_loader_has_no_end():
    found = state(num_steps=2)
    assert advance(found, 5, loader=False) == [False, True, False, True, False]


def test_a_change_in_the_middle_holds_from_the_next_batch():
    found = state(num_steps=2)
    found.advance()
    found.plugin_kwargs["num_steps"] = 1
    assert found.advance()


def test_inside_a_window_models_are_held_back_and_the_last_batch_exchanges():
    found, engine = state(num_steps=3), Engine()
    held = []
    for _ in range(4):
        with Window(found, engine, ("a", "b")):  # type: ignore[arg-type]
            held.append(list(engine.held))
        assert engine.held == []
    assert held == [["a", "b"], ["a", "b"], [], ["a", "b"]]


def test_sync_each_batch_exchanges_always_but_steps_at_the_end():
    found, engine = state(num_steps=2, sync_each_batch=True), Engine()
    with Window(found, engine, ("a",)):  # type: ignore[arg-type]
        assert engine.held == []
        assert not found.sync_gradients


def test_alone_nothing_is_held_back():
    with Window(state(num_steps=2), None, ("a",)) as value:
        assert value is None


def test_an_error_inside_lets_the_models_go_and_is_the_callers():
    found, engine = state(num_steps=2), Engine()
    with pytest.raises(ZeroDivisionError), Window(found, engine, ("a", "b")):  # type: ignore[arg-type]
        raise ZeroDivisionError
    assert engine.held == []
    assert found.step == 1


def test_an_error_on_the_way_in_lets_the_models_go():
    found, engine = state(num_steps=2), Engine()
    with pytest.raises(KeyError, match="cannot hold"), Window(found, engine, ("a", "bad")):  # type: ignore[arg-type]
        raise AssertionError("not reached")
    assert engine.held == []


def test_windows_may_be_nested():
    outer, inner, engine = state(num_steps=2), state(num_steps=4), Engine()
    with Window(outer, engine, ("a",)), Window(inner, engine, ("b",)):  # type: ignore[arg-type]
        assert engine.held == ["a", "b"]
    assert engine.held == []
    assert (outer.step, inner.step) == (1, 1)


def test_it_knows_in_how_many_blocks_it_is():
    found, engine = state(num_steps=2), Engine()
    with Window(found, engine, ("a",)):  # type: ignore[arg-type]
        assert found.running == 1
        with Window(found, None, ()):
            assert found.running == 2
    with pytest.raises(KeyError), Window(found, engine, ("bad",)):  # type: ignore[arg-type]
        raise AssertionError("not reached")
    assert found.running == 0


def test_a_step_that_is_set_from_outside_begins_a_window():
    found = state(num_steps=4)
    for _ in range(6):
        found.advance()
    assert (found.window_start, found.micro_batches) == (4, 6)
    found.step = 8
    found.advance()
    assert (found.window_start, found.micro_batches, found.sync_gradients) == (6, 7, False)
    found.advance()
    assert found.window_start == 6

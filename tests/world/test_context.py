import gc
from typing import Any

import pytest

from hasten.settings import export
from hasten.world import context, process
from hasten.world.context import CONTEXT, ActiveLoaders, ProcessContext


class Loader:
    pass


def test_the_innermost_loop_is_the_current_one():
    loaders, outer, inner = ActiveLoaders(), Loader(), Loader()
    assert loaders.current is None
    assert loaders.all() == []
    loaders.push(outer)
    loaders.push(inner)
    assert loaders.current is inner
    assert loaders.all() == [outer, inner]
    loaders.remove(inner)
    assert loaders.current is outer
    loaders.remove(outer)
    assert loaders.current is None


def test_loops_may_end_in_any_order_and_twice():
    loaders, first, second = ActiveLoaders(), Loader(), Loader()
    loaders.push(first)
    loaders.push(second)
    loaders.remove(first)
    loaders.remove(first)
    assert loaders.all() == [second]


def test_one_loader_in_two_loops_leaves_the_inner_one_first():
    loaders, loader, other = ActiveLoaders(), Loader(), Loader()
    for item in (loader, other, loader):
        loaders.push(item)
    loaders.remove(loader)
    assert loaders.all() == [loader, other]


def test_a_dropped_loader_leaves_the_stack():
    loaders, outer, inner = ActiveLoaders(), Loader(), Loader()
    loaders.push(outer)
    loaders.push(inner)
    del inner
    gc.collect()
    assert loaders.current is outer
    assert loaders.all() == [outer]


def test_a_dropped_loader_that_was_never_the_innermost_leaves_it_too():
    loaders, outer, inner = ActiveLoaders(), Loader(), Loader()
    loaders.push(outer)
    loaders.push(inner)
    del outer
    gc.collect()
    assert loaders.all() == [inner]


def test_first_time():
    context = ProcessContext()
    assert context.first_time("a note")
    assert not context.first_time("a note")
    assert context.first_time("another")
    context.reset()
    assert context.first_time("a note")


def test_reset_forgets_everything_and_keeps_the_identity_of_shared_dictionaries():
    own = ProcessContext()
    shared = own.partial_state, own.accelerator_state, own.gradient_state
    loader: Any = Loader()
    own.loaders.push(loader)
    own.world = process.World()
    for number, dictionary in enumerate(shared):
        dictionary["key"] = number
    own.reset()
    assert (own.world, own.loaders.current, own.said) == (None, None, set())
    assert shared == ({}, {}, {})
    assert all(
        one is other
        for one, other in zip(shared, (own.partial_state, own.accelerator_state, own.gradient_state), strict=True)
    )


def test_reset_ends_the_watch_over_loaders():
    ended = []

    class Watcher:
        def watched(self, loader: Any, batches: Any) -> Any:
            return batches

        def close(self) -> None:
            ended.append(True)
            CONTEXT.loaders.watcher = None

    CONTEXT.loaders.watcher = Watcher()
    CONTEXT.reset()
    assert ended == [True]
    assert CONTEXT.loaders.watcher is None


def test_reset_undoes_exported_variables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.delenv("NEW", raising=False)
    export.variables({"KEPT": "changed", "NEW": "1"})
    process.start()
    context.reset()
    import os

    assert os.environ["KEPT"] == "before"
    assert "NEW" not in os.environ
    assert CONTEXT.world is None

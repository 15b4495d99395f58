"""What every test gets: one thread, a clean process, and the markers `full` and `gpu`."""

import signal
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def hears_signals() -> Iterator[None]:
    """SIGINT and SIGHUP act as they do in a terminal: a run in the background (`&`, nohup) inherits that they are ignored."""
    usual = {"SIGINT": signal.default_int_handler, "SIGHUP": signal.SIG_DFL}
    numbers = {getattr(signal, name): handler for name, handler in usual.items() if hasattr(signal, name)}
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in numbers.items():
        signal.signal(number, handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    if not config.getoption("--full"):
        long = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in set(long)]
    if not torch.accelerator.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an accelerator"))


def pytest_unconfigure() -> None:
    if ranks := sys.modules.get("tests.ranks"):
        ranks.close_pool()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_state_left() -> Iterator[None]:
    """Forget what a test made `hasten` remember in this process."""
    yield
    if context := sys.modules.get("hasten.world.context"):
        context.reset()

import os

import pytest

from hasten.settings import environment, export
from hasten.settings.loading import disable_fsdp_ram_efficient_loading, enable_fsdp_ram_efficient_loading

NAMES = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    yield
    export.reset()


def test_it_is_turned_on_and_off_and_undone():
    enable_fsdp_ram_efficient_loading()
    assert [os.environ[name] for name in NAMES] == ["true", "true"]
    disable_fsdp_ram_efficient_loading()
    assert [os.environ[name] for name in NAMES] == ["true", "false"]
    export.reset()
    assert not set(NAMES) & set(os.environ)


def test_turning_it_off_says_nothing_of_sharding():
    disable_fsdp_ram_efficient_loading()
    assert environment.get("use_fsdp") is None
    assert environment.get("fsdp_cpu_ram_efficient_loading") is False


def test_what_the_launcher_said_stays(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    enable_fsdp_ram_efficient_loading()
    assert os.environ["ACCELERATE_USE_FSDP"] == "false"


def test_both_are_public():
    from hasten import utils

    assert utils.enable_fsdp_ram_efficient_loading is enable_fsdp_ram_efficient_loading
    assert utils.disable_fsdp_ram_efficient_loading is disable_fsdp_ram_efficient_loading

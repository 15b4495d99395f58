import os

import pytest

from hasten.settings import environment, export

NAMES = ("ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION", "HASTEN_TEST_A", "HASTEN_TEST_B")


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    yield
    export.reset()


def test_what_was_written_is_read_and_undone(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "no")
    export.export("use_cpu", True)
    export.export("mixed_precision", "bf16")
    export.export("mixed_precision", "fp16")
    assert environment.get("use_cpu") is True
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "fp16"
    export.reset()
    assert os.environ["ACCELERATE_USE_CPU"] == "no"
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ
    export.reset()
    assert os.environ["ACCELERATE_USE_CPU"] == "no"


def test_one_can_be_undone_and_what_was_before_is_known(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "no")
    export.export("use_cpu", True)
    export.export("mixed_precision", "bf16")
    assert (export.before("use_cpu"), export.before("mixed_precision")) == ("no", None)
    export.undo("use_cpu", "debug")
    assert os.environ["ACCELERATE_USE_CPU"] == export.before("use_cpu") == "no"
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_none_unsets():
    export.export("use_cpu", True)
    export.export("use_cpu", None)
    assert "ACCELERATE_USE_CPU" not in os.environ


def test_an_illegal_value_is_not_written():
    with pytest.raises(ValueError, match="must be one of"):
        export.export("mixed_precision", "fp5")
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ


def test_a_block_leaves_no_trace_even_after_an_error(monkeypatch):
    monkeypatch.setenv("HASTEN_TEST_A", "before")

    def fail():
        with export.exported({"HASTEN_TEST_A": None, "HASTEN_TEST_B": "inside"}):
            assert "HASTEN_TEST_A" not in os.environ
            assert os.environ["HASTEN_TEST_B"] == "inside"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert os.environ["HASTEN_TEST_A"] == "before"
    assert "HASTEN_TEST_B" not in os.environ

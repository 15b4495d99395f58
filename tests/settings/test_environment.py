import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.settings import environment
from hasten.settings.schema import TABLE
from hasten.settings.values import write
from tests.settings.strategies import legal_values


@settings(deadline=None)
@given(data=st.data(), row=st.sampled_from([row for row in TABLE if row.env]))
def test_every_variable_is_read_as_it_was_written(data, row):
    value = data.draw(legal_values(row))
    environ = {row.env: write(row, value)}
    assert environment.get(row.name, environ) == value
    assert environment.origin(row.name, environ) == row.env


@pytest.mark.parametrize("environ", [{}, {"ACCELERATE_USE_CPU": ""}, {"ACCELERATE_USE_CPU": "  "}])
def test_unset_and_empty_are_none(environ):
    assert environment.get("use_cpu", environ) is None
    assert environment.origin("use_cpu", environ) is None
    assert environment.raw("ACCELERATE_USE_CPU", environ) is None


def test_false_is_not_none():
    assert environment.get("use_cpu", {"ACCELERATE_USE_CPU": "False"}) is False


def test_an_illegal_text_names_its_variable():
    with pytest.raises(ValueError) as caught:
        environment.get("mixed_precision", {"ACCELERATE_MIXED_PRECISION": "fp61"})
    assert str(caught.value) == (
        "The environment variable ACCELERATE_MIXED_PRECISION is 'fp61', but must be one of no, fp8, fp16, bf16 "
        "(did you mean 'fp16'?)."
    )


def test_the_process_is_read_when_asked(monkeypatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:3")
    assert environment.get("torch_device") == "cuda:3"
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    assert environment.get("torch_device") == "cpu"
    assert environment.snapshot()["ACCELERATE_TORCH_DEVICE"] == "cpu"
    assert environment.snapshot() is not os.environ


def test_an_illegal_variable_does_not_disturb_the_import():
    env = {**os.environ, "ACCELERATE_USE_CPU": "perhaps"}
    subprocess.run([sys.executable, "-c", "import hasten.settings.environment, hasten"], env=env, check=True)

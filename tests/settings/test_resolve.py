from itertools import pairwise

import pytest

from hasten.settings.files import ConfigFile
from hasten.settings.resolve import ARGUMENT, DEFAULT, ENVIRONMENT, FILE, FLAG, Value, resolve

SOURCES = {
    ARGUMENT: ({"arguments": {"mixed_precision": "bf16"}}, "the argument mixed_precision"),
    FLAG: ({"flags": {"mixed_precision": "fp16"}}, "--mixed_precision"),
    ENVIRONMENT: (
        {"environ": {"ACCELERATE_MIXED_PRECISION": "fp8"}},
        "the environment variable ACCELERATE_MIXED_PRECISION",
    ),
    FILE: (
        {"file": ConfigFile("/c.yaml", {"mixed_precision": "bf16"}, {"mixed_precision": "mixed_precision"})},
        "/c.yaml: mixed_precision",
    ),
    DEFAULT: ({}, "the default"),
}


def only(**sources) -> Value:
    return resolve(["mixed_precision"], **{"environ": {}, **sources})["mixed_precision"]


@pytest.mark.parametrize("origin", SOURCES)
def test_each_origin_is_named(origin):
    given, where = SOURCES[origin]
    value = only(**given)
    assert (value.origin, value.where) == (origin, where)
    assert value.chosen == (origin != DEFAULT)


@pytest.mark.parametrize(("higher", "lower"), [(a, b) for i, a in enumerate(SOURCES) for b in list(SOURCES)[i + 1 :]])
def test_precedence_pairwise(higher, lower):
    assert only(**SOURCES[lower][0], **SOURCES[higher][0]).origin == higher


def test_precedence_of_all():
    for higher, lower in pairwise(SOURCES):
        below = {
            key: value
            for origin in list(SOURCES)[list(SOURCES).index(higher) :]
            for key, value in SOURCES[origin][0].items()
        }
        assert only(**below).origin == higher, (higher, lower)


def test_a_value_that_equals_the_default_is_still_chosen():
    value = only(flags={"mixed_precision": "no"}, file=SOURCES[FILE][0]["file"])
    assert value == Value("no", FLAG, "--mixed_precision")


def test_false_beats_a_lower_origin():
    value = resolve(["use_cpu"], flags={"use_cpu": False}, environ={"ACCELERATE_USE_CPU": "1"})["use_cpu"]
    assert value == Value(False, FLAG, "--cpu")


def test_none_is_not_given():
    assert only(arguments={"mixed_precision": None}, flags={"mixed_precision": None}).origin == DEFAULT


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ({"arguments": {"num_processes": 0}}, "the argument num_processes is 0"),
        ({"flags": {"num_processes": 0}}, "--num_processes is 0"),
        ({"environ": {"HASTEN_NUM_PROCESSES": "two"}}, "the environment variable HASTEN_NUM_PROCESSES is 'two'"),
    ],
)
def test_an_illegal_value_names_its_origin(sources, said):
    with pytest.raises(ValueError, match="must be a whole number of at least 1") as caught:
        resolve(["num_processes"], **{"environ": {}, **sources})
    assert str(caught.value).startswith(said)

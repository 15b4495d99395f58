import json

import pytest
import torch

from hasten.weights import layout
from hasten.weights.layout import SAFE_WEIGHTS, WEIGHTS, convert_file_size_to_int, plan_layout


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (5, 5),
        ("10GB", 10 * 10**9),
        ("10GiB", 10 * 2**30),
        ("8gib", 8 * 2**30),
        ("1MB", 10**6),
        ("1MiB", 2**20),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("1TB", 10**12),
        ("200B", 200),
        ("8Mb", 10**6),  # bits
        ("10gb", 1_250_000_000),
        ("5.5mb", 687_500),
        ("1.5GB", 1_500_000_000),
        (" 1 GB", 10**9),
    ],
)
def test_sizes(size, expected):
    assert convert_file_size_to_int(size) == expected


@pytest.mark.parametrize("size", ["", "10", "10XB", "-1GB", "GB", "1.2.3GB", None, 1.5, True])
def test_what_is_no_size(size):
    with pytest.raises(ValueError, match=r"is not in a valid format.*GiB"):
        convert_file_size_to_int(size)


def test_everything_fits_into_one_file():
    plan = plan_layout({"a": torch.zeros(4), "b": torch.zeros(2)}, SAFE_WEIGHTS, "1KB")
    assert plan.files == {"model.safetensors": ["a", "b"]}
    assert not plan.is_sharded
    assert plan.total_size == 24


def test_an_empty_model_has_one_empty_file():
    assert plan_layout({}, WEIGHTS, "1KB").files == {"pytorch_model.bin": []}


def test_shards_are_filled_in_order_and_their_index_lists_them():
    tensors = {name: torch.zeros(10) for name in "abcde"}
    plan = plan_layout(tensors, SAFE_WEIGHTS, 100)
    assert plan.files == {
        "model-00001-of-00003.safetensors": ["a", "b"],
        "model-00002-of-00003.safetensors": ["c", "d"],
        "model-00003-of-00003.safetensors": ["e"],
    }
    index = json.loads(plan.index())
    assert index["metadata"] == {"total_size": 200}
    assert index["weight_map"]["d"] == "model-00002-of-00003.safetensors"
    assert list(index["weight_map"]) == list("abcde")


def test_a_tensor_larger_than_the_limit_has_its_own_file():
    plan = plan_layout({"a": torch.zeros(1), "big": torch.zeros(100), "b": torch.zeros(1)}, WEIGHTS, 40)
    assert list(plan.files.values()) == [["big"], ["a", "b"]]
    assert next(iter(plan.files)) == "pytorch_model-00001-of-00002.bin"


def test_shared_tensors_are_in_one_file_and_count_once():
    tensor = torch.zeros(10)
    plan = plan_layout({"a": tensor, "b": torch.zeros(15), "tied": tensor}, WEIGHTS, 60)
    assert list(plan.files.values()) == [["a", "tied"], ["b"]]
    assert plan.total_size == 100


def test_a_small_view_counts_as_what_it_needs():
    assert plan_layout({"a": torch.zeros(1000)[:2]}, WEIGHTS, 100).total_size == 8


@pytest.mark.parametrize("size", [0, -1, "0GB"])
def test_a_limit_must_be_positive(size):
    with pytest.raises(ValueError, match="must be positive"):
        plan_layout({"a": torch.zeros(1)}, WEIGHTS, size)


def test_names_of_a_family():
    assert SAFE_WEIGHTS.index == "model.safetensors.index.json"
    assert WEIGHTS.index == "pytorch_model.bin.index.json"
    for name in ("model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        assert SAFE_WEIGHTS.has(name)
        assert not WEIGHTS.has(name)
    for name in (
        "model-1.safetensors",
        "model_1.safetensors",
        "model-00001-of-00002.safetensors.bak",
        "xmodel.safetensors",
    ):
        assert not SAFE_WEIGHTS.has(name)


def test_the_names_that_others_use():
    assert (layout.SAFE_WEIGHTS_NAME, layout.WEIGHTS_NAME) == ("model.safetensors", "pytorch_model.bin")

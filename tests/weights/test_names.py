import logging

import pytest
import torch

from hasten.weights import names


def tied_model() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 5, bias=False))
    model[2].weight = model[0].weight
    return model


def test_id_of_storages():
    tensor = torch.zeros(4, 4)
    assert names.id_tensor_storage(tensor) == (torch.device("cpu"), tensor.data_ptr(), 64)
    assert names.id_tensor_storage(tensor[1:]) == names.id_tensor_storage(tensor)
    assert names.id_tensor_storage(torch.zeros(2, device="meta")) == (torch.device("meta"), 0, 8)


def test_ties_of_parameters():
    assert names.find_ties(tied_model()) == [["0.weight", "2.weight"]]
    assert names.find_ties(torch.nn.Linear(2, 2)) == []


def test_ties_of_buffers_and_on_the_meta_device():
    model = torch.nn.Module()
    model.register_buffer("first", torch.zeros(3))
    model.register_buffer("second", model.first)
    model.register_buffer("other", torch.zeros(3))
    assert names.find_ties(model) == [["first", "second"]]
    with torch.device("meta"):
        assert names.find_ties(tied_model()) == [["0.weight", "2.weight"]]
        assert names.find_ties(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))) == []


def test_the_first_of_equal_tensors_stays():
    tensor = torch.zeros(4, 4)
    kept, stands_for = names.without_shared({"q": tensor, "a": tensor, "other": torch.zeros(2)})
    assert list(kept) == ["q", "other"]
    assert stands_for == {"a": "q"}


@pytest.mark.parametrize(
    ("tensors", "stay"),
    [
        (lambda t: {"all": t, "turned": t.t(), "part": t[:2]}, ["all"]),
        (lambda t: {"part": t[:2], "all": t}, ["all"]),
        (lambda t: {"upper": t[:2], "lower": t[2:]}, ["upper", "lower"]),
        (lambda t: {"first": t[:3], "last": t[1:]}, ["first", "last"]),
        # A column reaches over rows that it does not hold.
        (lambda t: {"column": t[:, :1], "inside": t[1, 1:2]}, ["column", "inside"]),
        (lambda t: {"column": t[:, 0], "same": t[:, 0]}, ["column"]),
        (lambda t: {"empty": t[:0], "other": t[:0].clone()}, ["empty", "other"]),
        (lambda t: {"bits": t.view(torch.int32), "all": t}, ["bits"]),
    ],
)
def test_nothing_that_differs_is_left_out(tensors, stay):
    kept, _ = names.without_shared(tensors(torch.arange(16.0).view(4, 4)))
    assert list(kept) == stay


def test_meta_tensors_are_only_shared_if_they_are_one():
    meta = torch.zeros(2, device="meta")
    assert list(names.without_shared({"a": meta, "b": torch.zeros(2, device="meta"), "c": meta})[0]) == ["a", "b"]


def test_clean_state_dict_warns_and_leaves_its_input_alone(caplog):
    tensor = torch.arange(6.0).view(2, 3)
    given = {"a": tensor.t(), "b": tensor, "c": torch.zeros(1)}
    with caplog.at_level(logging.WARNING):
        cleaned = names.clean_state_dict_for_safetensors(given)
    assert list(given) == ["a", "b", "c"]
    assert list(cleaned) == ["a", "c"]
    assert cleaned["a"].is_contiguous()
    assert torch.equal(cleaned["a"], tensor.t())
    assert "Removed shared tensor {'b'} while saving" in caplog.text


def test_clean_state_dict_says_nothing_if_nothing_is_shared(caplog):
    names.clean_state_dict_for_safetensors({"a": torch.zeros(2), "b": torch.zeros(2)})
    assert caplog.text == ""


def test_values_that_are_no_tensors_are_named():
    with pytest.raises(TypeError, match=r"'step' \(int\), 'extra' \(dict\).*safe_serialization=False"):
        names.clean_state_dict_for_safetensors({"a": torch.zeros(1), "step": 3, "extra": {}})

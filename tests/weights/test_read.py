import pytest
import safetensors.torch
import torch

from hasten.weights.names import without_shared
from hasten.weights.read import load_model, read_safetensors
from tests.weights.test_names import tied_model


def saved(path, model, **changes):
    state = {**model.state_dict(), **changes}
    safetensors.torch.save_file({k: v for k, v in without_shared(state)[0].items() if v is not None}, path)
    return path


def test_a_model_is_read_in_place(tmp_path):
    source, model = tied_model(), tied_model()
    memory = [parameter.data_ptr() for parameter in model.parameters()]
    assert load_model(model, saved(tmp_path / "f", source)) == ([], [])
    assert all(
        torch.equal(a, b) for a, b in zip(source.state_dict().values(), model.state_dict().values(), strict=True)
    )
    assert [parameter.data_ptr() for parameter in model.parameters()] == memory
    assert model[0].weight is model[2].weight


def test_a_tied_name_may_be_the_other_one(tmp_path):
    source, model = tied_model(), tied_model()
    state = source.state_dict()
    del state["0.weight"]
    safetensors.torch.save_file(state, tmp_path / "f")
    load_model(model, tmp_path / "f")
    assert torch.equal(model[0].weight, source[0].weight)


def test_other_types_are_converted(tmp_path):
    source, model = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3).double()
    load_model(model, saved(tmp_path / "f", source))
    assert model.weight.dtype == torch.float64
    assert torch.equal(model.weight.float(), source.weight)


def test_strict_names_what_does_not_fit(tmp_path):
    path = saved(tmp_path / "f", torch.nn.Linear(2, 2), extra=torch.zeros(1))
    model = torch.nn.Linear(2, 2)
    model.register_buffer("more", torch.zeros(1))
    with pytest.raises(
        RuntimeError,
        match=r"(?s)does not fit into Linear.*file: more.*model: extra.*strict=False",
    ):
        load_model(model, path)
    assert load_model(model, path, strict=False) == (["more"], ["extra"])


def test_another_shape_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        load_model(torch.nn.Linear(2, 3), saved(tmp_path / "f", torch.nn.Linear(2, 2)))


def test_frozen_and_grad_parameters_stay_what_they_are(tmp_path):
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    (model.weight.sum() * 2).backward()
    load_model(model, saved(tmp_path / "f", torch.nn.Linear(2, 2)))
    assert model.weight.requires_grad
    assert not model.bias.requires_grad
    assert model.weight.grad.unique().tolist() == [2]


def test_tensors_of_a_file(tmp_path):
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "f")
    assert read_safetensors(tmp_path / "f")["a"].tolist() == [1, 1]
    assert read_safetensors(tmp_path / "f", "meta")["a"].is_meta

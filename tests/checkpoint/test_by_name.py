from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hasten.checkpoint import by_name
from hasten.checkpoint.sources import look


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_fsdp_wrapped_module.a._fsdp_wrapped_module.b", "a.b"),
        ("layers.0._checkpoint_wrapped_module.up.weight", "layers.0.up.weight"),
        ("_orig_mod.head.weight", "head.weight"),
        ("module.x", "module.x"),
    ],
)
def test_names_have_nothing_of_wrappers(name, expected):
    assert by_name.canonical(name) == expected


def test_a_tensor_of_two_names_is_one():
    model = tied()
    held = by_name.model_state(model)
    assert held["0.weight"] is held["1.weight"]
    state, others = by_name.apart(held)
    assert others == {"1.weight": "0.weight"}
    assert list(state) == [name for name in held if name != "1.weight"]
    assert by_name.buffers(model) == ["2.running_mean", "2.running_var", "2.num_batches_tracked"]


def saved(folder: Path, state: Any, kind: str = "optimizer") -> Any:
    torch.save(state, folder / ("optimizer.bin" if kind == "optimizer" else "pytorch_model_fsdp.bin"))
    return look(folder, [(kind, 0)], None)[0].open(None, {})


@pytest.mark.parametrize("name", ["0.weight", "1.weight", "_fsdp_wrapped_module.1.weight"])
def test_a_tied_parameter_loads_under_any_of_its_names(tmp_path, name):
    model, norm = tied(), nn.BatchNorm1d(3)
    source = saved(
        tmp_path, {name: torch.eye(3), **{f"2.{key}": each for key, each in norm.state_dict().items()}}, "model"
    )
    result = by_name.load_model(model, source)
    assert torch.equal(model[1].weight, torch.eye(3))
    assert (result.missing_keys, result.unexpected_keys) == ([], [])


def test_without_strict_what_both_have_is_loaded(tmp_path):
    model = nn.Linear(2, 2)
    source = saved(tmp_path, {"weight": torch.eye(2), "more": torch.ones(1)}, "model")
    result = by_name.load_model(model, source, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["bias"], ["more"])
    assert torch.equal(model.weight, torch.eye(2))
    with pytest.raises(RuntimeError, match=r"Linear:\n\t- not in the checkpoint: bias\n\t- not in the model: more\n"):
        by_name.load_model(model, source)


def test_names_of_parameters_of_several_models():
    one, other, loose = nn.Linear(2, 2), nn.Linear(2, 2), nn.Parameter(torch.ones(1))
    own = torch.optim.SGD(other.parameters(), lr=1.0)
    assert by_name.names_of(own, [one, other]) == [["weight", "bias"]]
    both = torch.optim.SGD([{"params": [other.weight, one.bias]}, {"params": [loose]}], lr=1.0)
    assert by_name.names_of(both, [one, other]) == [["1/weight", "bias"], ["loose/0"]]


def test_an_optimizer_by_name_and_back(tmp_path):
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW([{"params": [model.bias], "lr": 0.5}, {"params": [model.weight]}])
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state = by_name.optimizer_state(optimizer, [model])
    assert [group["params"] for group in state["param_groups"]] == [["bias"], ["weight"]]
    assert set(state["state"]) == {"bias", "weight"}
    # Groups and parameters may come in another order.
    other = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    by_name.load_optimizer(other, [model], saved(tmp_path, state))
    assert [group["lr"] for group in other.param_groups] == [1e-3, 0.5]
    for parameter in model.parameters():
        assert torch.equal(other.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])
        assert other.state[parameter]["step"] == 1


def test_memory_of_an_optimizer_is_kept(tmp_path):
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    source = saved(tmp_path, by_name.optimizer_state(optimizer, [model]))
    before = optimizer.state[model.weight]["exp_avg"]
    expected = before.clone()
    before.zero_()
    by_name.load_optimizer(optimizer, [model], source)
    assert optimizer.state[model.weight]["exp_avg"].data_ptr() == before.data_ptr()
    assert torch.equal(before, expected)


def test_what_is_no_optimizer(tmp_path):
    model = nn.Linear(2, 3)
    with pytest.raises(RuntimeError, match="no groups of parameters"):
        by_name.load_optimizer(torch.optim.SGD(model.parameters()), [model], saved(tmp_path, {"x": 1}))
    plain = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}]).state_dict()
    with pytest.raises(RuntimeError, match="the parameters of group 0 were in 2 groups: weight, bias"):
        by_name.load_optimizer(torch.optim.SGD(model.parameters()), [model], saved(tmp_path, plain))
    fewer = torch.optim.SGD([model.weight]).state_dict()
    with pytest.raises(RuntimeError, match="not in the checkpoint: bias"):
        by_name.load_optimizer(torch.optim.SGD(model.parameters()), [model], saved(tmp_path, fewer))

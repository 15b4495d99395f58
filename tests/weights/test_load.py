from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hasten.weights.load import load_weights


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))


def test_values_go_into_the_memory_that_is_there(tmp_path: Path) -> None:
    saved = model()
    save_file(saved.state_dict(), tmp_path / "w.safetensors")
    fresh = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)).double()
    pointers = [each.data_ptr() for each in fresh.parameters()]
    assert load_weights(fresh, tmp_path) == ([], [])
    assert [each.data_ptr() for each in fresh.parameters()] == pointers
    for name, value in saved.state_dict().items():
        assert torch.equal(fresh.state_dict()[name].to(value.dtype), value)


def test_what_fits(tmp_path: Path) -> None:
    tensors = model().state_dict()
    del tensors["0.bias"]
    save_file({**tensors, "more": torch.ones(1)}, tmp_path / "w.safetensors")
    fresh = model()
    with torch.no_grad():
        fresh[0].bias.fill_(7)
    with pytest.raises(RuntimeError) as caught:
        load_weights(fresh, tmp_path)
    text = str(caught.value)
    assert text.splitlines()[1:3] == ["\t- not in the files: 0.bias", "\t- not in the model: more"]
    assert load_weights(fresh, tmp_path, strict=False) == (["0.bias"], ["more"])
    assert fresh[0].bias.tolist() == [7, 7]


def test_one_name_of_a_tie_is_enough(tmp_path: Path) -> None:
    fresh = model()
    fresh[2].weight = nn.Parameter(torch.zeros(2, 2))
    fresh.append(nn.Linear(2, 2))
    fresh[3].weight = fresh[2].weight
    tensors = fresh.state_dict()
    del tensors["2.weight"]
    save_file({name: each.clone() + 1 for name, each in tensors.items()}, tmp_path / "w.safetensors")
    assert load_weights(fresh, tmp_path) == ([], [])
    assert fresh[2].weight is fresh[3].weight
    assert fresh[2].weight.tolist() == [[1, 1], [1, 1]]


def test_a_model_without_values_needs_memory(tmp_path: Path) -> None:
    """What gives it memory is the caller's; what has no values in the files needs a function."""
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    saved = nn.Linear(3, 2)
    save_file(saved.state_dict(prefix="0."), tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"has no values for 1.weight, 1.bias of Sequential"):
        load_weights(empty, tmp_path, strict=False)
    assert all(each.is_meta for each in empty.parameters())
    seen = []

    def initialise(module: nn.Linear) -> None:
        seen.append(module)
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)

    def materialise(module: nn.Module) -> None:
        for parameter in module.parameters():
            torch.utils.swap_tensors(parameter, nn.Parameter(torch.empty_like(parameter, device="cpu")))

    missing = load_weights(empty, tmp_path, initialise=initialise, materialise=materialise)
    assert missing == (["1.weight", "1.bias"], [])
    assert seen == [empty[1]]
    assert torch.equal(empty[0].weight, saved.weight)
    assert empty[1].weight.tolist() == [[1, 1], [1, 1]]

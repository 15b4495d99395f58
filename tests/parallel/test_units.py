from typing import Any

import pytest
import torch
from torch import nn

from hasten.parallel.units import Unit, by_class, by_size, plan_units


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.down(self.up(self.norm(inputs)).relu())


class Language(nn.Module):
    """A decoder: embedding, blocks, norm, head."""

    def __init__(self, layers: int = 2, tied: bool = False, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def units(model: nn.Module, *classes: str, **arguments: Any) -> dict[tuple[str, ...], Unit]:
    planned = plan_units(model, by_class(model, classes), **arguments)
    assert planned[-1].modules == ("",)
    everything = [name for unit in planned for name in unit.parameters]
    assert sorted(everything) == sorted(name for name, _ in model.named_parameters())
    return {unit.modules: unit for unit in planned}


def test_layers_embeddings_and_the_end_are_units():
    found = units(Language(), "Block")
    assert list(found) == [("layers.0",), ("layers.1",), ("embedding",), ("norm", "head"), ("",)]
    assert found["norm", "head"].parameters == ("norm.weight", "norm.bias", "head.weight")
    assert [unit.frees for unit in found.values()] == [None, None, None, False, None]
    assert found[("",)].parameters == ()
    assert len(found["layers.0",].parameters) == 6
    assert str(found["norm", "head"]) == "norm + head: 3 parameters (the end of the model)"


def test_a_shared_weight_is_in_one_unit_with_the_embedding_first():
    found = units(Language(tied=True), "Block")
    assert list(found) == [("layers.0",), ("layers.1",), ("embedding", "norm", "head"), ("",)]
    shared = found["embedding", "norm", "head"]
    assert shared.parameters == ("embedding.weight", "norm.weight", "norm.bias")
    assert (shared.frees, shared.reason) == (False, "they share a parameter")


def test_a_weight_that_two_layers_share():
    model = Language()
    model.layers[1].up.weight = model.layers[0].up.weight
    found = plan_units(model, by_class(model, ["Block"]))
    assert [unit.modules for unit in found] == [
        ("layers.0.up", "layers.1.up"),
        ("layers.0",),
        ("layers.1",),
        ("embedding",),
        ("norm", "head"),
        ("",),
    ]
    assert found[0].parameters == ("layers.0.up.weight", "layers.0.up.bias", "layers.1.up.bias")


def test_a_weight_that_is_shared_within_a_layer_changes_nothing():
    model = Language()
    model.layers[0].again = model.layers[0].up
    assert [unit.modules for unit in plan_units(model, by_class(model, ["Block"]))][:2] == [
        ("layers.0",),
        ("layers.1",),
    ]


class Pair(nn.Module):
    """Encoder and decoder that share their embedding, and an embedding of positions that they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(10, 4)
        self.encoder = Language(1)
        self.decoder = Language(1)
        self.encoder.embedding = self.decoder.embedding = self.shared
        self.decoder.positions = nn.Embedding(6, 4)


def test_one_module_in_several_places():
    found = units(Pair(), "Block")
    assert ("shared",) in found
    assert found["shared",].parameters == ("shared.weight",)
    assert ("decoder.positions",) in found


def test_without_a_choice_the_model_is_one_unit():
    model = Language()
    (unit,) = plan_units(model, None)
    assert unit.modules == ("",)
    assert len(unit.parameters) == len(list(model.parameters()))


def test_what_is_ignored_is_in_no_unit():
    model = Language()
    found = plan_units(model, by_class(model, ["Block"]), ignored=model.layers[0].parameters())
    assert [unit.modules for unit in found] == [("layers.1",), ("embedding",), ("norm", "head"), ("",)]


def test_nested_choices_are_inner_first():
    model = nn.Sequential(Language(1), nn.Linear(10, 10))
    found = plan_units(model, by_class(model, ["Block", "Language"]))
    assert [unit.modules for unit in found] == [("0.layers.0",), ("0",), ("1",), ("",)]


def test_classes_that_are_not_there():
    with pytest.raises(ValueError, match=r"layer classes Decoder, Layer in Language.*Block, Embedding, Language"):
        by_class(Language(), ["Layer", "Decoder", "Block"])


def test_sizes():
    model = Language(3)
    found = plan_units(model, by_size(model, 80))
    assert [unit.modules for unit in found[:3]] == [("layers.0",), ("layers.1",), ("layers.2",)]
    assert [unit.modules for unit in plan_units(model, by_size(model, 10**6))] == [("",)]
    inner = plan_units(model, by_size(model, 30))
    assert ("layers.0.up",) in [unit.modules for unit in inner]

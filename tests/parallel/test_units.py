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
    with pytest.raises(ValueError, match=r"layer class Blok in Language \(did you mean 'Block'\?\)\. Its modules"):
        by_class(Language(), ["Blok"])


def test_sizes():
    model = Language(3)
    found = plan_units(model, by_size(model, 80))
    assert [unit.modules for unit in found[:3]] == [("layers.0",), ("layers.1",), ("layers.2",)]
    assert [unit.modules for unit in plan_units(model, by_size(model, 10**6))] == [("",)]
    inner = plan_units(model, by_size(model, 30))
    assert ("layers.0.up",) in [unit.modules for unit in inner]


def test_what_has_no_forward_pass_is_gathered_by_what_is_around_it():
    model = Language()
    model.scales = nn.ParameterList([torch.ones(4)])
    model.layers[1].scales = nn.ParameterDict({"one": nn.Parameter(torch.ones(4))})
    found = units(model, "Block", "ModuleList")
    assert list(found) == [("layers.0",), ("layers.1",), ("embedding",), ("norm", "head"), ("",)]
    assert found["",].parameters == ("scales.0",)
    assert "layers.1.scales.one" in found["layers.1",].parameters


def test_a_module_of_two_layers_is_a_unit_of_its_own():
    model = Language()
    model.layers[1].up = model.layers[0].up
    found = units(model, "Block")
    assert next(iter(found)) == ("layers.0.up",)
    assert found["layers.0.up",].reason == "it stands in several places"
    assert "layers.1.norm.weight" in found["layers.1",].parameters


def test_a_list_of_parameters_of_two_layers_joins_them():
    model = Language()
    model.layers[0].scales = model.layers[1].scales = nn.ParameterList([torch.ones(4)])
    assert ("layers.0", "layers.1") in units(model, "Block")


def test_a_block_that_is_used_twice_is_one_unit():
    model = Language(3)
    model.layers[2] = model.layers[0]
    assert list(units(model, "Block"))[:2] == [("layers.0",), ("layers.1",)]


def test_what_the_model_itself_shares_it_gathers():
    model = Language()
    model.own = model.layers[0].up.weight
    found = plan_units(model, by_class(model, ["Block"]))
    assert [unit.modules for unit in found] == [("layers.0",), ("layers.1",), ("embedding",), ("norm", "head"), ("",)]
    assert found[-1].parameters == ("own",)
    assert "layers.0.up.weight" not in found[0].parameters


def test_other_formats_are_units_of_their_own():
    model = Language()
    model.layers[0].norm.double()
    model.norm.double()
    model.layers[1].up.requires_grad_(False).bfloat16()  # not trained, so nothing is reduced
    found = units(model, "Block")
    assert list(found) == [
        ("layers.0.norm",),
        ("layers.0",),
        ("layers.1",),
        ("embedding",),
        ("norm",),
        ("head",),
        ("",),
    ]
    assert found["layers.0.norm",].reason == "trained in float64"
    assert "layers.0.norm.weight" not in found["layers.0",].parameters


def test_formats_without_a_choice():
    model = Language()
    model.embedding.bfloat16()
    assert [unit.modules for unit in plan_units(model, None)] == [("embedding",), ("",)]
    assert [unit.modules for unit in plan_units(model, None, upcast=True)] == [("",)]  # it will be stored in fp32


def test_a_module_of_several_formats_is_refused():
    model = Language()
    model.layers[0].up.bias = nn.Parameter(torch.zeros(8, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"'layers.0.up' trains.*torch.float32 and torch.float64.*ignored_modules"):
        units(model, "Block")
    model.layers[0].up.bias.requires_grad_(False)
    units(model, "Block")

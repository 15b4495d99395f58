from typing import Any

import torch
from torch import nn

from hasten.parallel import plan
from hasten.parallel.plan import Plans, Recipe
from hasten.parallel.replicate import Replicate
from hasten.world import process
from hasten.world.process import World
from tests.ranks import run_ranks
from tests.simulated_device import install


class Note:
    """A transform that notes where it stands in the order."""

    def __init__(self, name: str, order: list[str]) -> None:
        self.name, self.order = name, order

    def apply(self, model: Any) -> Any:
        device = next(model.parameters()).device.type
        self.order.append(f"{self.name} sees {type(model).__name__} on {device}")
        return model

    def undo(self, model: Any) -> Any:
        return model


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Engine(Replicate):
    name = "wrapper"

    def wrap(self, model: nn.Module, evaluation: bool = False) -> nn.Module:
        return model if evaluation else Wrapper(model)


def test_transforms_come_before_and_after_the_engine():
    order: list[str] = []
    world = process.start()
    recipe = Recipe(
        world, Engine(world), before=[Note("first", order), Note("second", order)], after=[Note("last", order)]
    )
    model = nn.Linear(2, 2)
    wrapped, steps = plan.prepare(model, recipe, place=True, evaluation=False)
    assert isinstance(wrapped, Wrapper)
    assert wrapped.module is model
    assert steps == ["first", "second", "to cpu", "Wrapper", "last"]
    assert order == ["first sees Linear on cpu", "second sees Linear on cpu", "last sees Wrapper on cpu"]


def test_what_is_not_done_is_not_noted():
    world = process.start()
    model = nn.Linear(2, 2)
    assert plan.prepare(model, Recipe(world, Engine(world)), place=False, evaluation=True) == (model, [])


def on_a_device() -> list[Any]:
    install("npu")
    order: list[str] = []
    world = World(device=torch.device("npu:0"))
    model = nn.Linear(2, 2)
    weight = model.weight
    _, steps = plan.prepare(
        model, Recipe(world, Engine(world), before=[Note("first", order)], after=[Note("last", order)]), True, False
    )
    return [order, steps, weight is model.weight, weight.device.type]


def test_models_move_after_the_first_transforms_and_before_the_engine():
    order = ["first sees Linear on cpu", "last sees Wrapper on npu"]
    found = run_ranks(on_a_device, 1, fresh=True, initialise=False)
    assert found == [[order, ["first", "to npu:0", "Wrapper", "last"], True, "npu"]]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 2)
        self.head = nn.Linear(2, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))


def test_a_plan_describes_the_model_as_it_is():
    world = process.start()
    found = plan.describe(Tied(), Recipe(world, Replicate(world)), ["to cpu"])
    assert (found.model, found.engine, found.world_size, found.device, found.mesh) == (
        "Tied",
        "replicate",
        1,
        "cpu",
        {},
    )
    assert found.dtypes == {"float32": 10, "bfloat16": 4}
    assert (found.parameter_bytes, found.gradient_bytes, found.buffer_bytes) == (48, 40, 24)
    assert found.ties == (("embed.weight", "head.weight"),)
    assert str(found).splitlines() == [
        "model           Tied",
        "engine          replicate on 1 rank, cpu",
        "mesh            none",
        "steps           to cpu",
        "elements        10 float32, 4 bfloat16",
        "ties            embed.weight = head.weight",
        "bytes per rank  48 parameters, 40 gradients, 24 buffers",
    ]


def test_a_model_without_anything_has_a_plan():
    world = process.start()
    text = str(plan.describe(nn.ReLU(), Recipe(world, Replicate(world)), []))
    assert "elements        none" in text
    assert "ties            none" in text


def test_several_plans_are_printed_one_below_the_other():
    world = process.start()
    one = plan.describe(nn.Linear(1, 1), Recipe(world, Replicate(world)), [])
    assert str(Plans([one, one])) == f"{one}\n\n{one}"
    assert str(Plans()) == "nothing has been prepared yet"


def describe_job() -> list[Any]:
    world = process.start()
    recipe = Recipe(world, Replicate(world))
    wrapped, steps = plan.prepare(nn.Linear(2, 2), recipe, place=True, evaluation=False)
    found = plan.describe(wrapped.module, recipe, steps)  # type: ignore[arg-type]
    return [found.steps, found.mesh, found.world_size, str(found).splitlines()[1:3]]


def test_the_plan_of_a_job_shows_its_ranks():
    lines = ["engine          replicate on 2 ranks, cpu", "mesh            dp_replicate=2"]
    assert run_ranks(describe_job, 2) == [[("to cpu", "DistributedDataParallel"), {"dp_replicate": 2}, 2, lines]] * 2

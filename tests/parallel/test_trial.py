from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hasten.parallel import stepping, trial
from tests.ranks import run_ranks


class Signs(torch.optim.Optimizer):
    """Works on DTensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.log: list[str] = []
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        self.log.append("a step")
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("noise", torch.rand(()))
                self.update(parameter)

    def update(self, parameter: Any) -> None:
        parameter.sub_(parameter.grad.sign(), alpha=0.1)


class Rows(Signs):
    """Mixes in a plain tensor."""

    def update(self, parameter: Any) -> None:
        parameter.sub_(torch.ones(parameter.shape))


class Values(Signs):
    """Looks at values first, which a trial does not have."""

    def update(self, parameter: Any) -> None:
        if parameter.grad.sum().item() > 0:
            parameter.sub_(torch.ones(parameter.shape))


class Broken(Signs):
    """Fails anyway."""

    def update(self, parameter: Any) -> None:
        raise KeyError("momentum")


def optimizer_of(kind: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    optimizer = kind([nn.Parameter(distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)]))])
    optimizer.param_groups[0]["params"][0].grad = distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)])
    return optimizer


def trials() -> dict[str, str]:
    found = {}
    for kind in (Signs, Rows, Values, Broken):
        optimizer = optimizer_of(kind)
        before = torch.get_rng_state()
        error = trial.failure(optimizer)
        found[kind.__name__] = "" if error is None else str(error)
        assert torch.equal(before, torch.get_rng_state())
        assert (optimizer.steps, optimizer.log, len(optimizer.state)) == (0, [], 0)
        assert optimizer.param_groups[0]["params"][0].full_tensor().equal(torch.ones(5, 3))
    optimizer = optimizer_of(Signs)
    stepping.adapt(optimizer)
    optimizer.step()
    assert optimizer.steps == 1
    for kind, act in ((Rows, stepping.adapt), (Values, lambda optimizer: optimizer.step())):
        optimizer = optimizer_of(kind)
        if kind is Values:
            stepping.adapt(optimizer)
        with pytest.raises(ValueError, match=f"{kind.__name__} fails on parameters that are divided") as caught:
            act(optimizer)
        found[f"{kind.__name__} told"] = str(caught.value)
    optimizer = optimizer_of(Broken)
    stepping.adapt(optimizer)
    with pytest.raises(KeyError, match="momentum"):
        optimizer.step()
    return found


def test_an_unknown_optimizer_is_tried():
    for found in run_ranks(trials, 2):
        assert found["Signs"] == found["Values"] == found["Broken"] == ""
        assert "mixed torch.Tensor and DTensor" in found["Rows"]
        for name in ("Rows", "Values"):
            assert f"`{name}.needs_whole_parameters = True`" in found[f"{name} told"]
            assert f"`{name}.is_elementwise = True`" in found[f"{name} told"]

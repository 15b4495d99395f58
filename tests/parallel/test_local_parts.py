from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hasten.parallel import stepping
from tests.ranks import run_ranks

SHAPES = [(7, 5), (1, 9), (4,)]


class Plain(torch.optim.Optimizer):
    """As a kernel: it takes plain tensors with memory, and nothing else."""

    is_elementwise = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state |= {"sum": torch.zeros_like(parameter), "table": torch.ones(256), "step": torch.tensor(0.0)}
            for tensor in (parameter, parameter.grad, state["sum"]):
                if isinstance(tensor, DTensor) or not tensor.numel():
                    raise TypeError("not a plain tensor with memory")
            state["step"] += 1
            state["sum"].mul_(0.9).add_(parameter.grad)
            parameter.sub_(state["sum"].sign(), alpha=0.1)
        return loss


def values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def state_outside() -> list[Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain = [nn.Parameter(value) for value in values(0)]
    spread: list[Any] = [nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])) for value in values(0)]
    one, other = Plain(plain), Plain(spread)
    assert stepping.adapt(other) == "this rank's parts"
    for seed in (1, 2, 3):
        for mine, theirs, value in zip(plain, spread, values(seed), strict=True):
            mine.grad, theirs.grad = value, distribute_tensor(value, mesh, [Shard(0)])
        one.step()
        other.step()
    found = []
    for mine, theirs in zip(plain, spread, strict=True):
        torch.testing.assert_close(theirs.full_tensor(), mine, rtol=0, atol=1e-6)
        state = other.state[theirs]
        assert isinstance(state["sum"], DTensor)
        torch.testing.assert_close(state["sum"].full_tensor(), one.state[mine]["sum"], rtol=0, atol=1e-6)
        found.append(
            (state["sum"].to_local().shape == theirs.to_local().shape, state["table"].shape, state["step"].item())
        )
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_state_is_divided_as_its_parameter(ranks):
    for found in run_ranks(state_outside, ranks):
        assert found == [(True, (256,), 3.0)] * 3

import copy
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hasten.parallel import owners, stepping
from hasten.parallel.owners import WholeParameters, pieces, sharded_axis
from tests.ranks import run_ranks

SHAPES = [(7, 5), (3,), (1, 9), (8, 4), (6,), (5, 2)]


class Orthogonal(torch.optim.Optimizer):
    """Momentum whose sums are made orthogonal: every element depends on the whole matrix."""

    needs_whole_parameters = True

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.seen: list[Any] = []
        self.fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                self.seen.append(weakref.ref(parameter))
                state = self.state[parameter]
                if not state:
                    state["sum"], state["count"] = torch.zeros_like(parameter), 0
                state["count"] += 1
                state["sum"].mul_(0.9).add_(parameter.grad)
                parameter.sub_(state["sum"] / (state["sum"].float().norm() + 1e-12), alpha=group["lr"])
                if self.fails:
                    raise ArithmeticError("no more")
        return loss


class Twice(Orthogonal):
    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


def values(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


class Divided:
    """Parameters over all ranks, or over a mesh of two axes, with an optimizer, next to the same in one process."""

    def __init__(
        self, kind: Any = Orthogonal, copies: int = 1, dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    ) -> None:
        size = dist.get_world_size()
        shape = (size,) if copies == 1 else (copies, size // copies)
        self.mesh = init_device_mesh("cpu", shape)
        start = [tensor for dtype in dtypes for tensor in values(0, dtype)]
        self.dtypes = dtypes
        self.plain = [nn.Parameter(tensor.clone()) for tensor in start]
        self.spread: list[Any] = [nn.Parameter(self.cut(tensor)) for tensor in start]
        self.plain_optimizer, self.optimizer = kind(self.plain), kind(self.spread)
        stepping.adapt(self.optimizer)

    def cut(self, tensor: Tensor) -> DTensor:
        return distribute_tensor(tensor, self.mesh, [Replicate()] * (self.mesh.ndim - 1) + [Shard(0)])

    def gradients(self, seed: int) -> None:
        found = [tensor for dtype in self.dtypes for tensor in values(seed, dtype)]
        for one, other, value in zip(self.plain, self.spread, found, strict=True):
            one.grad, other.grad = value, self.cut(value)

    def step(self, seed: int) -> None:
        self.gradients(seed)
        self.plain_optimizer.step()
        self.optimizer.step()

    def difference(self) -> float:
        pairs = zip(self.plain, self.spread, strict=True)
        return max((one - other.full_tensor()).abs().max().item() for one, other in pairs)

    @property
    def owned(self) -> list[int]:
        return [self.optimizer._steps_over.owners[each] for each in self.spread]


def collectives(dtypes: tuple[torch.dtype, ...], copies: int) -> tuple[float, int, int]:
    calls: list[str] = []
    original = dist.all_to_all_single

    def counted(*args: Any, **options: Any) -> Any:
        calls.append("all_to_all")
        return original(*args, **options)

    divided = Divided(copies=copies, dtypes=dtypes)
    divided.step(1)
    owners.dist.all_to_all_single = counted  # type: ignore[assignment]
    try:
        divided.step(2)
    finally:
        owners.dist.all_to_all_single = original
    return divided.difference(), len(calls), len(divided.spread)


@pytest.mark.parametrize(
    ("ranks", "dtypes", "copies"),
    [(2, (torch.float32,), 1), (3, (torch.float32, torch.bfloat16), 1), (4, (torch.float32,), 2)],
)
def test_a_step_takes_two_collectives_for_each_format(ranks, dtypes, copies):
    for difference, calls, parameters in run_ranks(collectives, ranks, dtypes, copies):
        assert difference == 0
        assert calls == 2 * len(dtypes) < parameters


def ownership() -> tuple[list[int], list[int], dict[int, list[int]], bool]:
    divided = Divided()
    before = divided.owned
    divided.step(1)
    own = {
        index: [value.numel() for value in divided.optimizer.state[each].values() if isinstance(value, Tensor)]
        for index, each in enumerate(divided.spread)
    }
    more = nn.Parameter(divided.cut(torch.ones(40, 2)))
    more.grad = divided.cut(torch.ones(40, 2))
    divided.optimizer.add_param_group({"params": [more], "lr": 1.0})
    divided.step(2)
    gc.collect()
    alive = any(reference() is not None for reference in divided.optimizer.seen)
    after = divided.owned
    moved = more.full_tensor().detach()
    assert torch.allclose(moved, torch.ones(40, 2) - 1.0 / 80**0.5)
    return before, after, own, alive


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_parameter_has_one_owner(ranks):
    results = run_ranks(ownership, ranks)
    loads = [0] * ranks
    for owner, shape in zip(results[0][0], SHAPES, strict=True):
        loads[owner] += torch.Size(shape).numel()
    assert max(loads) <= 1.2 * sum(loads) / ranks + 10
    for rank, (before, after, own, alive) in enumerate(results):
        assert before == after == results[0][0]
        assert not alive  # whole copies live no longer than a step
        for index, owner in enumerate(before):
            assert own[index] == ([torch.Size(SHAPES[index]).numel()] if owner == rank else [])


def closures() -> tuple[float, list[str], Any]:
    divided = Divided()
    order: list[str] = []

    def closure() -> float:
        assert torch.is_grad_enabled()
        assert all(isinstance(each, DTensor) for each in divided.optimizer.param_groups[0]["params"])
        order.append("closure")
        divided.gradients(1)
        return 3.5

    loss = divided.optimizer.step(closure)
    divided.plain_optimizer.step()
    assert divided.difference() == 0
    twice = Divided(Twice)
    twice.gradients(1)
    with pytest.raises(ValueError, match="Twice evaluates its closure more than once") as caught:
        twice.optimizer.step(lambda: 0.0)
    return loss, order, str(caught.value)


def test_a_closure_runs_once_before_anything_moves():
    for loss, order, text in run_ranks(closures, 2):
        assert loss == 3.5
        assert order == ["closure"]
        assert "replicate the model" in text


def an_error() -> float:
    divided = Divided()
    divided.step(1)
    divided.gradients(2)
    own = [each.grad for each in divided.spread]
    divided.optimizer.fails = True
    with pytest.raises(ArithmeticError, match="no more"):
        divided.optimizer.step()
    divided.optimizer.fails = False
    assert [id(each) for each in divided.optimizer.param_groups[0]["params"]] == [id(each) for each in divided.spread]
    assert all(each.grad is gradient for each, gradient in zip(divided.spread, own, strict=True))
    assert set(map(id, divided.optimizer.state)) == set(map(id, divided.spread))
    return divided.difference()  # nothing was written


def test_an_error_in_a_step_leaves_everything_in_its_place():
    assert run_ranks(an_error, 2) == [0, 0]


def schedulers(when: str) -> tuple[float, list[float]]:
    warnings.simplefilter("error")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain, spread = nn.Parameter(values(0)[0]), nn.Parameter(distribute_tensor(values(0)[0], mesh, [Shard(0)]))
    rates = []
    for parameter in (plain, spread):
        optimizer = Orthogonal([parameter])
        if when == "after":
            stepping.adapt(optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        stepping.adapt(optimizer)
        for seed in range(3):
            gradient = values(seed)[0]
            parameter.grad = gradient if parameter is plain else distribute_tensor(gradient, mesh, [Shard(0)])
            optimizer.step()
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return (plain - spread.full_tensor()).abs().max().item(), rates


@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_see_the_steps(when):
    for difference, rates in run_ranks(schedulers, 2, when):
        assert difference == 0
        assert rates == [0.0125, 0.0125]


def states() -> list[float]:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    found = []
    # A state that every rank has as a whole, as one process wrote it.
    one = Divided()
    one.step(1)
    two = Divided()
    two.plain_optimizer.load_state_dict(copy.deepcopy(one.plain_optimizer.state_dict()))
    two.optimizer.load_state_dict(copy.deepcopy(one.plain_optimizer.state_dict()))
    two.step(2)
    found.append(two.difference())
    # One that is divided over the ranks.
    three = Divided()
    whole = copy.deepcopy(one.plain_optimizer.state_dict())
    three.plain_optimizer.load_state_dict(copy.deepcopy(whole))
    for values_of in whole["state"].values():
        values_of["sum"] = three.cut(values_of["sum"])
    three.optimizer.load_state_dict(whole)
    three.step(2)
    found.append(three.difference())
    # What each rank has by itself.
    four = Divided()
    four.plain_optimizer.load_state_dict(copy.deepcopy(one.plain_optimizer.state_dict()))
    four.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
    four.step(2)
    found.append(four.difference())
    # By name, through torch's functions.
    model = nn.ParameterList(one.spread)
    kept = get_optimizer_state_dict(model, one.optimizer)
    five = Divided()
    five.plain_optimizer.load_state_dict(copy.deepcopy(one.plain_optimizer.state_dict()))
    set_optimizer_state_dict(nn.ParameterList(five.spread), five.optimizer, kept, options=StateDictOptions())
    five.step(2)
    found.append(five.difference())
    return found


def test_state_is_kept_and_loaded():
    assert run_ranks(states, 2) == [[0, 0, 0, 0]] * 2


def layouts() -> str:
    mesh = init_device_mesh("cpu", (2, 2))
    both = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)]))
    with pytest.raises(NotImplementedError, match="along one axis") as caught:
        stepping.adapt(Orthogonal([both]))
    everywhere = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Replicate()]))
    plain = nn.Parameter(torch.ones(3))
    optimizer = Orthogonal([everywhere, plain])
    assert stepping.adapt(optimizer) == WholeParameters.name
    everywhere.grad = distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Replicate()])
    plain.grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(everywhere.to_local(), torch.full((4, 4), 1 - 0.1 / 4))
    torch.testing.assert_close(plain.detach(), torch.full((3,), 1 - 0.1 / 3**0.5))
    assert sharded_axis(both.redistribute(placements=[Replicate(), Shard(1)])) == 1
    return str(caught.value)


def test_other_layouts():
    assert all("(4, 4)" in text for text in run_ranks(layouts, 4))


@pytest.mark.parametrize("length", range(7))
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_pieces_are_those_of_torch(length, count):
    tensor = torch.zeros(4, length)
    expected = [tuple(each.shape) for each in tensor.chunk(count, 1)] if length else []
    found = list(pieces((4, length), 1, count))
    assert found[: len(expected)] == expected
    assert all(shape == (4, 0) for shape in found[len(expected) :])
    assert len(found) == count

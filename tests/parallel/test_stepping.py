from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hasten.parallel import stepping
from hasten.parallel.local_parts import LocalParts
from hasten.parallel.owners import WholeParameters
from hasten.parallel.trial import Unknown
from hasten.weights.successors import replace
from tests.ranks import run_ranks

WHOLE, PARTS, UNKNOWN = WholeParameters.name, LocalParts.name, Unknown.name


class MyMuon(torch.optim.Muon):
    """Derived classes are meant too."""


class MyAdamW(torch.optim.AdamW):
    """Its step is torch's, so that it is known."""


class MySGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # may do anything
        return super().step(closure)


class Muon(torch.optim.SGD):
    """Somebody else's, of the same name: it may send matrices to ranks by itself."""


class Whole(torch.optim.SGD):
    needs_whole_parameters = True


class Parts(torch.optim.SGD):
    is_elementwise = True


class Neither(torch.optim.Adafactor):
    needs_whole_parameters = False


def divided(mesh: Any) -> Any:
    return nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))


CHOICES: list[tuple[Any, dict[str, Any], str | None]] = [
    (torch.optim.AdamW, {}, None),
    (torch.optim.SGD, {}, None),
    (torch.optim.SGD, {"fused": True}, PARTS),
    (torch.optim.Adagrad, {"fused": True}, PARTS),
    (torch.optim.AdamW, {"fused": True}, None),
    (torch.optim.Rprop, {}, PARTS),
    (torch.optim.Muon, {}, WHOLE),
    (MyMuon, {}, WHOLE),
    (torch.optim.Adafactor, {}, WHOLE),
    (MyAdamW, {}, None),
    (MySGD, {}, UNKNOWN),
    (Muon, {}, None),
    (Whole, {}, WHOLE),
    (Parts, {}, PARTS),
    (Neither, {}, None),
]


def chosen() -> list[str | None]:
    mesh = init_device_mesh("cpu", (1,))
    found = []
    for kind, options, _ in CHOICES:
        optimizer = kind([divided(mesh)], lr=0.1, **options)
        found.append(stepping.adapt(optimizer))
        steps = optimizer.step
        assert stepping.adapt(optimizer) == found[-1]  # once
        assert optimizer.step == steps
    return found


def test_the_class_chooses() -> None:
    assert run_ranks(chosen, 1) == [[expected for _, _, expected in CHOICES]]


def test_without_divided_parameters_nothing_happens() -> None:
    optimizer = torch.optim.LBFGS([nn.Parameter(torch.ones(2))])
    assert stepping.adapt(optimizer) is None
    assert "step" not in vars(optimizer)


def refused() -> None:
    mesh = init_device_mesh("cpu", (1,))
    for kind, reason in ((torch.optim.LBFGS, "one vector"), (torch.optim.SparseAdam, "sparse")):
        with pytest.raises(
            ValueError, match=f"{kind.__name__} cannot update parameters.*{reason}.*replicate the model"
        ):
            stepping.adapt(kind([divided(mesh)]))


def test_what_is_refused() -> None:
    run_ranks(refused, 1)


def following() -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))
    olds = [nn.Parameter(torch.arange(15.0).view(5, 3)), nn.Parameter(torch.ones(2))]
    other = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adagrad([{"params": [olds[0], other], "lr": 0.5}, {"params": [olds[1]]}])
    optimizer.state[olds[0]]["sum"].copy_(olds[0].detach())
    news = [nn.Parameter(distribute_tensor(old.detach(), mesh, [Shard(0)])) for old in olds]
    for old, new in zip(olds, news, strict=True):
        replace(old, new)
    counts = [stepping.follow(optimizer), stepping.follow(optimizer)]
    state: Any = optimizer.state[news[0]]
    return [
        counts,
        [[id(each) for each in group["params"]] for group in optimizer.param_groups]
        == [[id(news[0]), id(other)], [id(news[1])]],
        [group["lr"] for group in optimizer.param_groups],
        isinstance(state["sum"], DTensor) and state["sum"].full_tensor().equal(torch.arange(15.0).view(5, 3)),
        len(optimizer.state),
    ]


def test_following_keeps_groups_and_state():
    assert run_ranks(following, 2) == [[[2, 0], True, [0.5, 0.01], True, 3]] * 2


def one_step() -> Any:
    mesh = init_device_mesh("cpu", (1,))
    parameter = divided(mesh)
    optimizer = Whole([parameter], lr=0.1)
    stepping.adapt(optimizer)
    parameter.grad = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    return optimizer.step.__name__, optimizer.step(closure=lambda: 2.0), parameter.full_tensor().detach()


def test_a_step_with_options_and_a_name() -> None:
    ((name, loss, values),) = run_ranks(one_step, 1)
    assert (name, loss) == ("step", 2.0)
    torch.testing.assert_close(values, torch.full((4, 3), 0.9))

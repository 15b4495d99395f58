"""What LocalSGD and DiLoCo have in common."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from hasten import Accelerator, DistributedDataParallelKwargs
from hasten.training.diloco import DiLoCo
from hasten.training.local_sgd import LocalSGD
from hasten.training.local_steps import LocalSteps
from tests.ranks import run_ranks

KINDS = (LocalSGD, DiLoCo)


def local(kind: type[LocalSteps], accelerator: Accelerator, model: nn.Module, steps: Any = 2, **more: Any) -> Any:
    return kind(accelerator, model, steps, **more)  # type: ignore[arg-type]


def line() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def backward(accelerator: Accelerator, model: Any) -> float:
    """One backward pass whose gradient is the rank; returns what the gradient became, and clears it."""
    accelerator.backward(model(torch.full((1, 1), float(accelerator.process_index))).sum())
    gradient = next(iter(model.parameters())).grad.item()
    model.zero_grad()
    return gradient


def train_in(kind: type[LocalSteps], accumulate: bool) -> list[Any]:
    accelerator = Accelerator(gradient_accumulation_steps=2 if accumulate else 1)
    model = accelerator.prepare(line())
    assert isinstance(model, DistributedDataParallel)
    found: list[Any] = [backward(accelerator, model)]
    with local(kind, accelerator, model) as steps:
        for _ in range(4):
            if accumulate:
                with accelerator.accumulate(model):
                    found.append(backward(accelerator, model))
                    steps.step()
            else:
                found.append(backward(accelerator, model))
                steps.step()
    return [*found, backward(accelerator, model), model.require_backward_grad_sync]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_is_exchanged_inside(kind: type[LocalSteps], accumulate: bool):
    # An accumulated loss is halved inside and after the context, a gradient outside is the mean of 0, 1 and 2.
    half = 0.5 if accumulate else 1.0
    for rank, found in enumerate(run_ranks(train_in, 3, kind, accumulate)):
        assert found == [half, *[half * rank] * 4, half, True]


def leave_by_error(kind: type[LocalSteps]) -> list[Any]:
    accelerator = Accelerator()
    model = accelerator.prepare(line())
    steps = local(kind, accelerator, model)
    with pytest.raises(KeyError), steps:  # noqa: PT012
        model.module.weight.data.fill_(accelerator.process_index)
        steps.step()
        raise KeyError(1)
    after = model.module.weight.item()
    model.module.weight.data.fill_(1.0)
    with pytest.raises(RuntimeError, match="entered already"), local(kind, accelerator, model) as again:
        again.__enter__()
    return [after, backward(accelerator, model), model.require_backward_grad_sync]


@pytest.mark.parametrize("kind", KINDS)
def test_after_an_error_nothing_is_averaged_and_gradients_are_exchanged_again(kind: type[LocalSteps]):
    assert run_ranks(leave_by_error, 2, kind) == [[0.0, 0.5, True], [1.0, 0.5, True]]


def only_one_fails(kind: type[LocalSteps]) -> str:
    accelerator = Accelerator()
    model = accelerator.prepare(line())
    if accelerator.process_index == 1:
        with pytest.raises(KeyError), local(kind, accelerator, model):
            raise KeyError(1)
    return "raised at once"


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_fails_does_not_wait_for_the_others(kind: type[LocalSteps]):
    assert run_ranks(only_one_fails, 2, kind) == ["raised at once"] * 2


def uneven(kind: type[LocalSteps], every: int) -> str:
    accelerator = Accelerator()
    model = accelerator.prepare(line())
    try:
        with local(kind, accelerator, model, every) as steps:
            for _ in range(2 + 2 * accelerator.process_index):
                steps.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_processes_with_different_numbers_of_steps_are_told_so(kind: type[LocalSteps]):
    first, second = run_ranks(uneven, 2, kind, 2)
    assert first == second
    assert first.startswith("DistributedOperationException: The 2 processes called")
    assert f"{kind.__name__}(end=True" in first
    assert f"{kind.__name__}(end=False" in first


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_told_of_different_numbers_of_steps_in_the_last_round_too(kind: type[LocalSteps]):
    first, second = run_ranks(uneven, 2, kind, 10)
    assert first == second
    assert f"{kind.__name__}(end=True, in_round=2)" in first
    assert f"{kind.__name__}(end=True, in_round=4)" in first


def statistics(kind: type[LocalSteps]) -> list[list[float]]:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.BatchNorm1d(1))
    inputs = torch.tensor([[1.0], [-1.0]])
    with local(kind, accelerator, model) as steps:
        model(inputs + 10 * accelerator.process_index)
        steps.step()
    found = [model.module.running_mean.tolist()]
    model.eval()
    model(inputs)
    return [*found, model.module.running_mean.tolist()]


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_are_those_of_the_first_process_from_the_next_forward_pass_on(kind: type[LocalSteps]):
    assert run_ranks(statistics, 2, kind) == [[[0.0], [0.0]], [[1.0], [0.0]]]


def frozen(kind: type[LocalSteps]) -> str:
    accelerator = Accelerator()
    model = accelerator.prepare(line().requires_grad_(False))
    with pytest.raises(ValueError) as caught:
        local(kind, accelerator, model)
    return str(caught.value)


@pytest.mark.parametrize(("kind", "ranks"), [(LocalSGD, 2), (DiLoCo, 1), (DiLoCo, 2)])
def test_a_model_without_anything_to_train_is_refused(kind: type[LocalSteps], ranks: int):
    expected = f"{kind.__name__}: no parameter of Linear requires gradients, so there is nothing to train."
    assert run_ranks(frozen, ranks, kind) == [expected] * ranks


class Compiled(nn.Module):
    """A stand-in for what torch.compile returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model


def find_the_model(kind: type[LocalSteps]) -> list[Any]:
    accelerator = Accelerator()
    bare = line()
    texts = []
    with pytest.raises(ValueError) as caught:
        local(kind, accelerator, bare)
    texts.append(str(caught.value))
    model = accelerator.prepare(bare)
    assert all(local(kind, accelerator, each).model is model for each in (model, bare, Compiled(model)))
    mesh = init_device_mesh("cpu", (2,))
    sharded = nn.Linear(2, 2)
    sharded.weight = nn.Parameter(distribute_tensor(sharded.weight.detach(), mesh))
    with pytest.raises(NotImplementedError) as refused:
        local(kind, accelerator, sharded)
    return [*texts, str(refused.value)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_must_be_replicated(kind: type[LocalSteps]):
    (unprepared, sharded), other = run_ranks(find_the_model, 2, kind)
    assert [unprepared, sharded] == other
    assert unprepared == (
        f"{kind.__name__}: Linear has not been prepared for training on 2 processes. Pass what `accelerator.prepare(model)` "
        "returned."
    )
    assert sharded.startswith(
        f"{kind.__name__}: the parameter 'weight' of Linear is a DTensor. A sharded model has one copy"
    )


def learn_graph(kind: type[LocalSteps]) -> list[Any]:
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)])
    model = accelerator.prepare(line())
    with pytest.raises(ValueError, match="with static_graph=True, DDP has to exchange"):
        local(kind, accelerator, model).__enter__()
    found = [model.require_backward_grad_sync, backward(accelerator, model)]
    with local(kind, accelerator, model):
        found.append(backward(accelerator, model))
    return [*found, backward(accelerator, model)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_static_graph_must_be_known_first(kind: type[LocalSteps]):
    assert run_ranks(learn_graph, 2, kind) == [[True, 0.5, 0.0, 0.5], [True, 0.5, 1.0, 0.5]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [0, -1, 1.5, None, True])
def test_the_number_of_steps_must_be_positive(kind: type[LocalSteps], steps: Any):
    setting = "local_sgd_steps" if kind is LocalSGD else "inner_steps"
    with pytest.raises(ValueError, match=rf"{kind.__name__}\({setting}={steps}\): it must be a whole number"):
        local(kind, Accelerator(), line(), steps)
    local(kind, Accelerator(), line(), steps, enabled=False)

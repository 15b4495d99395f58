import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from hasten import Accelerator, DistributedDataParallelKwargs
from hasten.checkpoint.state import EXCHANGE_NAME
from hasten.parallel import exchange_order
from hasten.parallel.exchange_order import ExchangeOrder
from tests.ranks import run_ranks

NAMES = ["4.bias", "4.weight", "2.bias", "2.weight", "0.bias", "0.weight"]


def build(**kwargs):
    torch.manual_seed(0)
    # The second arrangement has two buckets, the first one bucket.
    handler = DistributedDataParallelKwargs(bucket_cap_mb=0.2, **kwargs)  # type: ignore[arg-type]
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    layers = [
        torch.nn.Linear(37, 301),
        torch.nn.GELU(),
        torch.nn.Linear(301, 307),
        torch.nn.GELU(),
        torch.nn.Linear(307, 3),
    ]
    model = torch.nn.Sequential(*layers)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    return accelerator, model, optimizer


def train(accelerator, model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + accelerator.process_index)
        accelerator.backward(model(torch.randn(8, 37, generator=generator)).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def interrupted(folder, first):
    parts = build()
    train(*parts, range(first))
    parts[0].save_state(folder)
    expected = train(*parts, range(first, 6))
    again = build()
    again[0].load_state(folder)
    found = train(*again, range(first, 6))
    return [torch.equal(one, other) for one, other in zip(expected, found, strict=True)]


@pytest.mark.parametrize("first", [1, 3])
def test_three_ranks_go_on_to_the_last_bit(tmp_path, first):
    assert run_ranks(interrupted, 3, str(tmp_path), first) == [[True] * 6] * 3
    assert torch.load(tmp_path / EXCHANGE_NAME) == [NAMES]


def test_between_two_ranks_there_is_no_order(tmp_path):
    assert run_ranks(interrupted, 2, str(tmp_path), 1) == [[True] * 6] * 2
    assert not (tmp_path / EXCHANGE_NAME).exists()


def before_the_first_exchange(folder):
    parts = build()
    parts[0].save_state(folder)
    train(*parts, range(1))
    known = parts[0]._session.engine.exchange_order(parts[1])
    parts[0].load_state(folder)  # its order is known by now, and stays
    return known, parts[0]._session.engine.exchange_order(parts[1])


def test_nothing_is_saved_before_the_first_exchange(tmp_path):
    assert run_ranks(before_the_first_exchange, 3, str(tmp_path)) == [(NAMES, NAMES)] * 3
    assert not (tmp_path / EXCHANGE_NAME).exists()


def where_it_does_not_matter():
    found = []
    for kwargs in ({"find_unused_parameters": True}, {"static_graph": True}, {"comm_hook": "bf16"}):
        accelerator, model, _ = build(**kwargs)
        found.append(accelerator._session.engine.exchange_order(model))
        found.append(exchange_order.matters(model, 3))
    return found


def test_arrangements_that_stay_or_that_a_hook_makes_are_left_alone():
    assert run_ranks(where_it_does_not_matter, 3) == [[None, False] * 3] * 3


def repeating():
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)))
    order = ExchangeOrder(model)
    with model.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    before, gradients = order.is_known, [parameter.grad.clone() for parameter in model.parameters()]
    exchange_order.repeat(model, ["0.weight", "0.bias"])  # of another model
    ignored = order.is_known
    names = ["1.weight", "0.bias", "1.bias", "0.weight"]
    exchange_order.repeat(model, names)
    same = all(torch.equal(one, other.grad) for one, other in zip(gradients, model.parameters(), strict=True))
    return before, ignored, order.is_known, order.names == names, same


def test_repeating_keeps_gradients():
    assert run_ranks(repeating, 2) == [(False, False, True, True, True)] * 2

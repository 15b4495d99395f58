"""Optimizers of other packages over divided parameters do what they do in one process."""

import pytest
import schedulefree
import torch
from bitsandbytes import optim
from schedulefree import AdamWScheduleFree
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hasten.parallel import stepping
from tests.extras.models import LIMIT
from tests.parallel.test_optimizers import Make, accelerator, compare, of, plain_steps, sharded_steps, small, whole
from tests.ranks import run_ranks


def of_schedulefree() -> dict[str, Make]:
    found = {}
    for name in ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"):
        for foreach in (False, True):
            found[f"{name} {foreach}"] = of(getattr(schedulefree, name), foreach=foreach)
    return found


def of_bitsandbytes() -> dict[str, Make]:
    # With few values per tensor it keeps 32 bits: what it computes over parts is then what it computes over the whole.
    found = {name: of(getattr(optim, name)) for name in ("AdamW8bit", "Adam8bit", "Lion8bit", "LAMB8bit", "AdamW")}
    return found | {"SGD8bit": of(optim.SGD8bit, momentum=0.9), "LARS8bit": of(optim.LARS8bit, momentum=0.9)}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("build", "steps"), [(of_schedulefree, 8), (of_bitsandbytes, 3)]
)  # RAdam's only collects at first
def test_each_optimizer_does_what_it_does_in_one_process(ranks, build, steps):
    for found in run_ranks(compare, ranks, build, steps=steps, timeout=LIMIT):
        assert found
        assert {name: difference for name, difference in found.items() if difference > 1e-6} == {}


def free_of_schedules() -> list[list[Tensor]]:
    own = accelerator()
    model = small()
    model, optimizer = own.prepare(model, AdamWScheduleFree(model.parameters(), lr=0.05))
    optimizer.train()
    found = [sharded_steps(own, model, [optimizer])]
    optimizer.eval()
    found.append(whole(list(model.parameters())))
    optimizer.train()
    return [*found, sharded_steps(own, model, [optimizer])]


def test_schedule_free_optimizers():
    model = small()
    optimizer = AdamWScheduleFree(model.parameters(), lr=0.05)
    optimizer.train()
    expected = [plain_steps(model, [optimizer], 2)]
    optimizer.eval()
    expected.append(whole(list(model.parameters())))
    optimizer.train()
    expected.append(plain_steps(model, [optimizer], 2))
    for found in run_ranks(free_of_schedules, 2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def eight_bits(name: str) -> tuple[float, float, set[torch.dtype]]:
    kind = getattr(optim, name)
    mesh = init_device_mesh("cpu", (2,))
    start = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    plain, spread = nn.Parameter(start.clone()), nn.Parameter(distribute_tensor(start, mesh, [Shard(0)]))
    one, other = kind([plain], lr=0.01), kind([spread], lr=0.01)
    stepping.adapt(other)
    for seed in (1, 2, 3):
        gradient = torch.randn(128, 64, generator=torch.Generator().manual_seed(seed))
        plain.grad, spread.grad = gradient, distribute_tensor(gradient, mesh, [Shard(0)])
        one.step()
        other.step()
    whole = spread.full_tensor()
    formats = {value.dtype for value in other.state[spread].values() if isinstance(value, DTensor)}
    return (whole - plain).abs().max().item(), (plain - start).abs().max().item(), formats


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit", "LAMB8bit"])
def test_optimizers_with_8_bits(name):
    for difference, moved, formats in run_ranks(eight_bits, 2, name):
        assert moved > 0.005
        assert difference <= 1e-6  # blocks of 256 values do not cross ranks here
        assert formats == (set() if name.startswith("LAMB") else {torch.uint8})

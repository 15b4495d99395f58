from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.plain import TinyDataset, TinyMLP, plain_losses
from tests.ranks import run_ranks

sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
decay = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)


def test_model_and_data_are_the_same_each_time_and_draw_nothing():
    before = torch.get_rng_state()
    for one, other in zip(TinyMLP().parameters(), TinyMLP().parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(TinyDataset()[3][0], TinyDataset()[3][0])
    assert torch.equal(torch.get_rng_state(), before)


def test_one_loss_per_batch_over_several_epochs_and_it_falls():
    losses = plain_losses(TinyMLP, TinyDataset(32), global_batch=8, steps=6, optimizer_fn=sgd, accumulation=2)
    assert len(losses) == 12
    assert losses[-1] < losses[0] / 2


def test_a_window_over_the_end_of_an_epoch_is_refused():
    with pytest.raises(ValueError, match="24 samples are not a multiple of 2 batches of 8"):
        plain_losses(TinyMLP, TinyDataset(24), global_batch=8, steps=1, optimizer_fn=sgd, accumulation=2)


def ddp_losses(global_batch: int, steps: int, accumulation: int, clip: float) -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs, targets = TinyDataset().inputs, TinyDataset().targets
    model = DistributedDataParallel(TinyMLP())
    optimizer = sgd(model.parameters())
    scheduler = decay(optimizer)
    losses = []
    for index in range(steps * accumulation):
        mine = torch.arange(global_batch).chunk(world)[rank] + index * global_batch % len(inputs)
        last = (index + 1) % accumulation == 0
        with nullcontext() if last else model.no_sync():
            loss = functional.mse_loss(model(inputs[mine]), targets[mine])
            (loss / accumulation).backward()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        losses.append(mean.item())
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return losses


@pytest.mark.parametrize("world_size", [2, 4])
def test_it_is_what_ddp_does_on_the_same_global_batches(world_size):
    plain = plain_losses(TinyMLP, TinyDataset(), 16, 5, sgd, accumulation=2, clip=0.5, scheduler_fn=decay)
    for losses in run_ranks(ddp_losses, world_size, 16, 5, accumulation=2, clip=0.5):
        assert losses == pytest.approx(plain, rel=1e-5)

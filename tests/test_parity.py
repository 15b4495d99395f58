"""The main job against plain PyTorch on the same global batches, and against what the reference printed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin, GradScalerKwargs, set_seed
from tests.plain import TinyDataset, TinyMLP, plain_losses
from tests.ranks import run_ranks

STEPS = 20
GLOBAL_BATCH = 16
SIZES = [1, 2, 4]
sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
adam = partial(torch.optim.AdamW, lr=0.01)


def decay(steps: int) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    """A schedule of which `steps` steps are taken at once."""
    return partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.95**steps)


def losses(
    optimizer_fn: Any,
    accumulation: int = 1,
    clip: float | None = None,
    schedule: bool = False,
    split_batches: bool = False,
    **arguments: Any,
) -> list[float]:
    config = DataLoaderConfiguration(split_batches=split_batches)
    scaling = GradScalerKwargs(init_scale=128.0)  # with the default scale fp16 would skip the first steps
    accelerator = Accelerator(
        gradient_accumulation_steps=accumulation, dataloader_config=config, kwargs_handlers=[scaling], **arguments
    )
    batch = GLOBAL_BATCH if split_batches else GLOBAL_BATCH // accelerator.num_processes
    model = TinyMLP()
    optimizer = optimizer_fn(model.parameters())
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(TinyDataset(), batch), decay(1)(optimizer)
    )
    found: list[float] = []
    while len(found) < STEPS * accumulation:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                if schedule:
                    scheduler.step()
                optimizer.zero_grad()
            found.append(accelerator.gather(loss.detach()).mean().item())
    return found


def plain(
    size: int, optimizer_fn: Any, accumulation: int = 1, clip: float | None = None, schedule: bool = False
) -> list[float]:
    scheduler_fn = decay(size) if schedule else None
    return plain_losses(TinyMLP, TinyDataset(), GLOBAL_BATCH, STEPS, optimizer_fn, accumulation, clip, scheduler_fn)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer_fn": sgd},
        {"optimizer_fn": adam},
        {"optimizer_fn": sgd, "accumulation": 2},
        {"optimizer_fn": sgd, "clip": 0.5},
        {"optimizer_fn": sgd, "schedule": True},
        {"optimizer_fn": adam, "accumulation": 4, "clip": 0.5, "schedule": True},
    ],
    ids=["sgd", "adam", "accumulation", "clip", "schedule", "everything"],
)
def test_losses_are_those_of_a_plain_loop_on_the_same_global_batches(size: int, options: dict[str, Any]):
    expected = plain(size, **options)
    for found in run_ranks(losses, size, **options):
        assert found == pytest.approx(expected, abs=1e-5)
    assert sum(expected[-4:]) < sum(expected[:4])


@pytest.mark.parametrize("size", SIZES)
def test_processes_that_share_batches_step_the_schedule_once(size: int):
    expected = plain(1, sgd, schedule=True)
    for found in run_ranks(losses, size, sgd, schedule=True, split_batches=True):
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("size", [1, 2])
def test_small_formats_follow_the_loop_in_full_precision(size: int, precision: str):
    # bf16 rounds each product to 8 bits (0.4 %), fp16 to 11; the first loss differs by that, the last by what 20 steps make of it
    tolerance = {"bf16": 0.05, "fp16": 0.01}[precision]
    expected = plain(size, sgd, clip=0.5)
    for found in run_ranks(losses, size, sgd, clip=0.5, mixed_precision=precision):
        assert found == pytest.approx(expected, rel=tolerance, abs=tolerance / 10)
        assert found != pytest.approx(expected, abs=1e-6)


def in_bf16_by_hand() -> list[float]:
    model, found = TinyMLP(), []
    optimizer = sgd(model.parameters())
    while len(found) < STEPS:
        for inputs, targets in DataLoader(TinyDataset(), GLOBAL_BATCH):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs = model(inputs)
            loss = nn.functional.mse_loss(outputs.float(), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


def test_alone_bf16_is_torchs_own_bit_by_bit():
    assert run_ranks(losses, 1, sgd, mixed_precision="bf16") == [in_bf16_by_hand()]


# ---- the same random numbers as the reference ----

# What accelerate 1.15.0 printed with torch 2.13.0 on the CPU, per rank, for `drawn` below.
RECORDED = {
    ("", 1): [
        [12.162789, 0.910511, 0.599274, 0.891826, 1.515253, 0.099552, 0.71669, 0.791541, 2.051006, 1.046743, 1.96665, 0.505184,
         0.334213, 0.922079, 1.839955, 0.689792, 0.212456, 0.038483],
    ],
    ("", 2): [
        [3.521956, 1.236123, 0.444704, 2.502485, 1.950058, 0.622292, 1.385602, 0.479456, 0.52222],
        [8.961474, 1.184742, 1.98775, 1.020158, 0.582374, 0.502352, 4.4498, 1.857675, 1.335072],
    ],
    ("use_seedable_sampler", 1): [
        [2.077985, 1.806237, 2.668087, 0.934855, 3.35181, 0.772285, 5.498927, 0.115059, 2.151986, 5.801439, 2.809758, 0.109088,
         0.6707, 1.663453, 2.619649, 2.698047, 0.90552, 10.614145],
    ],
    ("use_seedable_sampler", 2): [
        [2.077985, 3.289182, 4.316837, 1.33529, 2.299984, 3.221839, 0.714191, 2.90265, 1.832949],
        [0.930352, 0.984533, 1.968061, 0.710192, 0.64276, 0.708166, 0.692493, 0.444784, 7.495653],
    ],
    ("dispatch_batches", 2): [
        [12.162789, 0.903658, 1.496152, 6.626229, 0.432133, 0.931976, 0.814222, 1.395183, 1.225533],
        [2.057199, 0.996483, 0.780521, 1.073875, 2.13097, 0.815993, 0.764442, 0.903531, 2.681095],
    ],
}  # fmt: skip


def drawn(setting: str) -> list[float]:
    set_seed(42)
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(**({setting: True} if setting else {}))
    )
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    inputs = torch.randn(22, 4, generator=torch.Generator().manual_seed(0))
    loader: Any = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), loader)
    found = []
    for _ in range(3):
        for batch, targets in loader:
            loss = nn.functional.mse_loss(model(batch), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


@pytest.mark.parametrize(("setting", "size"), RECORDED, ids=lambda value: str(value) or "default")
def test_weights_order_and_dropout_are_drawn_as_the_reference_draws_them(setting: str, size: int):
    env: dict[str, str | None] = {"RANK": None, "WORLD_SIZE": None} if size == 1 else {}
    found = run_ranks(drawn, size, setting, env=env, initialise=size > 1)
    for own, recorded in zip(found, RECORDED[setting, size], strict=True):
        assert own == pytest.approx(recorded, rel=1e-4, abs=1e-5)


def cut_by_hand(sync_with_dataloader: bool) -> tuple[int, list[torch.Tensor]]:
    """The updates, and the parameters after an epoch in which each batch is cut into 4 micro-batches."""
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=sync_with_dataloader)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = TinyMLP()
    optimizer = sgd(model.parameters())
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TinyDataset(), GLOBAL_BATCH // accelerator.num_processes)
    )
    updates = 0
    for inputs, targets in loader:
        for part, wanted in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(part), wanted))
                optimizer.step()
                optimizer.zero_grad()
            updates += accelerator.sync_gradients
    return updates, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_batches_that_are_cut_by_hand_make_one_update_each(ranks):
    model = TinyMLP()
    optimizer = sgd(model.parameters())
    for inputs, targets in DataLoader(TinyDataset(), GLOBAL_BATCH):
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    for updates, found in run_ranks(cut_by_hand, ranks, False):
        assert updates == 4
        torch.testing.assert_close(found, [each.detach() for each in model.parameters()], rtol=1e-5, atol=1e-6)
    # As in accelerate: the last batch ends a window in each of its parts.
    assert [updates for updates, _ in run_ranks(cut_by_hand, ranks, True)] == [3 + 4] * ranks

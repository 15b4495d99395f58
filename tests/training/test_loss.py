from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hasten import Accelerator
from hasten.settings.accumulation import GradientAccumulationPlugin
from hasten.settings.handlers import GradScalerKwargs
from hasten.training.diloco import DiLoCo
from hasten.training.local_sgd import LocalSGD
from hasten.training.loss import checked
from tests.plain import TinyMLP
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def micro_batch(index: int, rank: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """1 to 7 samples, another number for each micro-batch and rank."""
    generator = torch.Generator().manual_seed(1000 * seed + 100 * rank + index)
    size = 1 + int(torch.randint(7, (), generator=generator))
    inputs = torch.randn(size, 8, generator=generator)
    return inputs, inputs.sin().sum(dim=1, keepdim=True)


def sum_of(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[1], reduction="sum")


def plain_updates(windows: list[int], ranks: int, max_norm: float | None = None) -> list[Tensor]:
    """The parameters after updates on the exact mean over all samples of each window, in one plain process."""
    model = TinyMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    start = 0
    for length in windows:
        batches = [micro_batch(index, rank) for index in range(start, start + length) for rank in range(ranks)]
        start += length
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        functional.mse_loss(model(inputs), targets).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def accelerator_of(scale: str, steps: int, **settings: Any) -> Accelerator:
    plugin = GradientAccumulationPlugin(num_steps=steps, scale=scale, **settings)
    return Accelerator(cpu=True, gradient_accumulation_plugin=plugin)


class Epoch(torch.utils.data.Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def weighted_updates(
    number: int, steps: int, max_norm: float | None = None, each: bool = False, split: bool = False
) -> list[Tensor]:
    accelerator = accelerator_of("weight", steps, sync_each_batch=each)
    model = TinyMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = torch.utils.data.DataLoader(Epoch(number * accelerator.num_processes), 1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for index, _ in enumerate(loader):
        batch = micro_batch(index, accelerator.process_index)
        with accelerator.accumulate(model):
            if split:  # two backward passes in one micro-batch
                for part in zip(batch[0].tensor_split(2), batch[1].tensor_split(2), strict=True):
                    accelerator.backward(sum_of(model, part), weight=len(part[0]))
            else:
                accelerator.backward(sum_of(model, batch), weight=torch.tensor(len(batch[0])))
            if max_norm is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def check_equal(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-6) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("settings", [{}, {"max_norm": 0.5}, {"each": True}, {"split": True}])
def test_weights_give_the_mean_over_all_samples_of_a_window(ranks, settings):
    expected = plain_updates([3, 3, 1], ranks, settings.get("max_norm"))
    for found in run_ranks(weighted_updates, ranks, 7, 3, **settings):
        check_equal(found, expected)


def test_weights_without_accumulation_need_no_correction(monkeypatch):
    def no_correction(*_: Any) -> None:
        raise AssertionError("corrected")

    monkeypatch.setattr("hasten.training.loss.multiply_all", no_correction)
    check_equal(weighted_updates(4, 1), plain_updates([1, 1, 1, 1], 1))


def without_accumulate() -> list[Tensor]:
    accelerator = accelerator_of("weight", 1)
    model = TinyMLP()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    for index in range(3):
        batch = micro_batch(index, accelerator.process_index)
        accelerator.backward(sum_of(model, batch), weight=len(batch[0]))
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loop_without_accumulate_has_windows_of_one(ranks):
    for found in run_ranks(without_accumulate, ranks):
        check_equal(found, plain_updates([1, 1, 1], ranks))


def gradient_of(accelerator: Accelerator, model: Any, batch: tuple[Tensor, Tensor], **weight: Any) -> list[Tensor]:
    """What one backward pass leaves in the gradients, which are cleared before."""
    model.zero_grad()
    accelerator.backward(sum_of(model, batch), **weight)
    return [parameter.grad.clone() for parameter in model.parameters()]


def after_windows(scale: str) -> list[list[Tensor]]:
    """Gradients of two backward passes outside of `accumulate`, when windows of two have been there before."""
    accelerator = accelerator_of(scale, 2)
    model = accelerator.prepare(TinyMLP())
    batch = micro_batch(0, 0)
    weight = {"weight": len(batch[0])} if scale == "weight" else {}
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(sum_of(model, batch), **weight)
    return [gradient_of(accelerator, model, batch, **weight) for _ in range(2)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("scale", ["window", "weight"])
def test_outside_of_accumulate_every_pass_is_a_window_also_after_others(ranks, scale):
    plain, (inputs, targets) = TinyMLP(), micro_batch(0, 0)
    functional.mse_loss(plain(inputs), targets, reduction="sum").backward()
    divisor = len(inputs) if scale == "weight" else 1
    expected = [parameter.grad / divisor for parameter in plain.parameters()]
    for found in run_ranks(after_windows, ranks, scale):
        check_equal(found[0], expected)
        check_equal(found[1], expected)


def test_the_last_backward_pass_of_a_window_may_come_behind_its_block():
    accelerator = accelerator_of("weight", 2)
    model = accelerator.prepare(TinyMLP())
    batches = [micro_batch(index, 0) for index in range(2)]
    for batch in batches:
        with accelerator.accumulate(model):
            loss = sum_of(model, batch)
        accelerator.backward(loss, weight=len(batch[0]))
    plain = TinyMLP()
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    functional.mse_loss(plain(inputs), targets).backward()
    check_equal(
        [parameter.grad for parameter in model.parameters()], [parameter.grad for parameter in plain.parameters()]
    )


def test_a_loss_without_weight_before_one_with_a_weight_is_nothing():
    accelerator = accelerator_of("weight", 1)
    model = accelerator.prepare(TinyMLP())
    batch = micro_batch(0, 0)
    with accelerator.accumulate(model):
        accelerator.backward(sum_of(model, batch) * 0.0, weight=0)
        accelerator.backward(sum_of(model, batch), weight=len(batch[0]))
    plain = TinyMLP()
    functional.mse_loss(plain(batch[0]), batch[1]).backward()
    check_equal(
        [parameter.grad for parameter in model.parameters()], [parameter.grad for parameter in plain.parameters()]
    )


@pytest.mark.parametrize("scale", ["window", "weight"])
def test_a_window_that_was_given_up_does_not_count(scale):
    # As it is after `load_state` and `free_memory`, which set `step`.
    accelerator = accelerator_of(scale, 4)
    model = accelerator.prepare(TinyMLP())
    batch = micro_batch(0, 0)
    weight = {"weight": len(batch[0])} if scale == "weight" else {}
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(sum_of(model, batch), **weight)
    accelerator.free_memory()
    model = accelerator.prepare(TinyMLP())
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(sum_of(model, batch), **weight)
    assert accelerator.sync_gradients
    plain = TinyMLP()
    (sum_of(plain, batch) / (len(batch[0]) if weight else 1)).backward()
    check_equal(
        [parameter.grad for parameter in model.parameters()], [parameter.grad for parameter in plain.parameters()]
    )


def local_weights(kind: Any) -> list[Any]:
    """Gradients inside of LocalSGD or DiLoCo, and after it, where batches of two ranks differ in length."""
    accelerator = accelerator_of("weight", 1)
    model = accelerator.prepare(TinyMLP())
    batch = micro_batch(0, accelerator.process_index)
    with kind(accelerator, model, 9):
        inside = gradient_of(accelerator, model, batch, weight=len(batch[0]))
        if accelerator.process_index == 0:  # nobody has to answer
            gradient_of(accelerator, model, batch, weight=len(batch[0]))
    return [inside, gradient_of(accelerator, model, batch, weight=len(batch[0]))]


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_a_process_on_its_own_divides_by_its_own_weight(kind):
    found = run_ranks(local_weights, 2, kind)
    batches = [micro_batch(0, rank) for rank in range(2)]
    assert len(batches[0][0]) != len(batches[1][0])
    for rank, (inside, _) in enumerate(found):
        plain = TinyMLP()
        functional.mse_loss(plain(batches[rank][0]), batches[rank][1]).backward()
        check_equal(inside, [parameter.grad for parameter in plain.parameters()])
    plain = TinyMLP()
    functional.mse_loss(
        *(torch.cat(parts) for parts in zip(*((plain(x), y) for x, y in batches), strict=True))
    ).backward()
    for _, after in found:
        check_equal(after, [parameter.grad for parameter in plain.parameters()])


def left_in_a_window(kind: Any) -> list[Tensor]:
    accelerator = accelerator_of("weight", 2)
    model = accelerator.prepare(TinyMLP())
    batches = [micro_batch(index, accelerator.process_index) for index in (0, 2)]
    with kind(accelerator, model, 9), accelerator.accumulate(model):
        accelerator.backward(sum_of(model, batches[0]), weight=len(batches[0][0]))
    with accelerator.accumulate(model):
        accelerator.backward(sum_of(model, batches[1]), weight=len(batches[1][0]))
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_a_window_that_begins_on_ones_own_and_ends_with_all(kind):
    batches = [micro_batch(index, rank) for index in (0, 2) for rank in range(2)]
    plain = TinyMLP()
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    functional.mse_loss(plain(inputs), targets).backward()
    for found in run_ranks(left_in_a_window, 2, kind):
        check_equal(found, [parameter.grad for parameter in plain.parameters()])


def empty_parts(rank_of_all: int) -> list[list[Tensor]]:
    """Gradients after windows in which some ranks have nothing, one window in which nobody has anything, and another."""
    accelerator = accelerator_of("weight", 2)
    model = accelerator.prepare(TinyMLP())
    found = []
    for window in range(3):
        for micro in range(2):
            batch = micro_batch(2 * window + micro, accelerator.process_index)
            empty = (
                window == 1 or (window == 0 and accelerator.process_index != rank_of_all) or (window, micro) == (0, 0)
            )
            with accelerator.accumulate(model):
                loss = sum_of(model, batch) * (0.0 if empty else 1.0)
                accelerator.backward(loss, weight=0 if empty else len(batch[0]))
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    return found


def test_micro_batches_and_windows_without_weight_are_nothing():
    plain = TinyMLP()
    for found in run_ranks(empty_parts, 2, 1):
        functional.mse_loss(plain(micro_batch(1, 1)[0]), micro_batch(1, 1)[1]).backward()
        check_equal(found[0], [parameter.grad for parameter in plain.parameters()])
        assert all(not gradient.any() for gradient in found[1])
        plain.zero_grad()
        batches = [micro_batch(index, rank) for index in (4, 5) for rank in (0, 1)]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        functional.mse_loss(plain(inputs), targets).backward()
        check_equal(found[2], [parameter.grad for parameter in plain.parameters()])
        plain.zero_grad()


def mean_updates(scale: str, number: int, steps: int) -> list[Tensor]:
    accelerator = accelerator_of(scale, steps)
    model = TinyMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(Epoch(number * accelerator.num_processes), 1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for index, _ in enumerate(loader):
            batch = micro_batch(index, accelerator.process_index)
            with accelerator.accumulate(model):
                accelerator.backward(functional.mse_loss(model(batch[0]), batch[1]))
                optimizer.step()
                optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def plain_means(windows: list[int], divisors: list[int], ranks: int) -> list[Tensor]:
    model = TinyMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        start = 0
        for length, divisor in zip(windows, divisors, strict=True):
            optimizer.zero_grad()
            for index in range(start, start + length):
                for rank in range(ranks):
                    batch = micro_batch(index, rank)
                    (functional.mse_loss(model(batch[0]), batch[1]) / divisor / ranks).backward()
            start += length
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_short_window_is_divided_by_its_own_length_if_that_is_asked_for(ranks):
    for found in run_ranks(mean_updates, ranks, "window", 5, 3):
        check_equal(found, plain_means([3, 2], [3, 2], ranks))
    for found in run_ranks(mean_updates, ranks, "num_steps", 5, 3):
        check_equal(found, plain_means([3, 2], [3, 3], ranks))


def test_whole_windows_are_bit_for_bit_those_of_the_default():
    for one, other in zip(mean_updates("window", 6, 3), mean_updates("num_steps", 6, 3), strict=True):
        assert torch.equal(one, other)


def fp16_window() -> tuple[list[Tensor], float]:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, scale="weight"),
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
    )
    model = TinyMLP()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for index in range(2):
        batch = micro_batch(index, accelerator.process_index)
        with accelerator.accumulate(model):
            accelerator.backward(sum_of(model, batch), weight=len(batch[0]))
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    return [parameter.grad.clone() for parameter in model.parameters()], norm.item()


def test_weights_and_loss_scaling():
    plain = TinyMLP()
    batches = [micro_batch(index, rank) for index in (0, 1) for rank in (0, 1)]
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    functional.mse_loss(plain(inputs), targets).backward()
    for found, norm in run_ranks(fp16_window, 2):
        check_equal(found, [parameter.grad for parameter in plain.parameters()], 5e-3)
        assert norm == pytest.approx(torch.stack([each.norm() for each in found]).norm().item(), rel=1e-5)


def sharded_updates(number: int, steps: int) -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    accelerator = accelerator_of("weight", steps)
    model = TinyMLP()
    mesh = init_device_mesh("cpu", (accelerator.num_processes,))
    fully_shard(model, mesh=mesh)
    loader = torch.utils.data.DataLoader(Epoch(number * accelerator.num_processes), 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    for index, _ in enumerate(loader):
        batch = micro_batch(index, accelerator.process_index)
        with accelerator.accumulate(model):
            # Held back by hand: then the gradients of the window are not in `grad` before its end.
            model.set_requires_gradient_sync(accelerator.sync_gradients)
            accelerator.backward(sum_of(model, batch), weight=len(batch[0]))
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


@pytest.mark.parametrize("ranks", [2, 3])
def test_weights_with_a_model_that_is_sharded_by_hand(ranks):
    for found in run_ranks(sharded_updates, ranks, 5, 2):
        check_equal(found, plain_updates([2, 2, 1], ranks))


# ---- what is refused ----


def test_a_weight_needs_its_setting():
    accelerator = Accelerator(cpu=True)
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(ValueError, match=r"needs GradientAccumulationPlugin.scale='weight'"):
        accelerator.backward(loss, weight=3)
    assert loss.grad is None


@pytest.mark.parametrize(
    "weight", [None, -1, float("nan"), float("inf"), torch.ones(2), "many", "4", [3], torch.tensor(-2.0)]
)
def test_weights_are_finite_numbers(weight):
    accelerator = accelerator_of("weight", 1)
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(ValueError, match=r"weight.*its number of tokens"):
        accelerator.backward(loss, weight=weight)
    assert loss.grad is None


def test_windows_must_be_known():
    accelerator = accelerator_of("window", 2)
    accelerator.sync_gradients = False
    with pytest.raises(ValueError, match=r"with accelerator\.accumulate"):
        accelerator.backward(torch.ones((), requires_grad=True))


def test_gradients_that_nobody_knows_can_not_be_corrected():
    accelerator = accelerator_of("weight", 2)
    model = TinyMLP()
    with accelerator.accumulate(model):
        accelerator.backward(sum_of(model, micro_batch(0, 0)), weight=2)
    with accelerator.accumulate(model), pytest.raises(ValueError, match=r"and there are none\. Pass yours to"):
        accelerator.backward(sum_of(model, micro_batch(0, 0)), weight=3)


def test_an_unknown_scale():
    with pytest.raises(ValueError, match="'num_steps', 'window', 'weight'"):
        GradientAccumulationPlugin(scale="mean")


def test_the_setting_may_be_changed():
    accelerator = accelerator_of("window", 2)
    accelerator.gradient_state.plugin_kwargs["scale"] = "weight"
    loss = torch.ones((), requires_grad=True)
    accelerator.backward(loss, weight=4)
    assert loss.grad is not None
    assert loss.grad.item() == 0.25


# ---- parts ----


def test_a_weight_becomes_a_number_of_double_precision():
    for weight in (3, 3.0, torch.tensor([3]), torch.tensor(3, dtype=torch.int32)):
        found = checked(weight, CPU, 0)
        assert (found.dtype, found.shape, found.item()) == (torch.float64, (), 3.0)


def test_a_weight_that_has_a_gradient_is_only_looked_at():
    assert checked(torch.tensor([[3.0]], requires_grad=True), CPU, 0).tolist() == 3.0

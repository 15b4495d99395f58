from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from hasten import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin
from tests.plain import TinyDataset, TinyMLP
from tests.ranks import run_ranks

BATCH = 4


def train(length: int, even_batches: bool | None, configured: bool = True) -> tuple[list[Tensor], int, bool]:
    """The parameters after two epochs, the batches of the last one, and what the loader is set to afterwards."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=configured))
    model = TinyMLP()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TinyDataset(length), BATCH)
    )
    for _ in range(2):
        batches = 0
        with accelerator.join_uneven_inputs([model], even_batches=even_batches):
            for inputs, targets in loader:
                accelerator.backward(functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
                batches += 1
    return [parameter.detach().clone() for parameter in model.parameters()], batches, loader.even_batches


def plain(length: int, ranks: int) -> list[Tensor]:
    """Each step has up to `ranks` batches, whose gradients are added and divided by the number of all ranks."""
    model, dataset = TinyMLP(), TinyDataset(length)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for step in range(0, length, BATCH * ranks):
            for start in range(step, min(length, step + BATCH * ranks), BATCH):
                inputs, targets = dataset.inputs[start : start + BATCH], dataset.targets[start : start + BATCH]
                (functional.mse_loss(model(inputs), targets) / ranks).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(("ranks", "length"), [(2, 12), (2, 10), (3, 16), (3, 14), (3, 4)])
def test_ranks_without_a_batch_take_part_in_the_exchange(ranks, length):
    found = run_ranks(train, ranks, length, False)
    for parameters, _, even in found:
        torch.testing.assert_close(parameters, plain(length, ranks), rtol=1e-6, atol=1e-6)
        assert even is True
    batches = -(-length // BATCH)
    assert [number for _, number, _ in found] == [len(range(rank, batches, ranks)) for rank in range(ranks)]


def test_the_loaders_own_setting_is_obeyed():
    for parameters, _, even in run_ranks(train, 2, 12, None, False):
        torch.testing.assert_close(parameters, plain(12, 2), rtol=1e-6, atol=1e-6)
        assert even is False


def test_even_batches_need_no_joining():
    (one, number, even), (other, same, _) = run_ranks(train, 2, 12, True, False)
    assert (number, same, even) == (2, 2, False)
    torch.testing.assert_close(one, other)


def test_one_process_has_nothing_to_join():
    parameters, batches, _ = train_alone()
    torch.testing.assert_close(parameters, plain(12, 1))
    assert batches == 3


def train_alone() -> tuple[list[Tensor], int, Any]:
    accelerator = Accelerator(cpu=True)
    model = TinyMLP()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TinyDataset(12), BATCH)
    )
    for _ in range(2):
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for inputs, targets in loader:
                accelerator.backward(functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()], len(loader), None


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(8))


def with_a_stream() -> tuple[list[str], bool]:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(TinyMLP())
    loader, _ = accelerator.prepare(DataLoader(TinyDataset(8), 2), DataLoader(Stream(), 2))
    with (
        pytest.warns(UserWarning, match="only supported for map-style datasets") as told,
        accelerator.join_uneven_inputs([model], even_batches=False),
    ):
        inside = loader.even_batches
    return [str(warning.message) for warning in told], inside


def test_streams_stay_as_they_are_and_a_warning_says_so():
    for told, inside in run_ranks(with_a_stream, 2):
        assert len(told) == 1
        assert inside is False


def refused(steps: int, raw: bool) -> str:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model: nn.Module = TinyMLP()
    model = model if raw else accelerator.prepare(model)
    with pytest.raises(ValueError, match="Rank") as caught, accelerator.join_uneven_inputs([model]):
        pass
    return str(caught.value)


def test_what_can_not_join_is_told():
    for rank, text in enumerate(run_ranks(refused, 2, 1, True)):
        assert text.startswith(f"Rank {rank}: join_uneven_inputs got a TinyMLP")
    for text in run_ranks(refused, 2, 2, False):
        assert "2 accumulation steps do not go together" in text


def with_weights() -> str:
    plugin = GradientAccumulationPlugin(scale="weight")
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = accelerator.prepare(TinyMLP())
    with pytest.raises(ValueError, match="do not go together") as caught, accelerator.join_uneven_inputs([model]):
        pass
    return str(caught.value)


def test_weights_can_not_be_joined():
    for rank, text in enumerate(run_ranks(with_weights, 2)):
        assert text.startswith(f'Rank {rank}: join_uneven_inputs and scale="weight"')

import copy
import gc
import logging
import pickle
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hasten import (
    Accelerator,
    AutocastKwargs,
    GradientState,
    GradScalerKwargs,
    InitProcessGroupKwargs,
)
from tests.plain import TinyDataset, halving, loss_of, parts, sgd
from tests.ranks import run_ranks


def linear() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


# ---- accumulation ----


def test_two_accelerators_keep_their_own_steps():
    first, second = Accelerator(gradient_accumulation_steps=2), Accelerator(gradient_accumulation_steps=3)
    models = [linear(), linear()]
    (one, first_optimizer), (two, second_optimizer) = (
        accelerator.prepare(model, sgd(model.parameters(), lr=1.0))
        for accelerator, model in zip((first, second), models, strict=True)
    )
    steps = []
    for _ in range(6):
        for accelerator, model, optimizer in ((first, one, first_optimizer), (second, two, second_optimizer)):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.full((1, 1), 0.25)))
                optimizer.step()
                optimizer.zero_grad()
        steps.append((one.weight.item(), two.weight.item()))
    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (2, 3)
    assert [pair[0] for pair in steps] == [1.0, 0.75, 0.75, 0.5, 0.5, 0.25]
    assert [pair[1] for pair in steps] == pytest.approx([1.0, 1.0, 0.75, 0.75, 0.75, 0.5])
    assert GradientState().num_steps == 3


def test_an_optimizer_obeys_the_accelerator_that_prepared_it_last():
    first, second = Accelerator(gradient_accumulation_steps=2), Accelerator()
    model, optimizer, scheduler = linear(), None, None
    inner = sgd(model.parameters(), lr=1.0)
    model, optimizer, scheduler = first.prepare(model, inner, halving(inner))
    assert second.prepare(model, optimizer, scheduler) == (model, optimizer, scheduler)
    first.gradient_state.advance()
    second.backward(model(torch.full((1, 1), 0.5)))
    optimizer.step()
    scheduler.step()
    assert model.weight.item() == 0.5
    assert scheduler.get_last_lr() == [0.5]


def test_an_fp16_optimizer_can_be_handed_on():
    handlers = [GradScalerKwargs(init_scale=128.0)]
    first, second = (Accelerator(mixed_precision="fp16", kwargs_handlers=handlers) for _ in range(2))
    model = linear()
    model, optimizer = first.prepare(model, sgd(model.parameters(), lr=1.0))
    model, optimizer = second.prepare(model, optimizer)
    second.backward(model(torch.full((1, 1), 0.5)).sum())
    second.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert model.weight.item() == 0.5
    assert first.scaler is not second.scaler is optimizer.scaler


def test_steps_can_be_set():
    accelerator = Accelerator()
    accelerator.gradient_accumulation_steps = 4
    assert accelerator.gradient_state.plugin_kwargs == {"num_steps": 4}
    accelerator.sync_gradients = False
    assert not GradientState().sync_gradients
    accelerator.step = 7
    assert accelerator.gradient_state.step == 7
    for bad in (0, -1, 1.5):
        with pytest.raises(ValueError, match="must be a whole number of at least 1"):
            accelerator.gradient_accumulation_steps = bad  # type: ignore[assignment]


def test_the_loss_is_divided_and_arguments_go_on():
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = linear()
    loss = model(torch.ones(1, 1)).sum()
    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(loss)
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 0.5


def test_an_error_inside_a_window_leaves_the_model_in_order():
    assert run_ranks(fail_in_window, 2) == [[True, 1.5]] * 2


def fail_in_window() -> list[Any]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(linear())
    try:
        with accelerator.accumulate(model):
            raise KeyError
    except KeyError:
        pass
    synced = model.require_backward_grad_sync
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.full((1, 1), 2.0 * (1 + accelerator.process_index))))
    return [synced, model.module.weight.grad.item()]


def trigger() -> float:
    accelerator = Accelerator()
    model = accelerator.prepare(linear())
    with accelerator.no_sync(model):
        losses = [model(torch.full((1, 1), float(10**power * (1 + accelerator.process_index)))) for power in range(3)]
        for loss in losses[:2]:
            accelerator.backward(loss)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(losses[2])
    return model.module.weight.grad.item()


def test_several_forwards_and_one_exchange():
    assert run_ranks(trigger, 2) == [166.5, 166.5]


# ---- precision ----


def test_autocast_follows_the_precision():
    accelerator = Accelerator(mixed_precision="bf16")
    layer = linear()
    with accelerator.autocast():
        assert layer(torch.ones(1, 1)).dtype == torch.bfloat16
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert layer(torch.ones(1, 1)).dtype == torch.float32
    assert accelerator.native_amp
    assert accelerator.prepare(layer)(torch.ones(1, 1)).dtype == torch.float32


def test_autocast_changes_nothing_in_full_precision():
    with Accelerator().autocast():
        assert linear()(torch.ones(1, 1)).dtype == torch.float32


def test_the_handler_of_the_constructor_is_the_default():
    accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])
    with accelerator.autocast():
        assert linear()(torch.ones(1, 1)).dtype == torch.float32


# ---- clipping ----


def clip(kind: str) -> list[float]:
    accelerator = Accelerator()
    model = accelerator.prepare(linear())
    accelerator.backward(model(torch.full((1, 1), 2.0 * (1 + accelerator.process_index))))
    given = {
        "generator": iter(list(model.parameters())),
        "list": list(model.parameters()),
        "tensor": model.module.weight,
    }[kind]
    norm = accelerator.clip_grad_norm_(given, 1.5).item()
    clipped = model.module.weight.grad.item()
    accelerator.clip_grad_value_(model.parameters(), 0.5)
    return [norm, clipped, model.module.weight.grad.item()]


@pytest.mark.parametrize("kind", ["generator", "list", "tensor"])
def test_gradients_are_clipped_whatever_holds_them(kind: str):
    for found in run_ranks(clip, 2, kind):
        assert found == pytest.approx([3.0, 1.5, 0.5], rel=1e-5)


# ---- keeping, copying, forgetting ----


def test_objects_for_checkpoints_need_both_methods():
    class Half:
        def state_dict(self) -> dict[str, int]:
            return {}

    accelerator, good = Accelerator(), linear()
    with pytest.raises(
        ValueError, match=r"(?s)All `objects` must include.*- Item at index 0, `int`\n.*- Item at index 2, `Half`"
    ):
        accelerator.register_for_checkpointing(3, good, Half())
    assert accelerator._custom_objects == []
    accelerator.register_for_checkpointing(good)
    assert accelerator._custom_objects == [good]


def test_a_copy_is_the_same_accelerator():
    accelerator = Accelerator()
    assert copy.deepcopy(accelerator) is accelerator
    assert copy.deepcopy({"held": [accelerator]})["held"][0] is accelerator


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_an_accelerator_pickles_with_what_it_has_prepared(precision: str):
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2)
    optimizer, loader, scheduler = accelerator.prepare(*parts()[1:])
    again, optimizer, loader, scheduler = pickle.loads(pickle.dumps((accelerator, optimizer, loader, scheduler)))
    assert again.mixed_precision == precision
    assert again.gradient_accumulation_steps == 2
    assert again._optimizers == [optimizer]
    assert again._schedulers == [scheduler]
    assert optimizer.gradient_state is scheduler.gradient_state is again.gradient_state
    assert optimizer.scaler is again.scaler
    assert [len(batch[0]) for batch in again._dataloaders[0]] == [8] * 8


def test_an_unpickled_accelerator_trains():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = linear()
    objects = pickle.dumps((accelerator, accelerator.prepare(model, sgd(model.parameters(), lr=1.0))))
    again, (model, optimizer) = pickle.loads(objects)
    weights = []
    for _ in range(4):
        with again.accumulate(model):
            again.backward(model(torch.full((1, 1), 0.25)))
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.weight.item())
    assert weights == [1.0, 0.75, 0.75, 0.5]


def pickle_in_a_job() -> list[Any]:
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=20))])
    accelerator.prepare(DataLoader(TinyDataset(), 8))
    again = pickle.loads(pickle.dumps(accelerator))
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(Accelerator(ranks=[0, 1]))
    return [again.world is accelerator.world, again.process_index, len(list(again._dataloaders[0]))]


def test_an_accelerator_of_a_job_pickles():
    assert run_ranks(pickle_in_a_job, 2) == [[True, 0, 4], [True, 1, 4]]


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_forgotten_objects_can_be_collected(precision: str):
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        break
    assert accelerator.step == 1
    references = [
        weakref.ref(item) for item in (model, optimizer.optimizer, optimizer, scheduler, loader, loader.dataset)
    ]
    del batch
    model, optimizer, loader, scheduler = accelerator.free_memory(model, optimizer, loader, scheduler)
    assert (model, optimizer, loader, scheduler) == (None,) * 4
    gc.collect()
    assert [reference() for reference in references] == [None] * 6
    assert (accelerator.step, accelerator._models, accelerator.explain()) == (0, [], [])
    assert accelerator.clear() == []


def forget_in_a_job() -> list[bool]:
    accelerator = Accelerator()
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    del batch
    references = [weakref.ref(model.module), weakref.ref(optimizer), weakref.ref(loader)]
    model, optimizer, loader, scheduler = accelerator.free_memory(model, optimizer, loader, scheduler)
    gc.collect()
    return [reference() is None for reference in references]


def test_in_a_job_too():
    assert run_ranks(forget_in_a_job, 2) == [[True] * 3] * 2


def test_hooks_come_and_go(tmp_path: Path):
    accelerator = Accelerator()
    accelerator.prepare(linear())
    calls: list[Any] = []
    save = accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: calls.append(("save", len(models), len(weights)))
    )
    load = accelerator.register_load_state_pre_hook(lambda models, folder: calls.append(("load", len(models))))
    accelerator.save_state(tmp_path / "one")
    accelerator.load_state(tmp_path / "one")
    save.remove()
    load.remove()
    accelerator.save_state(tmp_path / "two")
    accelerator.load_state(tmp_path / "two")
    assert calls == [("save", 1, 1), ("load", 1)]


# ---- numbers of batches ----


def uneven(samples: int, **fields: Any) -> tuple[list[str], str]:
    from hasten import DataLoaderConfiguration, FullyShardedDataParallelPlugin

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hasten.session").addHandler(handler)
    config = DataLoaderConfiguration(**fields)
    one = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(), dataloader_config=config)
    model = one.prepare(linear())
    one.prepare(DataLoader(TinyDataset(samples), batch_size=2))
    logging.getLogger("hasten.session").removeHandler(handler)
    with pytest.raises(ValueError) as caught, one.join_uneven_inputs([model]):
        pass
    return messages, str(caught.value)


@pytest.mark.parametrize(
    ("samples", "fields", "warns"),
    [(6, {"even_batches": False}, True), (8, {"even_batches": False}, False), (6, {}, False)],
)
def test_a_sharded_model_and_different_numbers_of_batches(samples, fields, warns):
    for rank, (messages, text) in enumerate(run_ranks(uneven, 2, samples, **fields)):
        assert text.startswith(f"Rank {rank}: join_uneven_inputs works with replicated models (DDP) only")
        assert len(messages) == (warns and rank == 0)
        if messages:
            assert "different numbers of batches (2, 1)" in messages[0]
            assert "end the epoch after 1 batches" in messages[0]

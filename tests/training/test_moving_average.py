import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.counts import Operations
from torch import Tensor, nn

from hasten import Accelerator
from hasten.training.moving_average import ExponentialMovingAverage
from tests.parallel.test_gathered import accelerate, ranks_of
from tests.parallel.test_shard import language, loss_of, tokens
from tests.plain import TinyMLP
from tests.ranks import run_ranks

STEPS = 4


class Model(nn.Module):
    """A tied model with a buffer that training changes, a frozen part, and one buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.body = language(tied=True)
        self.body.layers[0].up.requires_grad_(False)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self, batch: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return self.body(batch)


def by_hand(ranks: int, steps: int, decay: float = 0.5, after: int = 1, every: int = 1) -> dict[str, Tensor]:
    """Plain training, and the average by its definition; in eval mode the names that are averaged."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}
    for step in range(1, steps + 1):
        for rank in range(ranks):
            (loss_of(model, tokens(rank, step)) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        count = (step - after) // every
        weight = 0.0 if step <= after else min(decay, (1 + count) / (10 + count))
        if step <= after or (step - after) % every == 0:
            average = {
                name: weight * old + (1 - weight) * model.get_parameter(name).detach() for name, old in average.items()
            }
    return average


def train(accelerator: Accelerator, model: Any, optimizer: Any, average: Any, first: int, last: int) -> None:
    for step in range(first, last + 1):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, tokens(accelerator.process_index % 2, step)))
            optimizer.step()
            optimizer.zero_grad()
            average.update()


def start(kind: str, early: bool, **settings: Any) -> tuple[Accelerator, Any, Any, ExponentialMovingAverage]:
    accelerator = accelerate(kind)
    model: Any = Model()
    settings = {"decay": 0.5, "update_after": 1, **settings}
    average = ExponentialMovingAverage(model, **settings) if early else None
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return accelerator, model, optimizer, average or ExponentialMovingAverage(model, **settings)


def averaged(kind: str, early: bool, every: int) -> tuple[dict[str, Tensor], Any, list[bool]]:
    accelerator, model, optimizer, average = start(kind, early, update_every=every)
    train(accelerator, model, optimizer, average, 1, STEPS)
    own = accelerator.unwrap_model(model)
    local = [each.to_local() if hasattr(each, "to_local") else each for each in own.parameters()]
    before = [each.clone() for each in [*local, own.seen]]
    with average.swapped() as inside, torch.no_grad():
        assert inside is own
        model(tokens(0, 0))  # leaves parts of it whole; the buffer changes
        with accelerator.gathered(model) as whole:
            found = {name: value.clone() for name, value in whole.named_parameters() if value.requires_grad}
        model(tokens(0, 0))
    with pytest.raises(ValueError, match="mine"), average.swapped():
        raise ValueError("mine")
    same = [torch.equal(one, other) for one, other in zip(before, [*local, own.seen], strict=True)]
    with torch.no_grad():
        after = model(tokens(0, 0)).float()
    with accelerator.gathered(model) as whole, torch.no_grad():
        torch.testing.assert_close(whole(tokens(0, 0)).float(), after)
    return found, average.whole_state_dict(), same


@pytest.mark.parametrize(
    ("kind", "early", "every"),
    [
        ("sharded", False, 1),
        ("sharded", True, 2),
        ("replicated", False, 1),
        ("replicated", True, 1),
        ("copies", True, 1),
        ("offloaded", False, 1),
        ("recomputed", True, 1),
    ],
)
def test_the_average_of_a_run(kind, early, every):
    expected = by_hand(2, STEPS, every=every)
    for rank, (found, state, same) in enumerate(run_ranks(averaged, ranks_of(kind), kind, early, every)):
        assert all(same)
        assert found.keys() == expected.keys()
        assert "body.layers.0.up.weight" not in found
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert state["steps"] == STEPS
        if rank == 0 or kind == "replicated":
            assert all(torch.equal(state["averages"][name], value) for name, value in found.items())
        else:
            assert state["averages"] == {}
        last = max(step for step in range(1, STEPS + 1) if step == 1 or (step - 1) % every == 0)
        assert state["buffers"] == {"seen": torch.tensor(last)}


def in_half() -> tuple[set[torch.dtype], float, bool]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8).bfloat16()
    average = ExponentialMovingAverage(model, 0.999, warmup=False)
    expected = model.weight.detach().double()
    for step in range(200):
        with torch.no_grad():
            model.weight.copy_(torch.randn(8, 8, generator=torch.Generator().manual_seed(step)))
        average.update()
        expected = 0.999 * expected + 0.001 * model.weight.detach().double()
    found = average.state_dict()["averages"]
    before = model.weight.detach().clone()
    with average.swapped():
        swapped = torch.equal(model.weight, found["weight"].bfloat16())
    same = torch.equal(before, model.weight)
    return {each.dtype for each in found.values()}, (found["weight"] - expected).abs().max().item(), swapped and same


def test_a_model_in_half_precision_has_an_average_in_full():
    dtypes, error, same = in_half()
    assert dtypes == {torch.float32}
    assert error < 1e-6  # bf16 would lose every one of these steps
    assert same


def counts() -> tuple[dict[str, int], int]:
    from torch.distributed.tensor.debug import CommDebugMode

    accelerator, model, optimizer, average = start("sharded", early=False, update_after=0)
    train(accelerator, model, optimizer, average, 1, 2)
    with Operations() as operations:
        average.update()
    with CommDebugMode() as collectives:
        average.update()
    return operations.names, collectives.get_total_counts()


def test_an_update_is_one_operation_without_collectives():
    for operations, collectives in run_ranks(counts, 2):
        assert collectives == 0
        work = {name: count for name, count in operations.items() if not name.startswith("aten.view")}
        assert work == {"aten._foreach_lerp_.Scalar": 1, "aten._foreach_copy_.default": 1}


def saved(folder: Path, resume: int | None, kind: str) -> tuple[dict[str, Tensor], int]:
    accelerator, model, optimizer, average = start(kind, early=False)
    accelerator.register_for_checkpointing(average)
    if resume is None:
        train(accelerator, model, optimizer, average, 1, 2)
        accelerator.save_state(folder)
    else:
        accelerator.load_state(folder)
        assert average.steps == 2
    train(accelerator, model, optimizer, average, 3, STEPS)
    with average.swapped(), accelerator.gathered(model) as whole:
        return {name: value.clone() for name, value in whole.named_parameters()}, average.steps


def test_saving_and_resuming(tmp_path):
    went_on = run_ranks(saved, 2, tmp_path / "run", None, "sharded")
    for found, steps in run_ranks(saved, 2, tmp_path / "run", 2, "sharded"):
        assert steps == STEPS
        assert all(torch.equal(value, went_on[0][0][name]) for name, value in found.items())
    for found, _ in run_ranks(saved, 4, tmp_path / "run", 2, "sharded"):  # the same batches twice
        torch.testing.assert_close(found, went_on[0][0], rtol=1e-4, atol=1e-5)


def by_torch(folder: Path, load: bool) -> dict[str, Tensor]:
    import torch.distributed.checkpoint as dcp

    accelerator, model, optimizer, average = start("sharded", early=False)
    if load:
        state = average.state_dict()
        dcp.load(state, checkpoint_id=folder)
        average.load_state_dict(state)
    else:
        train(accelerator, model, optimizer, average, 1, STEPS)
        dcp.save(average.state_dict(), checkpoint_id=folder)
    return average.whole_state_dict()["averages"]


@pytest.mark.filterwarnings("ignore")
def test_torch_saves_the_shards_and_divides_them_anew(tmp_path):
    saved = run_ranks(by_torch, 2, tmp_path / "shards", False)[0]
    found = run_ranks(by_torch, 3, tmp_path / "shards", True)[0]
    assert all(torch.equal(value, saved[name]) for name, value in found.items())


def copied() -> list[bool]:
    accelerator, model, optimizer, average = start("sharded", early=False)
    train(accelerator, model, optimizer, average, 1, STEPS)
    plain, other = Model(), accelerator.prepare(Model())
    for target in (plain, other, model):
        average.copy_to(target)
    with average.swapped(), accelerator.gathered(model) as whole:
        expected = {name: value.clone() for name, value in whole.state_dict().items() if "layers.0.up" not in name}
    found = []
    for target in (plain, other, model):
        with accelerator.gathered(target) as whole:
            found.append(all(torch.equal(whole.state_dict()[name], value) for name, value in expected.items()))
    return found


def test_copies():
    assert run_ranks(copied, 2) == [[True] * 3] * 2


def test_accumulation_counts_windows():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = accelerator.prepare(TinyMLP())
    average = ExponentialMovingAverage(model)
    updated = []
    for _ in range(6):
        with accelerator.accumulate(model):
            updated.append(average.update())
    assert updated == [False, False, True, False, False, True]
    assert average.steps == 2


def test_the_decay_grows_at_first():
    average = ExponentialMovingAverage(TinyMLP(), 0.9, update_after=2, update_every=5)
    assert [average.decay_at(step) for step in (1, 2, 7, 12)] == [0, 0, 2 / 11, 3 / 12]
    assert average.decay_at(100_000) == 0.9
    assert ExponentialMovingAverage(TinyMLP(), 0.9, warmup=False).decay_at(1) == 0.9


def test_compiled_models_have_plain_names():
    average = ExponentialMovingAverage(torch.compile(TinyMLP(), backend="eager"))  # type: ignore[arg-type]
    assert list(average.state_dict()["averages"]) == [name for name, _ in TinyMLP().named_parameters()]


def test_errors():
    model = TinyMLP()
    for settings, text in (
        ({"decay": 1.5}, "decay=1.5: it must be from 0 to 1"),
        ({"update_every": 0}, "update_every=0"),
    ):
        with pytest.raises(ValueError, match=text):
            ExponentialMovingAverage(model, **settings)
    with pytest.raises(ValueError, match="trains no parameter"):
        ExponentialMovingAverage(copy.deepcopy(model).requires_grad_(False))
    with pytest.raises(ValueError, match="without values, on the meta device"):
        ExponentialMovingAverage(copy.deepcopy(model).to("meta"))
    average = ExponentialMovingAverage(model)
    with average.swapped(), pytest.raises(RuntimeError, match=r"update inside `with average\.swapped"):
        average.update()
    state = average.state_dict()
    with pytest.raises(ValueError, match=r"down.weight has the shape \[1, 16\], but \[1, 4\] in the saved average"):
        average.load_state_dict({**state, "averages": {**state["averages"], "down.weight": torch.ones(1, 4)}})
    with pytest.raises(ValueError, match=r"There is no up\.weight, up\.bias, down\.weight, and 1 more in Linear"):
        average.copy_to(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="has more, which TinyMLP does not train"):
        average.load_state_dict({**state, "averages": {**state["averages"], "more": torch.ones(1)}})

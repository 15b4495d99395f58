"""Ranks that go different ways through a sharded model are told so, before wrong numbers are used."""

import logging
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten import Accelerator, FullyShardedDataParallelPlugin
from hasten.parallel import alike
from hasten.world.agreement import DistributedOperationException
from tests.parallel.test_units import Language
from tests.ranks import run_ranks

TOKENS = torch.arange(6).view(2, 3)


class Skipping(Language):
    """Leaves a layer out, where it is told to; runs parts of itself outside of `forward`."""

    left_out: int | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            hidden = hidden if number == self.left_out else layer(hidden)
        return self.head(self.norm(hidden))

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)


def accelerator(**fields: Any) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"], **fields)
    return Accelerator(cpu=True, fsdp_plugin=plugin)


def prepared(one: Accelerator, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Skipping(**options)
    return one.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def step(one: Accelerator, model: Any, optimizer: Any) -> float:
    loss = model(TOKENS).square().mean()
    one.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


# ---- passes ----


def skipped(left_out: int, late: bool) -> tuple[str, bool]:
    one = accelerator(activation_checkpointing=True)
    model, optimizer = prepared(one)
    for _ in range(5 if late else 1):
        step(one, model, optimizer)
    before = [each.to_local().clone() for each in model.parameters()]
    model.left_out = left_out if one.process_index == 1 else None
    with pytest.raises(DistributedOperationException) as caught:
        step(one, model, optimizer)
    kept = all(torch.equal(a, b.to_local()) for a, b in zip(before, model.parameters(), strict=True))
    return str(caught.value), kept


def differing(saves: bool, folder: str) -> tuple[str, int]:
    """Late in a run, each rank leaves out another layer: what is gathered in its place fits."""
    one = accelerator()
    model, optimizer = prepared(one)
    for _ in range(4):
        step(one, model, optimizer)
    model.left_out = one.process_index
    for steps in range(1, 20):
        try:
            step(one, model, optimizer)
            if saves:
                one.save_state(folder)
        except DistributedOperationException as error:
            return str(error), steps
    return "", 0


@pytest.mark.parametrize(("left_out", "instead"), [(0, "layers.1"), (1, "norm")])
@pytest.mark.parametrize("debug", [False, True])
def test_ranks_agree_on_every_unit(left_out: int, instead: str, debug: bool) -> None:
    env = {"ACCELERATE_DEBUG_MODE": "true"} if debug else {}
    for text, kept in run_ranks(skipped, 2, left_out, debug, env=env):
        assert kept
        assert f"rank 0: forward(unit='layers.{left_out}') at test_alike.py:" in text
        assert f"rank 1: forward(unit='{instead}')" in text
        assert "All processes must run the same layers" in text


@pytest.mark.parametrize("saves", [False, True])
def test_later_passes_are_compared_now_and_then_and_before_a_save(saves: bool, tmp_path: Path) -> None:
    for rank, (text, steps) in enumerate(run_ranks(differing, 2, saves, str(tmp_path / "ck"))):
        assert steps == (1 if saves else 4)
        assert text.startswith("rank 0 and rank 1 went different ways through Skipping")
        assert f"Rank {rank} gathered embedding, layers.{1 - rank}, norm + head" in text
        assert "results of the last 8 passes are wrong" in text
    assert not (tmp_path / "ck").exists()


def counted() -> list[int]:
    one = accelerator()
    model, optimizer = prepared(one)
    counts = []
    original = {name: getattr(dist, name) for name in ("all_gather_single", "all_to_all_single") if hasattr(dist, name)}
    calls: Counter[str] = Counter()

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original[name](*args, **kwargs)

        return call

    for name in original:
        setattr(dist, name, counting(name))
    try:
        for _ in range(9):
            calls.clear()
            step(one, model, optimizer)
            counts.append(sum(calls.values()))
    finally:
        for name, function in original.items():
            setattr(dist, name, function)
    return counts


def test_some_later_passes_have_one_small_exchange_more() -> None:
    gathers = 4 + 3  # of units: forward, and backward but for the last, which stays
    for counts in run_ranks(counted, 2):
        assert counts[:4] == [gathers + 5] * 4  # each unit, and the end
        assert counts[4:] == [gathers] * 3 + [gathers + 1, gathers]


def evaluated() -> list[float]:
    one = accelerator()
    model, optimizer = prepared(one)
    found = []
    for _ in range(3):
        found.append(step(one, model, optimizer))
        with torch.no_grad():
            found.append(float(model(TOKENS).square().mean()))
    return found


def test_passes_with_and_without_gradients() -> None:
    torch.manual_seed(0)
    model = Skipping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for _ in range(3):
        loss = model(TOKENS).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected += [float(loss.detach()), float(model(TOKENS).detach().square().mean())]
    for found in run_ranks(evaluated, 3):
        assert found == pytest.approx(expected, abs=1e-5)


# ---- parts of a model by themselves ----


def embeds(tied: bool, registered: bool) -> Any:
    one = accelerator()
    model, optimizer = prepared(one, tied=tied)
    if registered:
        one.register_forward_method(model, "embed")
    try:
        with torch.no_grad():
            value = model.embed(TOKENS).sum()
        loss = step(one, model, optimizer)
        with torch.no_grad():
            later = model.embed(TOKENS).sum()
        return [float(value), loss, float(later), step(one, model, optimizer)]
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(("tied", "registered"), [(False, False), (False, True), (True, True)])
def test_a_part_runs_before_the_model_and_follows_its_updates(tied: bool, registered: bool) -> None:
    torch.manual_seed(0)
    model = Skipping(tied=tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for _ in range(2):
        expected.append(float(model.embed(TOKENS).detach().sum()))
        loss = model(TOKENS).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    for found in run_ranks(embeds, 2, tied, registered):
        assert found == pytest.approx(expected, abs=1e-5)


def test_a_part_that_is_gathered_with_others_says_what_to_do() -> None:
    for text in run_ranks(embeds, 2, True, False):
        assert text.startswith("'embedding' of Skipping was called outside of a forward pass of the model")
        assert "gathered together with 'norm', 'head'" in text
        assert "accelerator.register_forward_method(model" in text


# ---- errors of a backend ----


def errors() -> list[str]:
    one = accelerator()
    model, optimizer = prepared(one)
    step(one, model, optimizer)
    texts = []
    for text in ("[gloo] Timed out waiting 10ms for recv", "a number of ours"):
        error = RuntimeError(text)
        one._session.engine.locate(error)
        texts.append(str(error))

    def fail(*_: Any) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]")

    handle = model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError) as caught:
        model(TOKENS)
    handle.remove()
    texts.append(str(caught.value))
    step(one, model, optimizer)  # and the next pass is one like the others
    return texts


def test_an_error_of_the_backend_says_where_the_model_was() -> None:
    for rank, (first, second, third) in enumerate(run_ranks(errors, 2)):
        assert f"\nOf Skipping rank {rank} had last gathered norm + head. If others went" in first
        assert second == "a number of ours"
        assert f"rank {rank} had last gathered layers.0" in third or "had last gathered layers.1" in third


def test_a_model_that_is_not_sharded_has_no_passes() -> None:
    assert isinstance(alike.inside(nn.Linear(1, 1)), nullcontext)


# ---- plans ----


def different_plans() -> str:
    rank = dist.get_rank()
    one = accelerator() if rank == 0 else Accelerator(cpu=True)
    with pytest.raises(DistributedOperationException) as caught:
        one.prepare(nn.Linear(3, 3))
    return str(caught.value)


def test_ranks_that_prepare_in_different_ways() -> None:
    for text in run_ranks(different_plans, 2):
        assert "rank 0: prepare(engine='shard')" in text
        assert "rank 1: prepare(engine='replicate')" in text


def strangers(shards: bool) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hasten.training.strangers").addHandler(handler)
    one = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin() if shards else None)
    model, other = nn.Linear(3, 3), nn.Linear(3, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    model, optimizer = one.prepare(model, optimizer)
    for _ in range(2):
        one.backward(other(model(torch.ones(1, 3))).sum())
        optimizer.step()
    logging.getLogger("hasten.training.strangers").removeHandler(handler)
    return messages


@pytest.mark.parametrize("shards", [False, True])
def test_parameters_of_a_model_that_nobody_prepared_are_named_once(shards: bool) -> None:
    first, second = run_ranks(strangers, 2, shards)
    assert len(first) == 1
    assert first[0].startswith("2 of the 4 parameters that SGD updates (of shapes (2, 3), (2,)) are in no model")
    assert second == []

"""Sharded models generate what whole ones do, also where ranks end at different words."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.extras.models import FAMILIES, LIMIT, adamw, loss_of, seeded, sharding, tokens, train
from tests.ranks import run_ranks

WORDS = 8


def answer(model: Any, rank: int, words: int) -> list[list[int]]:
    """Answer greedily, with the cache of keys and values that generating uses by default."""
    model.eval()
    prompt = tokens(rank, 0)
    with torch.no_grad():
        return model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=words
        ).tolist()


def generated(name: str, words: tuple[int, int], first: bool) -> tuple[list[list[int]], int, list[float]]:
    accelerator = sharding()
    rank = accelerator.process_index
    model = seeded(FAMILIES[name])
    optimizer: Any = adamw(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    if not first:
        train(accelerator, model, optimizer, steps=2)
    passes: list[int] = []
    counting = model.register_forward_hook(lambda *_: passes.append(1))
    found = answer(model, rank, words[rank])
    counting.remove()
    model.train()
    return found, len(passes), train(accelerator, model, optimizer, steps=2)


def expected(name: str, first: bool) -> tuple[list[Any], list[float]]:
    model = seeded(FAMILIES[name])
    optimizer = adamw(model)

    def step(number: int) -> float:
        losses = [loss_of(model, tokens(rank, number)) / 2 for rank in range(2)]
        sum(losses, torch.zeros(())).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return sum(each.item() for each in losses)

    if not first:
        step(0), step(1)
    found = [answer(model, rank, WORDS) for rank in range(2)]
    model.train()
    return found, [step(0), step(1)]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("first", [True, False], ids=["first", "trained"])
@pytest.mark.parametrize("words", [(WORDS, WORDS), (WORDS, 3)], ids=["even", "uneven"])
def test_generation(name, first, words):
    whole, losses = expected(name, first)
    results = run_ranks(generated, 2, name, words, first, timeout=LIMIT)
    for rank, (found, passes, after) in enumerate(results):
        length = len(found[0])
        assert found == [line[:length] for line in whole[rank]]
        assert passes == results[0][1]  # the one that has ended takes part all the same
        assert after == pytest.approx(losses, rel=1e-5, abs=1e-5)
    assert len(results[0][0][0]) - len(results[1][0][0]) == words[0] - words[1]

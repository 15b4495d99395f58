from typing import Any

import pytest
import torch
from torch import Tensor

from hasten import Accelerator
from tests.parallel.test_gathered import accelerate
from tests.parallel.test_shard import tokens
from tests.parallel.test_units import Language
from tests.ranks import run_ranks

STEPS = 3


class Encoder(Language):
    """A model that is trained by another method than forward."""

    def encode(self, tokens: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        """What the layers make of tokens; calls a module of each kind, and a weight itself."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return {"hidden": scale * self.norm(hidden), "logits": self.head(self.norm(hidden))}

    def score(self, tokens: Tensor) -> Tensor:
        """Runs forward as well."""
        return self(tokens).mean() + self.encode(tokens)["hidden"].square().mean()


def encoder(tied: bool) -> Encoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Encoder(2, tied, width=8)


def loss_of(model: Any, batch: Tensor, name: str) -> Tensor:
    if name == "score":
        return model.score(batch)
    found = model.encode(batch, scale=2.0)
    return found["hidden"].square().mean() + found["logits"].square().mean()


def trained(kind: str, name: str, tied: bool) -> dict[str, Tensor]:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16") if kind == "replicated bf16" else accelerate(kind)
    model = encoder(tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_forward_method(model, name)
    accelerator.register_forward_method(model, name)  # a second time changes nothing
    if name == "score":
        accelerator.register_forward_method(model, "encode")
    for step in range(STEPS):
        for micro in range(2):
            with accelerator.accumulate(model) if micro else accelerator.no_sync(model):
                accelerator.backward(loss_of(model, tokens(accelerator.process_index, step, micro), name) / 2)
        optimizer.step()
        optimizer.zero_grad()
    with accelerator.gathered(model) as whole:
        return {key: value.clone() for key, value in whole.state_dict().items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("sharded", "encode"),
        ("sharded", "score"),
        ("recomputed", "encode"),
        ("replicated", "encode"),
        ("whole", "encode"),
    ],
)
def test_training_by_another_method_is_that_of_one_process(kind, name, tied):
    model = encoder(tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        for rank in range(2):
            for micro in range(2):
                (loss_of(model, tokens(rank, step, micro), name) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(trained, 2, kind, name, tied):
        torch.testing.assert_close(found, dict(model.state_dict()), rtol=1e-4, atol=1e-5)


def formats(kind: str) -> list[torch.dtype]:
    mixed = kind == "replicated bf16"
    accelerator = Accelerator(cpu=True, mixed_precision="bf16") if mixed else accelerate(kind)
    model = accelerator.prepare(encoder(False))
    seen: list[torch.dtype] = []
    accelerator.unwrap_model(model).layers[0].up.register_forward_hook(lambda *each: seen.append(each[-1].dtype))
    accelerator.register_forward_method(model, "encode")
    model.encode(tokens(0, 0))
    return seen


@pytest.mark.parametrize("kind", ["bf16", "replicated bf16"])
def test_a_method_runs_in_the_precision_of_forward(kind):
    assert run_ranks(formats, 2, kind) == [[torch.bfloat16]] * 2
    if kind != "bf16":
        assert run_ranks(formats, 1, kind) == [[torch.bfloat16]]


def parts() -> list[str]:
    accelerator = accelerate()
    model = accelerator.prepare(encoder(False))
    accelerator.register_forward_method(model.layers[0], "extra_repr")  # any method will do
    assert isinstance(model.layers[0].extra_repr(), str)
    assert model(tokens(0, 0)).shape == (2, 5, 10)  # the model is still the root
    texts = []
    for module, name in ((model, "nothing"), (model.layers[0].up, "forward")):
        with pytest.raises(ValueError, match="register_forward_method") as caught:
            accelerator.register_forward_method(module, name)
        texts.append(str(caught.value))
    return texts


def test_errors():
    for unknown, within in run_ranks(parts, 2):
        assert "has no method 'nothing'" in unknown
        assert "its parameters (weight, ...) are gathered together with others" in within


def inside(kind: str) -> tuple[Tensor, Tensor]:
    accelerator = accelerate(kind)
    model = accelerator.prepare(encoder(True))
    accelerator.register_forward_method(model, "encode")
    with accelerator.gathered(model) as whole, torch.no_grad():
        first = whole.encode(tokens(0, 0))["logits"]
        assert type(whole.head.weight) is torch.nn.Parameter
    with torch.no_grad():
        return first, model.encode(tokens(0, 0))["logits"]


@pytest.mark.parametrize("kind", ["sharded", "replicated"])
def test_a_method_of_a_whole_model(kind):
    with torch.no_grad():
        expected = encoder(True).encode(tokens(0, 0))["logits"]
    for found in run_ranks(inside, 2, kind):
        torch.testing.assert_close(found, (expected, expected))

"""Parity of sharded training with an unsharded fp32 process: kinds of models x recomputation x precision x accumulation x ranks."""

import functools
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from hasten import Accelerator
from hasten.parallel.fsdp import FullyShardedDataParallelPlugin
from tests.ranks import run_ranks

STEPS, BATCH, LENGTH = 3, 2, 5
VOCABULARY, WIDTH, HEADS, INNER = 31, 12, 3, 17  # on 2 and on 4 ranks some shards are shorter than others


class Block(nn.Module):
    """Causal attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attend(self.before(hidden))
        return hidden + self.down(functional.gelu(self.up(self.between(hidden))))

    def attend(self, normed: Tensor, **mask: Any) -> Tensor:
        batch, length, _ = normed.shape
        parts = self.qkv(normed).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts, **(mask or {"is_causal": True}))
        return self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))


class Buffered(Block):
    """With a mask that is not saved, a scale that is, and statistics that change in place and by assignment."""

    mask: Tensor
    scale: Tensor
    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), persistent=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def attend(self, normed: Tensor, **mask: Any) -> Tensor:
        if self.training:
            self.count += 1
            self.mean = self.mean.lerp(normed.detach().float().mean((0, 1)), 0.1)
        return super().attend(normed * self.scale.to(normed.dtype), attn_mask=self.mask)


class Language(nn.Module):
    def __init__(self, tied: bool = False, layer: type[Block] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) / 10)  # held by the model itself
        self.layers = nn.ModuleList([layer(), layer()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.positions
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


class Adapted(nn.Module):
    """A linear layer that stays, and a product of two small matrices that is trained beside it."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + self.up(self.down(inputs))


class Wide(nn.Module):
    """A layer that computes in its own format, and answers in that of its input."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner.to(dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs.to(next(self.inner.parameters()).dtype)).to(inputs.dtype)


class Stored(nn.Linear):
    """A linear layer that is kept in a small format, and computes in that of its input."""

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.linear(inputs, self.weight.to(inputs.dtype), self.bias.to(inputs.dtype))


def build(kind: str) -> Language:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Language(kind == "tied", Buffered if kind == "buffers" else Block)
        if kind == "lora":
            model.requires_grad_(False)
            for layer in model.layers:
                layer.qkv, layer.up = Adapted(layer.qkv), Adapted(layer.up)
    if kind == "frozen":
        model.embedding.requires_grad_(False)
        model.layers[0].requires_grad_(False)
        model.layers[1].down.weight.requires_grad_(False)
        model.norm.bias.requires_grad_(False)
    if kind == "mixed dtypes":
        model.layers[0].between = Wide(model.layers[0].between, torch.float64)
        model.layers[1].up = Wide(model.layers[1].up, torch.float64)
        model.norm = Wide(model.norm, torch.float64)
        model.layers[1].down.requires_grad_(False).to(torch.bfloat16).__class__ = Stored
    return model


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    trained = [each for each in model.parameters() if each.requires_grad]
    if kind == "adagrad":
        return torch.optim.Adagrad(trained, lr=0.03, initial_accumulator_value=0.1)
    if kind == "groups":
        matrices, vectors = ([each for each in trained if (each.dim() > 1) is wanted] for wanted in (True, False))
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.05}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(trained, lr=0.01, eps=1e-3)  # rounding of small gradients must not be blown up


@functools.cache
def tokens(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch)[:, :-1].reshape(-1, VOCABULARY).float()
    return functional.cross_entropy(logits, batch[:, 1:].reshape(-1))


@dataclass
class Course:
    """What a run was like: the loss of each micro-batch, the gradients before each step, and what was there in the end."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def whole(tensor: Any) -> Tensor:
    full: Tensor = tensor.detach()
    return (full.full_tensor() if isinstance(full, DTensor) else full).clone()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}


def end_of(model: nn.Module, losses: list[float], gradients: list[dict[str, Tensor]]) -> Course:
    parameters = {name: whole(each) for name, each in model.named_parameters()}
    return Course(losses, gradients, parameters, {name: each.clone() for name, each in model.named_buffers()})


class Cell(NamedTuple):
    ranks: int
    kind: str
    recomputation: str
    precision: str
    micro: int


AXES: tuple[tuple[Any, ...], ...] = (
    (2, 4),
    ("plain", "tied", "lora", "frozen", "buffers", "mixed dtypes", "adagrad", "groups"),
    ("keep", "recompute", "offload"),
    ("no", "bf16"),
    (1, 3),
)
CELLS = [Cell(*values) for values in itertools.product(*AXES)]
RECOMPUTATIONS = {
    "keep": {},
    "recompute": {"activation_checkpointing": True},
    "offload": {"activation_checkpointing": True, "activation_checkpointing_offload": True},
}


def pairs_of(cell: Cell) -> set[Any]:
    return set(itertools.combinations(enumerate(cell), 2))


def pairwise() -> list[Cell]:
    """Few cells in which each two values of different axes meet: the next one always brings the most new pairs."""
    missing = set().union(*map(pairs_of, CELLS))
    chosen = []
    while missing:
        chosen.append(max(CELLS, key=lambda cell: len(pairs_of(cell) & missing)))
        missing -= pairs_of(chosen[-1])
    return chosen


@functools.cache
def plain(ranks: int, kind: str, micro: int) -> Course:
    """The unsharded model in fp32, in this process, with the batches of all ranks."""
    model = build(kind)
    optimizer = optimizer_of(kind, model)
    losses: list[float] = []
    gradients = []
    for step in range(STEPS):
        for index in range(micro):
            found = [loss_of(model, tokens(step, index, rank)) for rank in range(ranks)]
            losses.append(sum(loss.item() for loss in found) / ranks)
            (sum(found, torch.zeros(())) / (ranks * micro)).backward()
        gradients.append(gradients_of(model))
        optimizer.step()
        optimizer.zero_grad()
    return end_of(model, losses, gradients)


def sharded(cell: Cell) -> Course:
    """One cell, with an Accelerator of its own."""
    plugin = FullyShardedDataParallelPlugin(
        transformer_cls_names_to_wrap=["Block"], **RECOMPUTATIONS[cell.recomputation]
    )
    accelerator = Accelerator(
        cpu=True, mixed_precision=cell.precision, fsdp_plugin=plugin, gradient_accumulation_steps=cell.micro
    )
    model: Any = build(cell.kind)
    model, optimizer = accelerator.prepare(model, optimizer_of(cell.kind, model))
    assert all(isinstance(each, DTensor) for each in model.parameters())
    losses = []
    gradients = []
    for step in range(STEPS):
        for index in range(cell.micro):
            with accelerator.accumulate(model):
                loss = loss_of(model, tokens(step, index, accelerator.process_index))
                accelerator.backward(loss)
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
                if accelerator.sync_gradients:
                    gradients.append(gradients_of(model))
                optimizer.step()
                optimizer.zero_grad()
    if cell.kind == "tied":
        assert model.head.weight is model.embedding.weight
    return end_of(model, losses, gradients)


def several(cells: list[Cell]) -> list[Course]:
    from hasten.world.context import reset

    courses = []
    for cell in cells:
        courses.append(sharded(cell))
        reset()  # the next one has another precision
    return courses


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest of the relative differences of tensors of the same name, by their norms."""
    assert found.keys() == expected.keys()
    scale = max(each.double().norm() for each in expected.values())  # none of them may be lost beside rounding
    return max(
        ((found[name].double() - each.double()).norm() / torch.maximum(each.double().norm(), scale / 10)).item()
        for name, each in expected.items()
    )


def check(cell: Cell, found: Course) -> None:
    expected = plain(cell.ranks, cell.kind, cell.micro)
    exact = cell.precision == "no"
    limit = 1e-5 if exact else 2e-2
    assert found.losses == pytest.approx(expected.losses, rel=limit)
    for step, (own, right) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        assert difference(own, right) <= limit, (cell, step)
    assert difference(found.parameters, expected.parameters) <= limit, cell
    if exact:
        for name, value in expected.buffers.items():
            if "mean" not in name and "count" not in name:
                assert torch.equal(found.buffers[name], value), (cell, name)


def check_running(cell: Cell, rank: int, found: Course) -> None:
    """Each rank has seen its own batches once, also where layers run again."""
    mean = torch.zeros(WIDTH)
    embedding, positions = build("buffers").embedding.weight, build("buffers").positions
    for step, micro in itertools.product(range(STEPS), range(cell.micro)):
        hidden = functional.layer_norm(embedding[tokens(step, micro, rank)] + positions, (WIDTH,))
        mean = mean.lerp(hidden.detach().mean((0, 1)), 0.1)
    assert [int(found.buffers[f"layers.{index}.count"]) for index in (0, 1)] == [STEPS * cell.micro] * 2
    torch.testing.assert_close(found.buffers["layers.0.mean"], mean, rtol=0.0, atol=0.1)  # the embedding is trained


@pytest.mark.parametrize("which", ["pairs", pytest.param("the others", marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", AXES[1])
@pytest.mark.parametrize("ranks", AXES[0])
def test_training_is_that_of_one_whole_process(ranks, kind, which):
    pairs = pairwise()
    cells = [cell for cell in CELLS if cell[:2] == (ranks, kind) and (cell in pairs) is (which == "pairs")]
    results = run_ranks(several, ranks, cells, timeout=120) if cells else []
    for rank, found in enumerate(results):
        for cell, course in zip(cells, found, strict=True):
            check(cell, course)
            if kind == "buffers":
                check_running(cell, rank, course)


def test_few_cells_hold_every_pair():
    chosen = pairwise()
    assert len(CELLS) == 192
    assert len(chosen) <= 28
    assert set().union(*map(pairs_of, chosen)) == set().union(*map(pairs_of, CELLS))

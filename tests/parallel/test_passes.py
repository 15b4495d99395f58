"""Models and loops out of the ordinary: each trains, sharded, as it does in one process, or is refused before it begins."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hasten import Accelerator
from hasten.parallel import passes
from hasten.parallel.fsdp import FullyShardedDataParallelPlugin
from tests.parallel.test_units import Language
from tests.ranks import run_ranks

WIDTH, STEPS = 6, 3


def data(rank: int, step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(17 * step + rank))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH + 1), nn.Linear(WIDTH + 1, WIDTH)

    def forward(self, inputs: Any) -> Any:
        return inputs + self.down(self.up(inputs).relu())


class Net(nn.Module):
    """A layer, three blocks that `call` runs, and another layer."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList([block(), block(), block()])

    def call(self, index: int, inputs: Tensor) -> Tensor:
        return self.layers[index](inputs)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for index in range(len(self.layers)):
            hidden = self.call(index, hidden)
        return self.last(hidden)


def usual(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(data(rank, step)).square().mean()


# ---- results that torch does not find ----


@dataclasses.dataclass
class Result:
    hidden: Tensor


class Opaque:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Answering(Net):
    """Blocks answer with an object."""

    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        class Wrapping(Block):
            def forward(self, inputs: Tensor) -> Any:
                return kind(super().forward(inputs))

        super().__init__(Wrapping)

    def call(self, index: int, inputs: Tensor) -> Tensor:
        return self.layers[index](inputs).hidden


class Handing(Block):
    def forward(self, inputs: tuple[Tensor, list[Tensor]]) -> None:
        inputs[1].append(super().forward(inputs[0]))


class Handed(Net):
    """Blocks put their result into a list, and return nothing."""

    def call(self, index: int, inputs: Tensor) -> Tensor:
        box: list[Tensor] = []
        self.layers[index]((inputs, box))
        return box[0]


class InPlace(Net):
    """What layers return is changed in place."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs[None])
        for layer in self.layers:
            hidden = layer(hidden)
            hidden += 1
        return self.last(hidden) + 1


class Row(nn.Linear):
    """A layer that is nothing but a matrix and a bias: what it returns is a view."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


# ---- parameters of unusual kinds, in unusual places ----


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * (inputs * self.by).real


class Numbers(Block):
    """Parameters without dimensions, without elements, and complex ones."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(3, 0))
        self.turn = Turn()

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * (self.scale + self.nothing.sum()) + self.turn(inputs)


class Lists(nn.Module):
    """Blocks within containers within containers, and containers of parameters beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {"a": nn.ModuleList([Block(), nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH), Block())])}
        )
        self.list = nn.ParameterList([torch.randn(WIDTH), torch.randn(WIDTH)])
        self.names = nn.ParameterDict({"scale": nn.Parameter(torch.randn(WIDTH))})

    def forward(self, inputs: Tensor) -> Tensor:
        for part in self.parts["a"]:
            inputs = part(inputs)
        return (inputs * self.list[0] + self.list[1]) * self.names["scale"]


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.weight_norm(self.up)


class Formats(Block):
    """One of its matrices is kept, and trained, in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.up.double()

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(self.up(inputs.double()).relu().float())


def transposed() -> Net:
    model = Net()
    model.first.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
    return model


# ---- what is shared ----


def same_block_twice() -> Net:
    model = Net()
    model.layers[2] = model.layers[0]
    return model


def module_of_two_layers() -> Net:
    model = Net()
    model.layers[2].up = model.layers[0].up
    return model


def tied_to_the_model() -> Net:
    model = Net()
    model.own = model.layers[1].up.weight
    return model


def all_layers_tied() -> Net:
    model = Net()
    for layer in model.layers[1:]:
        layer.up.weight, layer.down.weight = model.layers[0].up.weight, model.layers[0].down.weight
    return model


# ---- unusual loops ----


class Dropping(Net):
    step = 0

    def call(self, index: int, inputs: Tensor) -> Tensor:
        return super().call(index, inputs) if (index + self.step) % 3 else inputs


def dropping(model: Any, rank: int, step: int) -> Tensor:
    model.step = step
    return usual(model, rank, step)


def unused() -> Net:
    model = Net()
    model.never, model.layers[1].never = Block(), nn.Parameter(torch.randn(5))
    return model


def inference(model: nn.Module, rank: int, step: int) -> Tensor:
    model.eval()
    with torch.inference_mode():
        model(data(rank, 9))
        assert torch.is_inference_mode_enabled()
    assert not torch.is_inference_mode_enabled()
    model.train()
    return usual(model, rank, step)


def two_passes(model: nn.Module, rank: int, step: int) -> Tensor:
    return usual(model, rank, step) + usual(model, rank, step + 7)


def backward_twice(model: nn.Module, rank: int, step: int) -> Tensor:
    loss = usual(model, rank, step)
    loss.backward(retain_graph=True)
    return loss


def evaluated_before_the_step(model: nn.Module, rank: int, step: int) -> Tensor:
    loss = usual(model, rank, step)
    with torch.no_grad():
        model(data(rank, 60))
    loss.backward()
    with torch.no_grad():
        model(data(rank, 70))
    return loss.detach().requires_grad_()


def thawing(model: Any, rank: int, step: int) -> Tensor:
    model.layers[1].requires_grad_(step != 1)
    return usual(model, rank, step)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int, int], Tensor]]] = {
    "a dataclass": (lambda: Answering(Result), usual),
    "an object": (lambda: Answering(Opaque), usual),
    "nothing is returned": (lambda: Handed(Handing), usual),
    "results changed in place": (InPlace, usual),
    "views changed in place": (lambda: InPlace(Row), usual),
    "kinds of numbers": (lambda: Net(Numbers), usual),
    "containers": (Lists, usual),
    "normed weights": (lambda: Net(Normed), usual),
    "formats": (lambda: Net(Formats), usual),
    "transposed": (transposed, usual),
    "the same block twice": (same_block_twice, usual),
    "a module of two layers": (module_of_two_layers, usual),
    "tied to the model": (tied_to_the_model, usual),
    "all layers tied": (all_layers_tied, usual),
    "layers are left out": (Dropping, dropping),
    "unused": (unused, usual),
    "inference mode": (Net, inference),
    "two passes": (Net, two_passes),
    "backward twice": (Net, backward_twice),
    "evaluated before the step": (Net, evaluated_before_the_step),
    "frozen for a while": (Net, thawing),
}


def build(case: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CASES[case][0]()
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


Course = tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]


def whole(tensor: Any) -> Tensor:
    full: Tensor = tensor.detach()
    return full.full_tensor().clone() if hasattr(full, "full_tensor") else full.clone()


def train(case: str, model: nn.Module, optimizer: Any, ranks: range, backward: Callable[[Tensor], Any]) -> Course:
    losses: list[float] = []
    gradients = []
    for step in range(STEPS):
        total = 0.0
        for rank in ranks:
            loss = CASES[case][1](model, rank, step)
            backward(loss)
            total += loss.item() / len(ranks)
        losses.append(total)
        held = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        gradients.append({name: whole(each) / len(ranks) for name, each in held.items()})
        for each in held.values():
            each /= len(ranks)
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, {name: whole(each) for name, each in model.named_parameters()}


def sharded(cases: list[str], recompute: bool) -> list[Course]:
    from hasten.world.context import reset

    courses = []
    for case in cases:
        plugin = FullyShardedDataParallelPlugin(
            transformer_cls_names_to_wrap=["Row" if "views" in case else "Block"], activation_checkpointing=recompute
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model, optimizer = accelerator.prepare(*build(case))
        rank = accelerator.process_index
        losses, gradients, parameters = train(case, model, optimizer, range(rank, rank + 1), accelerator.backward)
        losses = [accelerator.reduce(torch.tensor(loss), "mean").item() for loss in losses]
        courses.append((losses, gradients, parameters))
        reset()
    return courses


@pytest.mark.parametrize(
    ("ranks", "recompute"),
    [(3, True), *(pytest.param(*each, marks=pytest.mark.full) for each in ((2, False), (2, True), (3, False)))],
)
def test_it_trains_as_in_one_process(ranks, recompute):
    cases = list(CASES)
    results = run_ranks(sharded, ranks, cases, recompute, timeout=120)
    for index, case in enumerate(cases):
        losses, gradients, parameters = train(case, *build(case), range(ranks), torch.Tensor.backward)
        for found in results:
            own = found[index]
            assert own[0] == pytest.approx(losses, rel=1e-5), case
            for one, other in zip(own[1], gradients, strict=True):
                assert one.keys() == other.keys(), case
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(own[2], parameters, rtol=1e-4, atol=1e-5)


def accumulated() -> tuple[float, float]:
    """The gradient of a parameter without dimensions: held back, then averaged."""
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"])
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = accelerator.prepare(Net(Numbers))
    rank = accelerator.process_index
    with accelerator.no_sync(model):
        accelerator.backward(usual(model, rank, 0))
    held = model.layers[0].scale.grad.item()
    accelerator.backward(usual(model, rank, 1))
    return held, model.layers[0].scale.grad.item()


def test_parameters_without_dimensions_are_averaged():
    (first, one), (second, other) = run_ranks(accumulated, 2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net(Numbers)
    for step in (0, 1):
        for rank in (0, 1):
            (usual(model, rank, step) / 2).backward()
    assert first != second
    assert one == other == pytest.approx(model.layers[0].scale.grad.item(), rel=1e-5)


class Encoding(Net):
    def encode(self, inputs: Tensor) -> Tensor:
        return self(inputs) @ self.last.weight  # which the model itself gathers


def without_gradients(inference: bool) -> list[str]:
    """What the parameters are after passes without gradients, before one with them."""
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"])
    )
    model: Any = accelerator.prepare(Encoding())
    accelerator.register_forward_method(model, "encode")
    mode = torch.inference_mode if inference else torch.no_grad
    kinds = []
    for run in (model.encode, model):
        with mode():
            assert not run(data(0, 0)).requires_grad
        kinds += sorted({type(each).__name__ for each in model.parameters()})
    accelerator.backward(usual(model, accelerator.process_index, 0))
    return kinds


@pytest.mark.parametrize("inference", [False, True])
def test_after_passes_without_gradients_parameters_are_shards(inference):
    assert run_ranks(without_gradients, 2, inference) == [["DTensor", "DTensor"]] * 2


class Words(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(7, WIDTH, **settings)


def hooked() -> Net:
    model = Net()
    model.layers[1].up.weight.register_hook(lambda gradient: gradient * 2)
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Words(sparse=True), r"'words' makes sparse gradients.*sparse=False"),
        (lambda: Words(max_norm=1.0), r"'words' limits the norms of its rows in place \(max_norm=1.0\)"),
        (hooked, r"'layers.1.up.weight' has hooks.*register_post_accumulate_grad_hook"),
    ],
)
def test_what_would_be_lost_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        passes.check(build())


def test_trained_parameters_that_are_left_out(caplog):
    model = Net()
    passes.warn_of_ignored(model, {*model.first.parameters()})
    passes.warn_of_ignored(model.requires_grad_(False), {*model.first.parameters()})
    (record,) = caplog.records
    assert "leaves out 2 trained parameters of Net ('first.weight', ...)" in record.getMessage()


def test_a_pattern_that_matches_nothing(caplog):
    found = FullyShardedDataParallelPlugin(ignored_modules="layer.0")
    assert found.ignored(Net()) == set()
    assert "ignored_modules='layer.0' matches the whole name of no module of Net." in caplog.text


def test_frozen_embeddings_may_do_as_they_like():
    passes.check(Words(max_norm=1.0).requires_grad_(False))


def test_what_a_linear_layer_answers_is_no_view():
    layer, inputs = nn.Linear(WIDTH, 3), torch.randn(2, 5, WIDTH)
    assert layer(inputs)._is_view()
    expected = layer(inputs)
    passes.answer_no_view(layer)
    assert not layer(inputs)._is_view()
    assert torch.equal(layer(inputs), expected)
    functional.mse_loss(layer(inputs), torch.zeros(2, 5, 3)).backward()
    assert layer.weight.grad is not None


# ---- ranks that go different ways ----


# ---- values ----


def without_values() -> str:
    plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"])
    one = Accelerator(cpu=True, fsdp_plugin=plugin)
    with torch.device("meta"):
        model = Language()
    model = one.prepare(model)
    with pytest.raises(RuntimeError) as caught:
        model(torch.zeros(2, 3, dtype=torch.long))
    return str(caught.value)


def test_a_model_without_values_says_how_it_gets_them() -> None:
    for text in run_ranks(without_values, 2):
        assert text.startswith("16 tensors of Language (embedding.weight, ...) are on the meta device")
        assert "accelerator.load_weights(model, path)" in text


def whole_state(tied: bool) -> tuple[bool, list[Any], str]:
    plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"])
    one = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(1)
    other = Language(tied=tied, width=5)
    torch.manual_seed(0)
    model = one.prepare(Language(tied=tied, width=5))
    state = other.state_dict()
    fits = model.load_state_dict(state)
    same = all(torch.equal(each.full_tensor(), state[name]) for name, each in model.named_parameters())
    assert all(type(each) is Tensor for each in state.values())  # the caller's is left alone
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict({**state, "norm.weight": torch.ones(3)})
    return same and (model.head.weight is model.embedding.weight) == tied, list(fits), str(caught.value)


@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_state_is_taken(tied: bool) -> None:
    for same, fits, text in run_ranks(whole_state, 3, tied):
        assert same
        assert fits == [[], []]
        assert "size mismatch for norm.weight" in text

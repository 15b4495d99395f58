"""What sharding must do to be accepted: layers run again, their inputs on the host, tied embeddings, models divided already.

Layers run again by a change of their class, without a wrapper: what other libraries call the set of checkpoint wrappers is
the set of `Recomputed` modules here, and names in state dicts are those of the plain model from the start.
"""

import copy
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from hasten import Accelerator
from hasten.parallel.fsdp import FullyShardedDataParallelPlugin
from hasten.parallel.recompute import Recomputed
from tests.ranks import run_ranks

VOCABULARY, WIDTH, BATCH, LENGTH, LAYERS = 12, 8, 2, 5, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.three(functional.gelu(self.two(functional.gelu(self.one(hidden)))))


class OwnNorm(nn.LayerNorm):
    """A norm of a class that nobody knows."""


class Toy(nn.Module):
    _no_split_modules: ClassVar = ["Block"]

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm = OwnNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.tied = tied
        self.tie_weights()

    def tie_weights(self) -> None:
        if self.tied:
            self.head.weight = self.embedding.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def toy(tied: bool = False) -> Toy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Toy(tied)


def tokens(rank: int) -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(rank))


def loss_of(model: nn.Module, rank: int) -> Tensor:
    batch = tokens(rank)
    return functional.cross_entropy(model(batch).reshape(-1, VOCABULARY), batch.roll(1, 1).reshape(-1))


def accelerator_of(**fields: Any) -> Accelerator:
    return Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **fields))


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in gradients.items()}


def plain_gradients(tied: bool, ranks: int = 2) -> dict[str, Tensor]:
    model = toy(tied)
    for rank in range(ranks):
        (loss_of(model, rank) / ranks).backward()
    return gradients_of(model)


# ---- layers run again as a whole ----


def run_again(tied: bool) -> dict[str, Any]:
    accelerator = accelerator_of(activation_checkpointing=True)
    model: Any = accelerator.prepare(toy(tied))
    again = [name for name, module in model.named_modules() if isinstance(module, Recomputed)]
    groups = {
        id(module._get_fsdp_state()): name for name, module in model.named_modules() if isinstance(module, FSDPModule)
    }
    calls: list[int] = []
    model.layers[0].register_forward_pre_hook(lambda module, inputs: calls.append(0))
    accelerator.backward(loss_of(model, accelerator.process_index))
    return {
        "again": again,
        "groups": sorted(groups.values()),
        "gradients": gradients_of(model),
        "calls": calls,
        "names": [name for name, _ in model.named_parameters()],
        "state": list(model.state_dict()),
    }


@pytest.mark.parametrize("tied", [False, True])
def test_whole_layers_run_again(tied):
    plain = toy(tied)
    for found in run_ranks(run_again, 2, tied):
        assert found["again"] == ["layers.0", "layers.1"]
        assert {"layers.0", "layers.1"} <= set(found["groups"])
        assert not [name for name in found["groups"] if name.count(".") > 1]
        torch.testing.assert_close(found["gradients"], plain_gradients(tied), rtol=0.0, atol=1e-6)
        assert found["calls"] == [0, 0]
        assert found["names"] == [name for name, _ in plain.named_parameters()]
        assert found["state"] == list(plain.state_dict())


def written_without(path: str) -> dict[str, Tensor]:
    """Train a step without running layers again, write the weights, load them into a model that does, and train on."""
    accelerator = accelerator_of()
    model = toy()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(loss_of(model, accelerator.process_index))
    optimizer.step()
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.save(state, path)
    accelerator.wait_for_everyone()
    fresh = Toy()  # other values
    fresh.load_state_dict(torch.load(path, weights_only=True))
    fresh = accelerator_of(activation_checkpointing=True).prepare(fresh)
    assert isinstance(fresh.layers[0], Recomputed)
    accelerator.backward(loss_of(fresh, accelerator.process_index))
    return gradients_of(fresh)


def test_weights_that_were_written_without(tmp_path):
    model = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for rank in range(2):
            (loss_of(model, rank) / 2).backward()
        last = copy.deepcopy(gradients_of(model))
        optimizer.step()
    for found in run_ranks(written_without, 2, str(tmp_path / "weights.pt")):
        torch.testing.assert_close(found, last, rtol=1e-5, atol=1e-6)


# ---- inputs of layers wait on the host ----


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fsdp_version": 2}, "requires `activation_checkpointing=True`"),
        ({"fsdp_version": 1, "activation_checkpointing": True}, "only supported with `fsdp_version=2`"),
    ],
)
def test_what_offloading_needs(fields, message):
    with pytest.raises(ValueError, match=message):
        FullyShardedDataParallelPlugin(activation_checkpointing_offload=True, **fields)


def test_offloading_from_the_environment(monkeypatch):
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "true")
    found = FullyShardedDataParallelPlugin(fsdp_version=2)
    assert found.activation_checkpointing_offload is True
    assert found.recomputation().offload is True  # type: ignore[union-attr]


def offloaded(offload: bool) -> tuple[dict[str, Tensor], list[tuple[bool, tuple[int, ...]]]]:
    packed: list[tuple[bool, tuple[int, ...]]] = []
    usual = torch.autograd.graph.save_on_cpu

    class Spy(usual):  # type: ignore[misc, valid-type]
        def __init__(self, pin_memory: bool = False, device_type: str = "cuda") -> None:
            super().__init__(pin_memory)  # pinned where there is an accelerator, silently not elsewhere
            pack = self.pack_hook

            def noting(tensor: Tensor) -> Any:
                packed.append((pin_memory, tuple(tensor.shape)))
                return pack(tensor)

            self.pack_hook = noting

    torch.autograd.graph.save_on_cpu = Spy  # type: ignore[misc]
    try:
        accelerator = accelerator_of(activation_checkpointing=True, activation_checkpointing_offload=offload)
        model = accelerator.prepare(toy())
        accelerator.backward(loss_of(model, accelerator.process_index))
    finally:
        torch.autograd.graph.save_on_cpu = usual  # type: ignore[misc]
    return gradients_of(model), packed


def test_inputs_of_layers_wait_on_the_host():
    for (with_it, packed), (without, nothing) in zip(
        run_ranks(offloaded, 2, True), run_ranks(offloaded, 2, False), strict=True
    ):
        assert packed == [(True, (BATCH, LENGTH, WIDTH))] * LAYERS
        assert nothing == []
        assert all(torch.equal(with_it[name], without[name]) for name in without)


# ---- tied embeddings ----


def tied_step(efficient: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"cpu_ram_efficient_loading": True} if efficient else {}
    accelerator = accelerator_of(**fields)
    model: Any = toy(tied=True)
    if efficient and not accelerator.is_main_process:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # the values of the first rank count
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3))
    same = [model.embedding.weight is model.head.weight]
    groups = {id(model.get_submodule(name)._get_fsdp_state()) for name in ("norm", "embedding", "head")}
    accelerator.backward(loss_of(model, accelerator.process_index))
    gradients = gradients_of(model)
    optimizer.step()
    same.append(model.embedding.weight is model.head.weight)
    weight = model.head.weight.full_tensor().detach()
    state = accelerator.get_state_dict(model)
    held = state["head.weight"] is state["embedding.weight"] if accelerator.is_main_process else True
    return {"same": [*same, held], "groups": len(groups), "gradients": gradients, "weight": weight}


@pytest.mark.parametrize("efficient", [False, True])
def test_tied_embeddings(efficient):
    model = toy(tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    for rank in range(2):
        (loss_of(model, rank) / 2).backward()
    gradients = copy.deepcopy(gradients_of(model))
    optimizer.step()
    for found in run_ranks(tied_step, 2, efficient):
        assert found["same"] == [True] * 3
        assert found["groups"] == 1
        torch.testing.assert_close(found["gradients"], gradients, rtol=0.0, atol=1e-6)  # of both uses
        torch.testing.assert_close(found["weight"], model.head.weight.detach(), rtol=1e-5, atol=1e-6)


def left_out() -> str:
    model = toy(tied=True)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard([model.norm, model.embedding], mesh=mesh)
    fully_shard(model, mesh=mesh)
    try:
        loss_of(model, 0)
    except ValueError as error:
        return str(error)
    return "" if model.embedding.weight is model.head.weight else "no tie"


def test_the_control_without_the_output():
    assert all("group" in said or said == "no tie" for said in run_ranks(left_out, 2))


# ---- models that are divided already ----


def divided_already() -> dict[str, Any]:
    accelerator = accelerator_of()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model: Any = fully_shard(toy(), mesh=mesh)
    moves: list[Any] = []
    model.to = lambda *args, **kwargs: moves.append(args) or model
    before = list(model.parameters())
    evaluated = accelerator.prepare_model(model, evaluation_mode=True)
    trained, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    held = optimizer.param_groups[0]["params"]
    accelerator.backward(loss_of(trained, accelerator.process_index))
    optimizer.step()
    return {
        "same": evaluated is model and trained is model and isinstance(model, FSDPModule),
        "moves": moves,
        "held": all(one is other for one, other in zip(held, before, strict=True)),
        "gradients": gradients_of(model),
    }


def test_a_model_that_is_divided_already_is_left_alone():
    for found in run_ranks(divided_already, 2):
        assert found["same"]
        assert found["moves"] == []
        assert found["held"]
        torch.testing.assert_close(found["gradients"], plain_gradients(tied=False), rtol=0.0, atol=1e-6)


def without_a_plugin(kind: str) -> str:
    accelerator = Accelerator(cpu=True)  # its engine copies models
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model: Any = toy()
    if kind == "sharded":
        fully_shard(model, mesh=mesh)
    else:
        from torch.distributed.tensor import distribute_tensor

        for name in ("one", "two", "three"):
            layer = getattr(model.layers[0], name)
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh))
    before = model.embedding.weight
    try:
        prepared = accelerator.prepare(model)
    except ValueError as error:
        return f"refused: {error}"
    assert model.embedding.weight is before
    return "passed" if prepared is model else f"wrapped: {type(prepared).__name__}"


@pytest.mark.parametrize("kind", ["sharded", "distributed"])
def test_the_engine_that_copies_models_passes_them_or_says_why(kind):
    for said in run_ranks(without_a_plugin, 2, kind):
        assert said == "passed" or (said.startswith("refused") and "DTensor" in said)


def compiled_already() -> dict[str, Tensor]:
    accelerator = accelerator_of()
    model: Any = torch.compile(toy(), backend="eager")
    prepared = accelerator.prepare(model)
    assert prepared is model
    assert all(isinstance(each, DTensor) for each in model.parameters())
    with torch.no_grad():
        loss_of(model, accelerator.process_index)
    accelerator.backward(loss_of(model, accelerator.process_index))
    return {name.removeprefix("_orig_mod."): each for name, each in gradients_of(model).items()}


@pytest.mark.filterwarnings("ignore")  # of torch.compile
def test_a_model_that_is_compiled_already():
    for found in run_ranks(compiled_already, 2, timeout=120):
        torch.testing.assert_close(found, plain_gradients(tied=False), rtol=0.0, atol=1e-6)

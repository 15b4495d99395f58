import copy
import logging
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from hasten.parallel.recompute import Recompute, Recomputed, outermost
from hasten.parallel.units import by_class
from tests.parallel.test_units import Block, Language

LAYERS, BATCH, LENGTH, WIDTH = 3, 2, 5, 8


class Dropping(Block):
    """A block that drops half of its output."""

    def forward(self, inputs: Tensor, scale: float = 1.0) -> Tensor:
        return nn.functional.dropout(super().forward(inputs) * scale, 0.5)


def stack(kind: type[nn.Module] = Block) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind(WIDTH) for _ in range(LAYERS)))


def recompute(**settings: Any) -> Recompute:
    return Recompute(lambda model: by_class(model, ["Block"]), **settings)


def inputs() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()


def gradients(model: nn.Module, data: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    model(data).square().sum().backward()
    return [each.grad.clone() for each in (*model.parameters(), data) if each.grad is not None]


class Saved:
    """The tensors that autograd keeps."""

    def __enter__(self) -> "Saved":
        self.tensors: list[Tensor] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def _pack(self, tensor: Tensor) -> Tensor:
        self.tensors.append(tensor)
        return tensor

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def bytes_without(self, model: nn.Module) -> int:
        """Each memory once, and none of a model's parameters."""
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        found = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in self.tensors}
        return sum(size for address, size in found.items() if address not in own)


@pytest.mark.parametrize("kind", [Block, Dropping])
@pytest.mark.parametrize("settings", [{}, {"offload": True}, {"every": 2}, {"keep": [torch.ops.aten.addmm.default]}])
def test_gradients_are_the_same_bit_for_bit(kind, settings):
    plain, model = stack(kind), stack(kind)
    recompute(**settings).apply(model)
    for one, other in zip(gradients(plain, inputs()), gradients(model, inputs()), strict=True):
        assert torch.equal(one, other)


def test_a_layer_keeps_its_input_only():
    model, data = stack(), inputs()
    recompute().apply(model)
    with Saved() as saved:
        output = model(data)
    one = data.numel() * data.element_size()
    assert LAYERS * one <= saved.bytes_without(model) <= 1.05 * LAYERS * one
    with Saved() as everything:
        stack()(data)
    assert everything.bytes_without(model) > 3 * LAYERS * one
    assert output.requires_grad


def test_inputs_go_to_the_host(monkeypatch):
    packed: list[tuple[bool, torch.Size]] = []
    usual = torch.autograd.graph.save_on_cpu

    class Spy(usual):  # type: ignore[misc, valid-type]
        def __init__(self, pin_memory: bool = False, device_type: str = "cuda") -> None:
            super().__init__(pin_memory)
            pack = self.pack_hook

            def noting(tensor: Tensor) -> Any:
                packed.append((pin_memory, tensor.shape))
                return pack(tensor)

            self.pack_hook = noting

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Spy)
    model = stack()
    recompute(offload=True).apply(model)
    gradients(model, inputs())
    assert packed == [(True, torch.Size([BATCH, LENGTH, WIDTH]))] * LAYERS


class Counting(Block):
    """Its result depends on a buffer that it changes, in one of two ways, and normalises by running statistics."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.register_buffer("count", torch.ones(()))
        self.register_buffer("last", torch.zeros(width))
        self.batch = nn.BatchNorm1d(LENGTH, momentum=0.3)
        self.up = nn.utils.parametrizations.spectral_norm(self.up)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.batch(super().forward(inputs)) * self.count.reciprocal() + self.last.square()
        self.count += 1
        self.last = outputs.detach().mean((0, 1))
        return outputs


@pytest.mark.parametrize("settings", [{}, {"offload": True}, {"keep": [torch.ops.aten.addmm.default]}])
def test_buffers_are_found_as_they_were(settings):
    plain, model = stack(Counting), stack(Counting)
    recompute(**settings).apply(model)
    for _ in range(2):
        for one, other in zip(gradients(plain, inputs()), gradients(model, inputs()), strict=True):
            assert torch.equal(one, other)
    for (name, one), other in zip(plain.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(one, other), name
    assert model[0].count == 3


def test_buffers_of_layers_that_run_twice_in_a_pass():
    torch.manual_seed(0)
    plain = Counting()
    torch.manual_seed(0)
    model = nn.Sequential(Counting())
    recompute().apply(model)
    results = []
    for layer, data in ((plain, inputs()), (model[0], inputs())):
        loss = layer(layer(data)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        results.append([each.grad for each in (*layer.parameters(), data)] + list(layer.buffers()))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_layers_of_one_class_stay_so():
    model = stack()
    recompute().apply(model)
    assert type(model[0]) is type(model[1])


def test_a_slice_of_a_layer_is_a_plain_one():
    model = nn.Sequential(nn.Sequential(Block(WIDTH), Block(WIDTH)))
    Recompute(lambda model: by_class(model, ["Sequential"])).apply(model)
    calls: list[int] = []
    part = model[0][:1]
    part[0].register_forward_pre_hook(lambda module, args: calls.append(0))
    part(inputs()).sum().backward()
    assert calls == [0]


def test_a_pickle_holds_layers_of_their_own_class():
    model = stack()
    recompute(keep=[torch.ops.aten.mm.default]).apply(model)
    loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded[0]) is Block
    assert torch.equal(loaded(inputs()), model(inputs()))


def test_hooks_of_a_layer_run_again():
    model = stack()
    recompute(every=2).apply(model)
    calls: list[int] = []
    for index, layer in enumerate(model):
        layer.register_forward_pre_hook(lambda module, args, index=index: calls.append(index))
    gradients(model, inputs())
    assert calls == [0, 1, 2, 2, 0]


def test_a_policy_says_which_results_are_kept():
    asked: list[bool] = []

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation is not torch.ops.aten.addmm.default:
            return CheckpointPolicy.PREFER_RECOMPUTE
        asked.append(context.is_recompute)
        return CheckpointPolicy.MUST_SAVE

    model = stack()
    recompute(keep=policy).apply(model)
    gradients(model, inputs())
    assert asked == [False] * 2 * LAYERS  # in the backward pass they are there


def test_names_do_not_change_and_it_can_be_undone():
    model = Language()
    names = [name for name, _ in model.named_parameters()]
    transform = recompute()
    assert transform.apply(model) is model
    transform.apply(model)
    assert [name for name, _ in model.named_parameters()] == names == list(model.state_dict())
    assert [name for name, each in model.named_modules() if isinstance(each, Recomputed)] == ["layers.0", "layers.1"]
    assert isinstance(model.layers[0], Block)
    twin = copy.deepcopy(model)
    assert isinstance(twin.layers[1], Recomputed)
    transform.undo(model)
    assert type(model.layers[0]) is Block
    assert not any(isinstance(each, Recomputed) for each in model.modules())


def test_only_the_outermost_layers_run_again():
    model = nn.Sequential(Language(), nn.Sequential(Block(), nn.Linear(4, 4)))
    chosen = outermost(model, by_class(model, ["Block", "Language", "LayerNorm"]))
    assert chosen == [model[0], model[1][0]]
    shared = Block()
    assert outermost(nn.Sequential(shared, shared), by_class(shared, ["Block"])) == [shared]


def test_without_gradients_nothing_is_kept():
    model = stack()
    recompute().apply(model)
    calls: list[int] = []
    model[0].register_forward_pre_hook(lambda module, args: calls.append(0))
    with torch.no_grad():
        output = model(inputs())
    assert not output.requires_grad
    assert calls == [0]


def test_a_cache_is_given_up(caplog):
    model: Any = Language()
    model.config = SimpleNamespace(use_cache=True)
    with caplog.at_level(logging.WARNING, "hasten"):
        recompute().apply(model)
        recompute().apply(model)
    assert model.config.use_cache is False
    assert [record.getMessage()[:44] for record in caplog.records] == ["Language.config.use_cache is set to False: l"]


def test_checkpointing_of_its_own_is_given_up(caplog):
    model: Any = Language()
    model.layers[0].gradient_checkpointing = model.gradient_checkpointing = True
    model.layers[1].gradient_checkpointing = False
    with caplog.at_level(logging.WARNING, "hasten"):
        recompute().apply(model)
    assert not any((model.gradient_checkpointing, *(layer.gradient_checkpointing for layer in model.layers)))
    assert [record.getMessage()[:45] for record in caplog.records] == ["Language checkpoints its activations itself ("]


def test_without_layers_it_is_refused():
    with pytest.raises(ValueError, match="needs to know the layers of Language"):
        Recompute(lambda model: None).apply(Language())


def test_it_says_what_it_does():
    assert repr(recompute()) == "activation checkpointing, every layer"
    text = repr(recompute(every=2, keep=[torch.ops.aten.mm.default], offload=True))
    assert text == "activation checkpointing, every 2 layers, keeping some results, inputs on the host"

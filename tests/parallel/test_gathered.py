from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

from hasten import Accelerator, FullyShardedDataParallelPlugin
from hasten.world.mesh import ParallelismConfig
from tests.parallel.test_shard import language, loss_of, tokens
from tests.ranks import run_ranks

KINDS = ("sharded", "whole", "copies", "offloaded", "recomputed", "replicated", "bf16")


def accelerate(kind: str = "sharded") -> Accelerator:
    if kind == "replicated":
        return Accelerator(cpu=True)
    settings: dict[str, Any] = {"transformer_cls_names_to_wrap": ["Block"]}
    if kind == "whole":
        settings = {"auto_wrap_policy": "no_wrap"}
    if kind == "offloaded":
        settings["cpu_offload"] = CPUOffloadPolicy(pin_memory=False)
    if kind == "recomputed":
        settings["activation_checkpointing"] = True
    mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2) if kind == "copies" else None
    return Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(**settings),
        parallelism_config=mesh,
        mixed_precision="bf16" if kind == "bf16" else "no",
    )


def ranks_of(kind: str) -> int:
    return 4 if kind == "copies" else 2


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def local(model: nn.Module) -> list[Tensor]:
    return [
        each.to_local().clone() if hasattr(each, "to_local") else each.detach().clone() for each in model.parameters()
    ]


def looked_at(kind: str) -> dict[str, Any]:
    accelerator = accelerate(kind)
    model = accelerator.prepare(language(tied=True))
    before = local(model)
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    with accelerator.gathered(model) as whole, torch.no_grad():
        inside = values(whole)
        kinds = {type(each) for each in whole.parameters()}
        tied = whole.head.weight is whole.embedding.weight
        logits = whole(tokens(0, 0))
        hidden = whole.norm(whole.layers[0](whole.embedding(tokens(0, 0))))
    assert all(torch.equal(one, other) for one, other in zip(before, local(model), strict=True))
    assert hooks == [len(module._forward_pre_hooks) for module in model.modules()]
    after = model(tokens(0, 0)).detach()
    return {"inside": inside, "kinds": kinds, "tied": tied, "logits": logits, "hidden": hidden, "after": after}


@pytest.mark.parametrize("kind", KINDS)
def test_inside_a_model_is_whole(kind):
    plain = language(tied=True)
    with torch.no_grad():
        expected, hidden = plain(tokens(0, 0)), plain.norm(plain.layers[0](plain.embedding(tokens(0, 0))))
    close = {"rtol": 2e-2, "atol": 2e-2} if kind == "bf16" else {"rtol": 1e-6, "atol": 1e-6}
    for found in run_ranks(looked_at, ranks_of(kind), kind):
        assert found["kinds"] == {nn.Parameter}
        assert found["tied"]
        assert found["inside"].keys() == plain.state_dict().keys()
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in found["inside"].items())
        torch.testing.assert_close(found["logits"], expected, **close)
        torch.testing.assert_close(found["hidden"], hidden, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found["after"].float(), expected, **close)


def changed(kind: str, units: bool) -> dict[str, Tensor]:
    accelerator = accelerate(kind)
    model = accelerator.prepare(language(tied=True))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    if kind != "replicated":
        model(tokens(0, 0))  # leaves the end of the model whole
    if units:
        for _, parameters in accelerator.gathered_units(model, writeback=True):
            with torch.no_grad():
                for parameter in parameters.values():
                    parameter.mul_(2 + accelerator.process_index)  # only what rank 0 does counts
    else:
        with accelerator.gathered(model, writeback=True) as whole, torch.no_grad():
            for parameter in whole.parameters():
                parameter.mul_(2 + accelerator.process_index)
    accelerator.backward(loss_of(model, tokens(accelerator.process_index % 2, 0)))
    optimizer.step()
    with accelerator.gathered(model) as whole:
        return values(whole)


@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bf16"])
def test_what_rank_0_changes_is_kept(kind, units):
    model = language(tied=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    for rank in range(2):
        (loss_of(model, tokens(rank, 0)) / 2).backward()
    optimizer.step()
    for found in run_ranks(changed, ranks_of(kind), kind, units):
        torch.testing.assert_close(found, dict(model.state_dict()), rtol=1e-5, atol=1e-6)


def one_by_one(kind: str) -> list[tuple[str, list[str], list[str]]]:
    accelerator = accelerate(kind)
    model = accelerator.prepare(language(tied=True))
    found = []
    for name, parameters in accelerator.gathered_units(model):
        own = accelerator.unwrap_model(model)
        whole = [key for key, each in own.named_parameters() if type(each) is nn.Parameter]
        assert all(own.get_parameter(key) is each for key, each in parameters.items())
        assert own.head.weight is own.embedding.weight
        found.append((name, list(parameters), whole))
    return found


def test_only_one_unit_is_whole_at_a_time():
    everything = [name for name, _ in language(tied=True).named_parameters()]
    for found in run_ranks(one_by_one, 2, "sharded"):
        assert [name for name, _, _ in found] == ["embedding", "layers.0", "layers.1", "norm"]
        assert [key for _, keys, _ in found for key in keys] == everything
        assert all(keys == whole for _, keys, whole in found)
    for found in run_ranks(one_by_one, 2, "replicated"):
        assert found == [("", everything, everything)]


def between(action: str) -> list[Any]:
    accelerator = accelerate()
    model = accelerator.prepare(language())
    loss = loss_of(model, tokens(accelerator.process_index, 0))
    if action == "look":
        with accelerator.gathered(model):
            pass
    elif action == "inside a pass":
        model.layers[1].register_forward_hook(lambda *_: accelerator.gathered(model).__enter__())
        with pytest.raises(RuntimeError, match="is in a forward or backward pass"):
            model(tokens(0, 0))
        return []
    else:
        with accelerator.gathered(model, writeback=True) as whole, torch.no_grad():
            whole.head.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            accelerator.backward(loss)
        return []
    accelerator.backward(loss)
    return [each.grad.full_tensor() for each in model.parameters()]


def test_between_the_passes():
    model = language()
    for rank in range(2):
        (loss_of(model, tokens(rank, 0)) / 2).backward()
    for found in run_ranks(between, 2, "look"):
        torch.testing.assert_close(found, [each.grad for each in model.parameters()], rtol=1e-5, atol=1e-6)
    run_ranks(between, 2, "change")
    run_ranks(between, 2, "inside a pass")


def _change(model: Any) -> None:
    with torch.no_grad():
        model.head.weight.zero_()


def _train(model: Any) -> None:
    loss_of(model, tokens(0, 0)).backward()


def _reshape(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.zeros(12, 8))


def _grow(model: Any) -> None:
    model.head.weight.data = torch.zeros(12, 8)


def _untie(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.zeros(10, 8))


def _fail(model: Any) -> None:
    raise ValueError("of the user's own")


def wrong(action: Callable[[Any], None], writeback: bool) -> str:
    accelerator = accelerate()
    model = accelerator.prepare(language(tied=True))
    before = local(model)
    with pytest.raises(ValueError, match=r".") as caught, accelerator.gathered(model, writeback=writeback) as whole:
        action(whole)
    assert all(torch.equal(one, other) for one, other in zip(before, local(model), strict=True))
    loss_of(model, tokens(0, 0)).backward()
    return str(caught.value)


@pytest.mark.parametrize(
    ("action", "writeback", "text"),
    [
        (
            _change,
            False,
            "parameters were changed inside (embedding.weight), but changes are not kept. Pass `writeback=True`",
        ),
        (_train, False, "gave gradients to whole parameters (embedding.weight)"),
        (_train, True, "register_forward_method"),
        (_reshape, True, "embedding.weight can be kept only as a tensor of the shape [10, 8]"),
        (_grow, True, "embedding.weight can be kept only as a tensor of the shape [10, 8]"),
        (_untie, True, "the same one in each of the 2 places"),
        (_fail, True, "of the user's own"),
    ],
)
def test_what_would_be_lost_is_an_error(action, writeback, text):
    for rank, found in enumerate(run_ranks(wrong, 2, action, writeback)):
        assert text in found
        assert action is _fail or f"Rank {rank}" in found


def in_half() -> tuple[set[torch.dtype], str]:
    accelerator = accelerate()
    model = accelerator.prepare(language())
    with accelerator.gathered(model, dtype=torch.bfloat16) as whole:
        found = {each.dtype for each in whole.parameters()}
    with pytest.raises(ValueError, match="must not be rounded") as caught:
        accelerator.gathered(model, dtype=torch.bfloat16, writeback=True).__enter__()
    return found, str(caught.value)


def test_in_another_format():
    assert {tuple(found) for found, _ in run_ranks(in_half, 2)} == {(torch.bfloat16,)}


def without_gradients() -> Tensor:
    accelerator = accelerate()
    model = accelerator.prepare(language())
    with torch.inference_mode(), accelerator.gathered(model) as whole:
        return whole(tokens(0, 0)).clone()


def test_in_inference_mode():
    with torch.no_grad():
        expected = language()(tokens(0, 0))
    for found in run_ranks(without_gradients, 2):
        torch.testing.assert_close(found, expected)

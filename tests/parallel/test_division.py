from typing import Any

import torch

from hasten import Accelerator, FullyShardedDataParallelPlugin
from hasten.parallel.division import Division
from hasten.parallel.units import Unit
from tests.parallel.test_units import Language
from tests.ranks import run_ranks

LAYER = Unit(("layers.0",), ("layers.0.a", "layers.0.b"), None, "chosen, Block")


def test_what_is_said() -> None:
    assert list(Division((LAYER,)).lines()) == [
        "layers.0: 2 parameters (chosen, Block)",
        "whole parameters are freed after the forward pass, and gathered again for the backward pass",
    ]
    names = tuple(f"p{number}" for number in range(7))
    full = Division((), 4, torch.bfloat16, None, ("a",), names, True, (1, 0))
    assert list(full.lines()) == [
        "whole parameters are kept in shards of 4 processes from the forward to the backward pass",
        "computed in bfloat16, gradients summed in bfloat16",
        "whole on every process: a",
        "not trained: p0, p1, p2, p3, p4 and 2 more",
        "shards and gradients in the memory of the host",
        "gathered ahead: 1 units in the forward pass, 0 in the backward pass",
    ]
    assert next(Division((), False).lines()) == "whole parameters are kept from the forward to the backward pass"


def explained() -> tuple[Any, list[list[str]]]:
    plugin = FullyShardedDataParallelPlugin(
        transformer_cls_names_to_wrap=["Block"], ignored_modules="norm", forward_prefetch=1, backward_prefetch=1
    )
    one = Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision="bf16")
    model = Language()
    model.embedding.requires_grad_(False)
    model = one.prepare(model)
    plan = one.explain(model)
    names = {id(module): name for name, module in model.named_modules()}
    ahead = []
    for module in (model.embedding, model.layers[0], model.layers[1], model.head):
        state: Any = module._get_fsdp_state()
        forward, backward = state._states_to_forward_prefetch, state._states_to_backward_prefetch
        ahead.append([names[id(each._modules[0])] for each in (*forward, *backward)])
    return (plan.details, str(plan)), ahead


def test_an_explained_model() -> None:
    for (details, text), ahead in run_ranks(explained, 2):
        assert details.whole == ("norm.weight", "norm.bias")
        assert details.frozen == ("embedding.weight",)
        assert (details.computed, details.reduced) == (torch.bfloat16, torch.bfloat16)
        assert "note            computed in bfloat16, gradients summed in bfloat16" in text
        # In the order in which they run: nobody gathers what has run already.
        assert ahead == [["layers.0"], ["layers.1", "embedding"], ["head", "layers.0"], ["layers.1"]]

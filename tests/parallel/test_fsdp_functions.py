from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hasten import Accelerator, FullyShardedDataParallelPlugin, utils
from hasten.parallel.fsdp_functions import (
    ensure_weights_retied,
    fsdp2_prepare_auto_wrap_policy,
    fsdp2_switch_optimizer_parameters,
    get_parameters_from_modules,
)
from hasten.parallel.recompute import Recomputed
from tests.parallel.test_gathered import accelerate
from tests.parallel.test_shard import language
from tests.ranks import run_ranks


def prepared() -> tuple[Any, ...]:
    accelerator = accelerate()
    model: Any = utils.fsdp2_apply_ac(accelerator, language())
    recomputed = [name for name, module in model.named_modules() if isinstance(module, Recomputed)]
    same = utils.fsdp2_prepare_model(accelerator, model)
    again = utils.fsdp2_prepare_model(accelerator, model)
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    return same is model, again is model, recomputed, units, [name for name, _ in model.named_parameters()]


def test_preparing_in_steps():
    for same, again, recomputed, units, names in run_ranks(prepared, 2):
        assert same
        assert again
        assert recomputed == ["layers.0", "layers.1"]
        assert units == ["", "embedding", "layers.0", "layers.1", "norm", "head"]
        assert names == [name for name, _ in language().named_parameters()]


def loaded(offload: bool) -> tuple[dict[str, torch.Tensor], list[str], str]:
    accelerator = accelerate("offloaded" if offload else "sharded")
    with torch.device("meta"):
        model: Any = language(tied=True)
    model = accelerator.prepare(model)
    whole = language(tied=True, seed=7).state_dict() if accelerator.is_main_process else {}
    del (whole if accelerator.is_main_process else {"head.weight": 0})["head.weight"]  # another name of the embedding
    utils.fsdp2_load_full_state_dict(accelerator, model, whole, cpu_offload=offload)
    devices = sorted({each.to_local().device.type for each in model.parameters()})
    assert all(isinstance(each, DTensor) for each in model.parameters())
    assert model.head.weight is model.embedding.weight
    whole.pop("norm.bias", None)
    with pytest.raises(KeyError, match=r"norm\.bias") as caught:
        utils.fsdp2_load_full_state_dict(accelerator, model, whole)
    with accelerator.gathered(model) as inside:
        return {name: value.clone() for name, value in inside.state_dict().items()}, devices, str(caught.value)


@pytest.mark.parametrize("offload", [False, True])
def test_a_whole_state_of_rank_0(offload):
    expected = language(tied=True, seed=7).state_dict()
    for found, devices, _ in run_ranks(loaded, 2, offload):
        assert devices == ["cpu"]
        assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_an_optimizer_gets_other_parameters():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}], lr=0.1)
    new = {each.data_ptr(): nn.Parameter(each.detach() + 1) for each in model.parameters()}
    placeholder: Any = torch.empty(1)
    placeholder.data_ptr = model.bias.data_ptr()
    optimizer.param_groups[1]["params"] = [placeholder]
    fsdp2_switch_optimizer_parameters(optimizer, new)
    assert [group["params"][0] for group in optimizer.param_groups] == list(new.values())
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(KeyError, match=r"shape \[2, 2\] in the optimizer couldn't be switched to its sharded version"):
        fsdp2_switch_optimizer_parameters(optimizer, {})


def test_names():
    given = {"a._checkpoint_wrapped_module.w": 1, "_orig_mod.b.c": 2, "module.z": 4}
    assert utils.fsdp2_canonicalize_names(given) == {"a.w": 1, "b.c": 2, "module.z": 4}


def test_ties_after_an_initialisation():
    def initialise(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 3)

    plain = language()
    assert ensure_weights_retied(initialise, plain, torch.device("cpu")) is initialise
    with torch.device("meta"):
        model = language(tied=True)
    retied = ensure_weights_retied(initialise, model, torch.device("cpu"))
    for module in model.modules():
        retied(module)
    assert model.head.weight is model.embedding.weight
    assert not any(each.is_meta for each in model.parameters())


def test_policies_and_ignored_modules():
    model = language()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, transformer_cls_names_to_wrap=["Block"])
    choose = fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert choose is not None
    assert [name for name, module in model.named_modules() if choose(module)] == ["layers.0", "layers.1"]
    assert get_parameters_from_modules("layers\\.0", model, "cpu") == set(model.layers[0].parameters())
    assert get_parameters_from_modules([model.norm], model, "cpu") == set(model.norm.parameters())
    assert get_parameters_from_modules(None, model, "cpu") == set()


def test_the_scaler():
    scaler = utils.get_fsdp2_grad_scaler(device="cpu", init_scale=4.0)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.get_scale() == 4.0


def test_an_accelerator_that_does_not_shard():
    for function in (utils.fsdp2_prepare_model, utils.fsdp2_apply_ac):
        with pytest.raises(ValueError, match=f"{function.__name__}: this Accelerator does not shard"):
            function(Accelerator(cpu=True), language())

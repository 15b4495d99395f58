import logging
import os
import re
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullStateDictConfig,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import DataLoader

from hasten import Accelerator, DistributedType, GradScalerKwargs
from hasten.parallel.fsdp import FullyShardedDataParallelPlugin
from hasten.settings import environment
from hasten.settings.accumulation import GradientAccumulationPlugin
from hasten.settings.loading import enable_fsdp_ram_efficient_loading
from hasten.settings.parallelism import ParallelismSizes
from hasten.world.mesh import ParallelismConfig
from tests.parallel.test_units import Block, Language
from tests.ranks import RankError, run_ranks

BF16 = torch.bfloat16
SAMPLES = 24
BATCH = 2


def plugin(**fields: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(**{"transformer_cls_names_to_wrap": ["Block"], **fields})


# ---- the fields ----


def test_defaults(monkeypatch):
    found = FullyShardedDataParallelPlugin()
    assert (found.fsdp_version, found.sharding_strategy, found.reshard_after_forward) == (2, None, True)
    assert found.state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert (found.sharded_save, found.uses_dcp) == ("dcp", True)
    assert type(found.cpu_offload) is OffloadPolicy
    assert found.mixed_precision_policy is found.auto_wrap_policy is found.ignored_modules is None
    assert found.choose(Language()) is None


def test_how_shards_are_saved(monkeypatch):
    assert plugin(sharded_save="PER_RANK").sharded_save == "per_rank"
    monkeypatch.setenv("FSDP_SHARDED_SAVE", "per_rank")
    found = plugin()
    assert (found.sharded_save, found.uses_dcp) == ("per_rank", False)
    assert plugin(sharded_save="dcp").uses_dcp
    found.set_state_dict_type("FULL_STATE_DICT")  # for a last save
    assert found.state_dict_type is StateDictType.FULL_STATE_DICT


@pytest.mark.parametrize(
    ("strategy", "frees", "shards"),
    [
        ("FULL_SHARD", True, (8, 1)),
        ("shard_grad_op", False, (8, 1)),
        (ShardingStrategy.HYBRID_SHARD, True, (4, 2)),
        ("HYBRID_SHARD_ZERO2", False, (4, 2)),
        ("NO_SHARD", False, (1, 8)),
        ("1", True, (8, 1)),
        (2, False, (8, 1)),
    ],
)
def test_version_1_is_translated(strategy, frees, shards, caplog):
    with caplog.at_level(logging.WARNING, "hasten"):
        found = FullyShardedDataParallelPlugin(fsdp_version=1, sharding_strategy=strategy)
        FullyShardedDataParallelPlugin(sharding_strategy=strategy)
    assert (found.fsdp_version, found.reshard_after_forward, found.sharding_strategy) == (2, frees, None)
    assert found.shards_and_copies(8, 4) == shards
    assert found.state_dict_type is StateDictType.FULL_STATE_DICT  # version 1's default
    assert [record.getMessage()[:44] for record in caplog.records] == ["Settings of FSDP version 1 are translated to"]


def test_the_environment_is_read(monkeypatch):
    variables = {
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "false",
        "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
        "FSDP_MIN_NUM_PARAMS": "80",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_FORWARD_PREFETCH": "true",
        "FSDP_IGNORED_MODULES": "layers.1|head",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = FullyShardedDataParallelPlugin()
    assert (found.reshard_after_forward, found.min_num_params) == (False, 80)
    assert found.state_dict_type is StateDictType.FULL_STATE_DICT
    assert isinstance(found.cpu_offload, CPUOffloadPolicy)
    assert found.sharding().prefetch == (1, 0)
    model = Language()
    choose = found.choose(model)
    assert choose is not None
    assert [name for name, module in model.named_modules() if choose(module)] == ["layers.0", "layers.1"]
    assert found.ignored(model) == {*model.layers[1].parameters(), *model.head.parameters()}
    assert FullyShardedDataParallelPlugin(reshard_after_forward=True, min_num_params=3).reshard_after_forward is True
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "Block, Linear")
    assert FullyShardedDataParallelPlugin().transformer_cls_names_to_wrap == ["Block", "Linear"]


@pytest.mark.parametrize(
    ("variables", "frees", "said"),
    [
        ("VERSION=2 SHARDING_STRATEGY=FULL_SHARD RESHARD_AFTER_FORWARD=false", False, ""),
        ("VERSION=2 SHARDING_STRATEGY=2 RESHARD_AFTER_FORWARD=false", False, ""),
        ("VERSION=2 SHARDING_STRATEGY=2", True, "FSDP_SHARDING_STRATEGY=SHARD_GRAD_OP has no effect"),
        ("VERSION=1 SHARDING_STRATEGY=2 RESHARD_AFTER_FORWARD=true", False, ""),
        ("VERSION=1 RESHARD_AFTER_FORWARD=false", True, "FSDP_RESHARD_AFTER_FORWARD=false has no effect"),
        ("RESHARD_AFTER_FORWARD=SHARD_GRAD_OP", False, ""),
    ],
)
def test_variables_of_the_other_version(monkeypatch, caplog, variables, frees, said):
    for variable in variables.split():
        name, _, value = variable.partition("=")
        monkeypatch.setenv(f"FSDP_{name}", value)
    with caplog.at_level(logging.WARNING, "hasten"):
        assert FullyShardedDataParallelPlugin().reshard_after_forward is frees
    messages = [each.getMessage() for each in caplog.records if "no effect" in each.getMessage()]
    assert len(messages) == bool(said)
    assert said in "".join(messages)


def test_an_argument_in_the_words_of_version_2_beats_variables_of_version_1(monkeypatch):
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "FULL_SHARD")
    assert FullyShardedDataParallelPlugin(reshard_after_forward=False).reshard_after_forward is False


def test_a_variable_that_is_not_legal_is_named(monkeypatch):
    monkeypatch.setenv("FSDP_MIN_NUM_PARAMS", "many")
    with pytest.raises(ValueError, match="The environment variable FSDP_MIN_NUM_PARAMS is 'many', but must be a whole"):
        FullyShardedDataParallelPlugin()


@pytest.mark.parametrize("given", [True, False])
def test_other_libraries_are_told_who_reads_the_weights(monkeypatch, given):
    monkeypatch.delenv("FSDP_CPU_RAM_EFFICIENT_LOADING", raising=False)
    FullyShardedDataParallelPlugin()
    assert environment.get("fsdp_cpu_ram_efficient_loading") is None
    FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=given)
    assert environment.get("fsdp_cpu_ram_efficient_loading") is given


class Marked(Language):
    _no_split_modules: ClassVar = ["Block", "NotHere"]


@pytest.mark.parametrize(
    ("fields", "chosen"),
    [
        ({}, ["layers.0", "layers.1"]),
        ({"auto_wrap_policy": "transformer_based_wrap"}, ["layers.0", "layers.1"]),
        ({"auto_wrap_policy": "NO_WRAP"}, None),
        (
            {"auto_wrap_policy": lambda module: isinstance(module, nn.LayerNorm)},
            ["layers.0.norm", "layers.1.norm", "norm"],
        ),
        (
            {"auto_wrap_policy": partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})},
            ["layers.0", "layers.1"],
        ),
        (
            {"auto_wrap_policy": lambda module, recurse, nonwrapped_numel: nonwrapped_numel >= 80 and not recurse},
            ["", "layers", "layers.0", "layers.1"],
        ),
        ({"auto_wrap_policy": "size_based_wrap", "min_num_params": 0}, None),
    ],
)
def test_policies(fields, chosen):
    model = Marked()
    choose = FullyShardedDataParallelPlugin(**fields).choose(model)
    found = None if choose is None else [name for name, module in model.named_modules() if choose(module)]
    assert found == chosen


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, True),
        ({"auto_wrap_policy": "no_wrap"}, False),
        ({"transformer_cls_names_to_wrap": ["Block"]}, False),
        ({"auto_wrap_policy": "size_based_wrap"}, False),
    ],
)
def test_a_model_whose_layers_are_not_known_is_named_once(caplog, fields, said):
    made = FullyShardedDataParallelPlugin(**fields)
    for _ in range(2):
        made.choose(Language())
        if "transformer_cls_names_to_wrap" not in fields:
            made.choose(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))  # has no layers of its own
    assert [record.getMessage()[:39] for record in caplog.records] == ["No layers of Language were chosen, so a"] * said
    if said:
        assert (
            "(it has several of Block): FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=['Block'])"
            in caplog.text
        )


def keep_shards_over(number: int) -> None:
    Accelerator(cpu=True, fsdp_plugin=plugin(reshard_after_forward=number)).prepare(Language())


def test_shards_are_kept_over_a_part_of_the_processes():
    with pytest.raises(RankError) as caught:
        run_ranks(keep_shards_over, 2, 3)
    assert "over 3 processes after the forward pass, but parameters are divided over 2" in caught.value.tracebacks[0]
    assert "Allowed are 1, 2, True and False." in caught.value.tracebacks[0]


@pytest.mark.parametrize(
    "given", ["bf16", {"param_dtype": "bf16", "reduce_dtype": torch.float32, "output_dtype": "fp32"}]
)
def test_precisions(given):
    found = FullyShardedDataParallelPlugin(mixed_precision_policy=given)
    assert found.mixed_precision_policy.param_dtype is BF16
    assert found.sharding().upcast
    before = found.mixed_precision_policy
    found.set_mixed_precision("fp16")
    assert found.mixed_precision_policy is before
    found.set_mixed_precision("fp16", override=True)
    assert found.mixed_precision_policy == MixedPrecisionPolicy(torch.float16, torch.float16, torch.float16)
    found.set_mixed_precision("no", override=True)
    assert not found.sharding().upcast


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fsdp_version": 3}, "allowed are 1 and 2"),
        ({"fsdp_version": 2, "sharding_strategy": "FULL_SHARD"}, "setting of version 1"),
        ({"fsdp_version": 2, "reshard_after_forward": "FULL_SHARD"}, "not supported with FSDP2"),
        ({"fsdp_version": 1, "reshard_after_forward": True}, "not supported with FSDP1"),
        ({"reshard_after_forward": "perhaps"}, "allowed are true and false"),
        ({"sharding_strategy": "SOME_SHARD"}, "FULL_SHARD.*NO_SHARD"),
        ({"auto_wrap_policy": "by_name"}, "Invalid auto wrap policy: by_name"),
        ({"auto_wrap_policy": 3}, "functions of a module"),
        ({"min_num_params": "many"}, "`min_num_params` must be an integer"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, "SHARDED_STATE_DICT` or `FULL_STATE_DICT"),
        ({"sharded_save": "per rank"}, "allowed are 'dcp' .* and 'per_rank'"),
        ({"sharded_save": "per_rank", "state_dict_type": "FULL_STATE_DICT"}, "no effect with FULL_STATE_DICT"),
        ({"mixed_precision_policy": {"param_dtype": "bf16"}}, "Invalid mixed precision policy"),
        ({"mixed_precision_policy": "fp7"}, "Invalid mixed precision policy"),
        ({"activation_checkpointing_offload": True}, "requires `activation_checkpointing=True`"),
        (
            {"activation_checkpointing_offload": True, "activation_checkpointing": True, "fsdp_version": 1},
            "only supported with `fsdp_version=2`",
        ),
        ({"activation_checkpointing": 0}, "at least 1"),
        ({"forward_prefetch": "sometimes"}, "forward_prefetch='sometimes': allowed are true, false"),
        ({"backward_prefetch": -1}, "backward_prefetch=-1: allowed are true, false"),
    ],
)
def test_what_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        FullyShardedDataParallelPlugin(**fields)


def test_how_whole_states_and_shards_are_given():
    made = FullyShardedDataParallelPlugin()
    assert made.state_dict_config.offload_to_cpu
    made.set_state_dict_type("FULL_STATE_DICT")
    assert made.state_dict_config == FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    assert made.optim_state_dict_config.rank0_only
    again = FullyShardedDataParallelPlugin(state_dict_type="FULL_STATE_DICT", state_dict_config=made.state_dict_config)
    assert again.state_dict_config == made.state_dict_config
    with pytest.raises(ValueError, match=r"rank0_only=False\) can not be obeyed: with FULL_STATE_DICT it is"):
        FullyShardedDataParallelPlugin(
            state_dict_type="FULL_STATE_DICT", state_dict_config=FullStateDictConfig(rank0_only=False)
        )


# ---- with an Accelerator ----


class Text(torch.utils.data.Dataset[Tensor]):
    def __init__(self) -> None:
        self.tokens = torch.randint(10, (SAMPLES, 5), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


def language(tied: bool = False) -> Language:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Language(2, tied, width=8)


def loss_of(model: nn.Module, batch: Tensor, reduction: str = "mean") -> Tensor:
    logits = model(batch)[:, :-1].reshape(-1, 10)
    return functional.cross_entropy(logits, batch[:, 1:].reshape(-1), reduction=reduction)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)  # small gradients must not be blown up


def train(
    tied: bool = False,
    precision: str = "no",
    steps: int = 1,
    scale: str = "num_steps",
    apart: str = "together",
    **fields: Any,
) -> tuple[list[Tensor], list[float]]:
    """The parameters and the losses of an epoch with sharded parameters."""
    config = fields.pop("parallelism_config", None)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        fsdp_plugin=plugin(**fields),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=steps, scale=scale),
        parallelism_config=config,
        kwargs_handlers=[GradScalerKwargs(init_scale=128.0)],  # with the default scale fp16 would skip the first steps
    )
    model = language(tied)
    optimizer = adamw(model)
    loader = accelerator.prepare(DataLoader(Text(), BATCH))
    if apart == "together":
        model, optimizer = accelerator.prepare(model, optimizer)
    elif apart == "turned":
        optimizer, model = accelerator.prepare(optimizer, model)
    elif apart == "model first":
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
    else:
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            if scale == "weight":
                loss = loss_of(model, batch, "sum")
                accelerator.backward(loss, weight=batch[:, 1:].numel())
            else:
                loss = loss_of(model, batch)
                accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    if tied:
        assert model.head.weight is model.embedding.weight
    assert all(isinstance(each, DTensor) for each in model.parameters())
    return [each.full_tensor().detach() for each in model.parameters()], losses


def plain(ranks: int, tied: bool = False, steps: int = 1) -> tuple[list[Tensor], list[float]]:
    model = language(tied)
    optimizer = adamw(model)
    losses = []
    for index, batch in enumerate(DataLoader(Text(), BATCH * ranks)):
        loss = loss_of(model, batch)
        (loss / steps).backward()
        losses.append(loss.item())
        if (index + 1) % steps == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return [each.detach() for each in model.parameters()], losses


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_training_is_that_of_one_process(ranks, tied, steps):
    parameters, losses = plain(ranks, tied, steps)
    for found, own in run_ranks(train, ranks, tied, steps=steps):
        assert own == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(found, parameters, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("apart", ["turned", "model first", "optimizer first"])
def test_model_and_optimizer_are_prepared_in_any_order(apart):
    parameters, losses = plain(2)
    for found, own in run_ranks(train, 2, apart=apart):
        assert own == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(found, parameters, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "fields", [{"sharding_strategy": "SHARD_GRAD_OP"}, {"cpu_offload": True}, {"forward_prefetch": 1}]
)
def test_settings_change_no_result(fields):
    parameters, losses = plain(2, True)
    for found, own in run_ranks(train, 2, True, **fields):
        assert own == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(found, parameters, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fields", [{}, {"activation_checkpointing_offload": True}, {"activation_checkpointing": 2}])
def test_layers_that_run_again_change_no_result(tied, fields):
    parameters, losses = plain(2, tied)
    for found, own in run_ranks(train, 2, tied, **{"activation_checkpointing": True, **fields}):
        assert own == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(found, parameters, rtol=1e-4, atol=1e-5)


def names_with_checkpointing() -> tuple[list[str], list[str], list[str], str]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin(activation_checkpointing=True))
    model = accelerator.prepare(language())
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    state = list(accelerator.get_state_dict(model))
    return [name for name, _ in model.named_parameters()], state, units, str(accelerator.explain(model))


def test_names_and_units_stay_what_they_are():
    for rank, (parameters, state, units, plan) in enumerate(run_ranks(names_with_checkpointing, 2)):
        assert parameters == [name for name, _ in language().named_parameters()]
        assert state == ([] if rank else list(language().state_dict()))
        assert units == ["", "embedding", "layers.0", "layers.1", "norm", "head"]
        assert "activation checkpointing" in plan


def test_copies_of_shards():
    parameters, losses = plain(4)
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    for found, own in run_ranks(train, 4, parallelism_config=config):
        assert own == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(found, parameters, rtol=1e-4, atol=1e-5)


def test_weights_of_losses():
    parameters, _ = plain(2, steps=2)
    for found, _ in run_ranks(train, 2, steps=2, scale="weight"):
        torch.testing.assert_close(found, parameters, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_small_formats_the_losses_are_close(tied, precision):
    _, losses = plain(2, tied)
    for found, own in run_ranks(train, 2, tied, precision=precision):
        assert own == pytest.approx(losses, rel=2e-2)
        assert {each.dtype for each in found} == {torch.float32}


def looks() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin())
    model = accelerator.prepare(language(tied=True))
    whole = accelerator.get_state_dict(model)
    return {
        "type": accelerator.distributed_type == DistributedType.FSDP,
        "fsdp2": accelerator.is_fsdp2,
        "again": accelerator.prepare(model) is model,
        "unwrapped": accelerator.unwrap_model(model) is model,
        "plan": str(accelerator.explain(model)),
        "whole": {name: tuple(value.shape) for name, value in whole.items()},
        "plugin": accelerator.state.fsdp_plugin.fsdp_version,
    }


def test_what_an_accelerator_says():
    first, second = run_ranks(looks, 2)
    for found in (first, second):
        assert found["type"]
        assert found["fsdp2"]
        assert found["again"]
        assert found["unwrapped"]
        assert found["plugin"] == 2
    assert "shard on 2 ranks, cpu" in first["plan"]
    assert "dp_shard=2" in first["plan"]
    assert "embedding + norm + head: 3 parameters (they share a parameter)" in first["plan"]
    shapes = {name: tuple(value.shape) for name, value in language(tied=True).state_dict().items()}
    assert first["whole"] == shapes
    assert second["whole"] == {}


def from_the_environment() -> tuple[bool, list[str]]:
    import os

    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block", "FSDP_VERSION": "2"}
    try:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(language())
        units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
        return accelerator.is_fsdp2, units
    finally:
        for name in ("ACCELERATE_USE_FSDP", "FSDP_TRANSFORMER_CLS_TO_WRAP", "FSDP_VERSION"):
            del os.environ[name]


def test_sharding_from_the_environment():
    expected = (True, ["", "embedding", "layers.0", "layers.1", "norm", "head"])
    assert run_ranks(from_the_environment, 2) == [expected] * 2


def test_one_process_has_nothing_to_divide():
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin())
    model = language()
    assert accelerator.prepare(model) is model
    assert not any(isinstance(each, DTensor) for each in model.parameters())
    assert not accelerator.is_fsdp2


def an_overflow(rank: int) -> tuple[bool, bool, float, float]:
    """An update in which the gradients of one rank's shards are infinite, then one in which none are."""
    scaling = GradScalerKwargs(init_scale=1024.0)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", fsdp_plugin=plugin(), kwargs_handlers=[scaling])
    model = language()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found: list[bool] = []
    scales: list[float] = []
    for bad in (True, False):
        accelerator.backward(loss_of(model, Text().tokens[:4]))
        if bad and accelerator.process_index == rank:
            model.layers[0].up.weight.grad.to_local().fill_(float("inf"))
        before = [each.to_local().clone() for each in model.parameters()]
        optimizer.step()
        assert accelerator.optimizer_step_was_skipped is bad
        now = [each.to_local() for each in model.parameters()]
        found.append(all(torch.equal(one, other) for one, other in zip(before, now, strict=True)))
        optimizer.zero_grad()
        scales.append(accelerator.scaler.get_scale())
    return found[0], found[1], scales[0], scales[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_all_shards_skip_an_overflow(rank):
    assert run_ranks(an_overflow, 2, rank) == [(True, False, 512.0, 512.0)] * 2


def test_other_objects_are_refused():
    with pytest.raises(TypeError, match="FullyShardedDataParallelPlugin is needed"):
        Accelerator(cpu=True, fsdp_plugin={"fsdp_version": 2})


def test_shards_need_a_plugin():
    with pytest.raises(NotImplementedError, match="with a FullyShardedDataParallelPlugin"):
        Accelerator(cpu=True, parallelism_config=ParallelismSizes(dp_shard_size=2))


class Speaker(Language):
    """One that runs its parts by themselves, as models with an encoder do."""

    def generate(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(2):
                hidden = self.embedding(tokens)
                for layer in self.layers:
                    hidden = layer(hidden)
                tokens = torch.cat([tokens, self.head(self.norm(hidden))[:, -1:].argmax(-1)], dim=1)
        return tokens


def speaker(tied: bool) -> Speaker:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Speaker(2, tied, width=8)


def spoken(tied: bool) -> tuple[Tensor, list[float]]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin())
    model = speaker(tied)
    model, optimizer = accelerator.prepare(model, adamw(model))
    words = model.generate(torch.arange(4)[None] + accelerator.process_index)  # before any forward pass
    assert model._is_fsdp_managed_module is True  # which transformers asks
    losses = []
    for _ in range(2):
        loss = loss_of(model, torch.arange(5)[None])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return words, losses


@pytest.mark.parametrize("tied", [False, True])
def test_models_generate(tied):
    whole = speaker(tied)
    expected = [whole.generate(torch.arange(4)[None] + rank) for rank in range(2)]
    optimizer = adamw(whole)
    first = loss_of(whole, torch.arange(5)[None])
    first.backward()
    optimizer.step()
    second = loss_of(whole, torch.arange(5)[None])
    for (words, losses), own in zip(run_ranks(spoken, 2, tied), expected, strict=True):
        assert torch.equal(words, own)
        assert losses == pytest.approx([first.item(), second.item()], rel=1e-5)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"min_num_params": 5, "auto_wrap_policy": "no_wrap"},
            "min_num_params=5 has no effect with auto_wrap_policy='no_wrap'",
        ),
        (
            {"min_num_params": 5, "transformer_cls_names_to_wrap": "A"},
            "no effect with transformer_cls_names_to_wrap. Leave",
        ),
        ({"min_num_params": 5, "auto_wrap_policy": "transformer_based_wrap"}, "'size_based_wrap' looks at"),
        ({"min_num_params": 5, "auto_wrap_policy": lambda module: True}, "auto_wrap_policy='a function'"),
        ({"transformer_cls_names_to_wrap": ["A"], "auto_wrap_policy": "size_based_wrap"}, "=['A'] has no effect with"),
        ({"transformer_cls_names_to_wrap": ["A"], "auto_wrap_policy": "no_wrap"}, "='no_wrap'. Leave one of them out"),
    ],
)
def test_arguments_that_nothing_would_look_at(fields, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        FullyShardedDataParallelPlugin(**fields)


def test_a_size_alone_chooses_by_size(monkeypatch):
    model = Language()
    chosen = FullyShardedDataParallelPlugin(min_num_params=5).choose(model)
    assert [name for name, module in model.named_modules() if chosen(module)]
    monkeypatch.setenv("FSDP_MIN_NUM_PARAMS", "5")  # launchers write it with any policy
    assert FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap").choose(Language()) is None


def test_what_a_plugin_tells_other_libraries_is_no_default_of_the_next():
    variable = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    assert FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True).cpu_ram_efficient_loading
    assert os.environ[variable] == "true"
    assert FullyShardedDataParallelPlugin().cpu_ram_efficient_loading is False
    assert os.environ[variable] == "false"
    enable_fsdp_ram_efficient_loading()  # but this is what it is for
    assert FullyShardedDataParallelPlugin().cpu_ram_efficient_loading is True
    assert FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=False).cpu_ram_efficient_loading is False
    assert os.environ[variable] == "false"
    assert FullyShardedDataParallelPlugin().cpu_ram_efficient_loading is True

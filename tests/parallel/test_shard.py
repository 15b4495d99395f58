import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional

from hasten.parallel.shard import Shard, Sharding, follow
from hasten.parallel.units import by_class
from hasten.world import process
from tests.parallel.test_units import Language
from tests.ranks import run_ranks

STEPS = 4
BATCH = 2
LENGTH = 5


def tokens(rank: int, step: int, micro: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(10, (BATCH, LENGTH), generator=generator)


def language(tied: bool = False, seed: int = 0, **settings: Any) -> Language:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Language(2, tied, width=8)


def engine(**settings: Any) -> Shard:
    world = process.start(cpu=True)
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp_shard",))
    settings = {"choose": lambda model: by_class(model, ["Block"]), **settings}
    return Shard(world, mesh, Sharding(**settings))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch)
    return functional.cross_entropy(logits[:, :-1].reshape(-1, 10).float(), batch[:, 1:].reshape(-1))


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.1),
}


def grouped(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """An optimizer with two groups, one of which decays."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return OPTIMIZERS[name]([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}])


def plain(ranks: int, tied: bool, name: str, micro: int = 1, max_norm: float | None = None) -> list[Tensor]:
    model = language(tied)
    optimizer = grouped(model, name)
    for step in range(STEPS):
        for index in range(micro):
            for rank in range(ranks):
                (loss_of(model, tokens(rank, step, index)) / ranks / micro).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def sharded(tied: bool, name: str, micro: int = 1, max_norm: float | None = None, **settings: Any) -> list[Tensor]:
    shard = engine(**settings)
    model = language(tied)
    optimizer = grouped(model, name)
    prepared: Any = shard.wrap(model)
    assert prepared is model
    assert follow(optimizer) == len(list(model.parameters()))
    for step in range(STEPS):
        for index in range(micro):
            batch = tokens(shard.world.rank, step, index)
            if index < micro - 1:
                with shard.no_sync(model):
                    (loss_of(model, batch) / micro).backward()
            else:
                (loss_of(model, batch) / micro).backward()
        if max_norm is not None:
            shard.clip_grad_norm_(model.parameters(), max_norm, 2.0)
        optimizer.step()
        optimizer.zero_grad()
    if tied:
        assert model.head.weight is model.embedding.weight
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_training_is_that_of_one_whole_model(ranks, tied, name):
    for found in run_ranks(sharded, ranks, tied, name):
        torch.testing.assert_close(found, plain(ranks, tied, name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("which", ["frees", "choose", "prefetch"])
def test_settings_change_no_result(which):
    for found in run_ranks(with_settings, 2, which):
        torch.testing.assert_close(found, plain(2, True, "adamw"), rtol=1e-5, atol=1e-6)


def with_settings(which: str) -> list[Tensor]:
    settings: dict[str, Any] = {"frees": False, "choose": lambda model: None, "prefetch": (1, 1)}
    return sharded(True, "adamw", **{which: settings[which]})


@pytest.mark.parametrize("tied", [False, True])
def test_accumulation_and_clipping(tied):
    for found in run_ranks(sharded, 2, tied, "adamw", 3, 0.5):
        torch.testing.assert_close(found, plain(2, tied, "adamw", 3, 0.5), rtol=1e-5, atol=1e-6)


def communication() -> dict[str, list[int]]:
    from torch.distributed.tensor.debug import CommDebugMode

    shard = engine()
    model = shard.wrap(language())
    counts: dict[str, list[int]] = {"held": [], "exchanged": []}
    for name in ("held", "exchanged"):
        with warnings.catch_warnings(), CommDebugMode() as collectives:
            warnings.simplefilter("ignore")  # counting hooks every module
            if name == "held":
                with shard.no_sync(model):
                    loss_of(model, tokens(0, 0)).backward()
            else:
                loss_of(model, tokens(0, 1)).backward()
        counts[name] = [
            sum(count for kind, count in collectives.get_comm_counts().items() if word in str(kind))
            for word in ("reduce_scatter", "all_gather")
        ]
    return counts


def test_a_window_is_reduced_once_per_unit():
    for counts in run_ranks(communication, 2):
        assert counts["held"][0] == 0
        assert counts["exchanged"][0] == 4  # two layers, the embedding, the end


def parts() -> tuple[Any, ...]:
    shard = engine()
    model = language(tied=True)
    shard.wrap(model)
    again = shard.wrap(model)
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    whole = shard.model_state_dict(model)
    if shard.world.is_main:
        assert whole["head.weight"] is whole["embedding.weight"]  # so that a file holds it once
    return again is model, units, local, {name: value.shape for name, value in whole.items()}


def test_what_a_rank_holds():
    results = run_ranks(parts, 2)
    total = sum(parameter.numel() for parameter in language(tied=True).parameters())
    shapes = {name: value.shape for name, value in language(tied=True).state_dict().items()}
    assert sum(local for _, _, local, _ in results) == total
    assert abs(results[0][2] - results[1][2]) < total / 10
    for same, units, _, _ in results:
        assert same
        assert units == ["", "embedding", "layers.0", "layers.1", "norm", "head"]
    assert results[0][3] == shapes
    assert results[1][3] == {}


def tiny_updates() -> tuple[Any, ...]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard = engine(precision=policy, upcast=True)
    model = language().bfloat16()
    model.layers[0].norm.float()  # formats may be mixed
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = [parameter.detach().float().clone() for parameter in model.parameters()]
    shard.wrap(model)
    follow(optimizer)
    seen: list[torch.dtype] = []
    model.layers[1].up.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    loss_of(model, tokens(shard.world.rank, 0)).backward()
    optimizer.step()
    after = [parameter.full_tensor().detach() for parameter in model.parameters()]
    moved = torch.cat([(one - other).abs().flatten() for one, other in zip(before, after, strict=True)])
    return seen, {parameter.dtype for parameter in model.parameters()}, moved


def test_parameters_are_stored_in_fp32_under_mixed_precision():
    for seen, dtypes, moved in run_ranks(tiny_updates, 2):
        assert seen == [torch.bfloat16]
        assert dtypes == {torch.float32}
        assert moved.max() < 1e-3  # less than half a step of bf16 at 1, where it would be lost
        assert (moved > 0).float().mean() > 0.8


class Described(nn.Module):
    """One whose state has entries that are no attributes, as quantized layers have them, and one that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(8.0).view(4, 2))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scales"] = torch.ones(2)

    def get_extra_state(self) -> str:
        return "a note"

    def set_extra_state(self, state: str) -> None:
        assert state == "a note"


def described() -> dict[str, Any]:
    shard = engine(choose=lambda model: None)
    return shard.model_state_dict(shard.wrap(nn.Sequential(Described())))


def test_a_state_may_hold_anything():
    main, other = run_ranks(described, 2)
    assert other == {}
    assert main.pop("0._extra_state") == "a note"
    torch.testing.assert_close(main, {"0.weight": torch.arange(8.0).view(4, 2), "0.scales": torch.ones(2)})


def quantized() -> set[str]:
    model = language()
    integers: Any = nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    packed: Any = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16), requires_grad=False)  # integers in that format
    packed.quant_state = "what they mean"
    model.layers[0].integers, model.layers[1].packed = integers, packed
    engine().wrap(model)
    return {name for name, each in model.named_parameters() if not isinstance(each, DTensor)}


def test_quantized_weights_stay_whole():
    for whole in run_ranks(quantized, 2):
        assert whole == {"layers.0.integers", "layers.1.packed"}


def frozen() -> tuple[list[Tensor], list[bool]]:
    shard = engine()
    model = language()
    model.embedding.requires_grad_(False)
    for layer in model.layers:
        layer.up.requires_grad_(False)
    optimizer = OPTIMIZERS["adamw"]([parameter for parameter in model.parameters() if parameter.requires_grad])
    shard.wrap(model)
    assert follow(optimizer) == sum(parameter.requires_grad for parameter in model.parameters())
    for step in range(2):
        loss_of(model, tokens(shard.world.rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.full_tensor().detach() for each in model.parameters()], [
        isinstance(each, DTensor) for each in model.parameters()
    ]


def test_frozen_parts_stay():
    model = language()
    model.embedding.requires_grad_(False)
    for layer in model.layers:
        layer.up.requires_grad_(False)
    optimizer = OPTIMIZERS["adamw"]([parameter for parameter in model.parameters() if parameter.requires_grad])
    for step in range(2):
        for rank in range(2):
            (loss_of(model, tokens(rank, step)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found, spread in run_ranks(frozen, 2):
        torch.testing.assert_close(found, [each.detach() for each in model.parameters()], rtol=1e-5, atol=1e-6)
        assert all(spread)

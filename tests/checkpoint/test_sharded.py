"""Checkpoints of sharded models: a run that is interrupted goes on as if it had not been."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional

from hasten import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin, ParallelismConfig
from hasten.checkpoint import store
from tests.checkpoint.objects import Counter
from tests.ranks import run_ranks

WIDTH, WORDS, BATCH = 8, 10, 12
EXACT, CLOSE = 0.0, 1e-5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class Model(nn.Module):
    """Tied weights, a buffer, a frozen parameter, one that nothing uses, and sizes that two and three processes do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(5))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) * self.frozen
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.02),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.2),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.02),  # works on whole matrices, each on one rank
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05, initial_accumulator_value=0.1),
}


class Run:
    """A run of a few steps, whose batches are the same for any number of processes."""

    def __init__(self, optimizer: str = "adamw", kind: str | None = "SHARDED_STATE_DICT", **settings: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = Model()
        mixed, mesh = settings.pop("mixed_precision", None), settings.pop("parallelism_config", None)
        plugin = None
        if kind is not None:
            settings = {"transformer_cls_names_to_wrap": ["Block"], **settings}
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind, **settings)
        self.accelerator = Accelerator(
            cpu=True,
            fsdp_plugin=plugin,
            mixed_precision=mixed,
            parallelism_config=mesh,
            step_scheduler_with_optimizer=False,
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)] if kind is None else None,
        )
        groups = [
            {"params": [each for each in model.parameters() if each.dim() > 1], "weight_decay": 0.1},
            {"params": [each for each in model.parameters() if each.dim() <= 1], "weight_decay": 0.0},
        ]
        if optimizer == "sgd":
            groups[0]["lr"] = 0.1
        inner = OPTIMIZERS[optimizer](groups)
        self.model, self.optimizer = self.accelerator.prepare(model, inner)
        self.scheduler = self.accelerator.prepare(torch.optim.lr_scheduler.StepLR(inner, 2, gamma=0.5))
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        assert self.accelerator.num_processes == 1 or kind is None or isinstance(self.model, FSDPModule)

    def step(self) -> float:
        number, world = self.counter.value, self.accelerator.num_processes
        batch = torch.randint(WORDS, (BATCH, 4), generator=torch.Generator().manual_seed(number))
        own = batch.chunk(world)[self.accelerator.process_index]
        loss = functional.cross_entropy(self.model(own).flatten(0, 1).float(), own.roll(1, 1).flatten())
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.counter.value += 1
        with torch.no_grad():
            self.accelerator.unwrap_model(self.model).seen += 1
        return float(self.accelerator.reduce(loss.detach(), "mean"))

    def state(self) -> dict[str, Tensor]:
        """The whole model and optimizer."""
        self.optimizer.divide_state()
        model = self.accelerator.unwrap_model(self.model)
        held = dict(model.state_dict(keep_vars=True).items())
        for name, each in model.named_parameters():
            for key, value in self.optimizer.optimizer.state.get(each, {}).items():
                held[f"{name}:{key}"] = value
        held["rate"] = torch.tensor([group["lr"] for group in self.optimizer.param_groups])
        return {
            name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
            for name, each in held.items()
        }


def train(
    folder: str | None, steps: int, load: str | None = None, **settings: Any
) -> tuple[list[float], dict[str, Tensor]]:
    options = settings.pop("save", {})
    run = Run(**settings)
    if load is not None:
        run.accelerator.load_state(load)
        model = run.accelerator.unwrap_model(run.model)
        assert model.head.weight is model.embedding.weight
    losses = [run.step() for _ in range(steps)]
    if folder is not None:
        run.accelerator.save_state(folder, **options)
    return losses, run.state()


def on(ranks: int, *arguments: Any, fresh: bool = False, **settings: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Train on some ranks; what the first one found, which all must have found."""
    found = run_ranks(train, ranks, *arguments, fresh=fresh, timeout=60, **settings)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)
    return found[0]


def compare(found: Any, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


KINDS: dict[str, dict[str, Any]] = {
    "folders": {"kind": "SHARDED_STATE_DICT"},
    "file": {"kind": "FULL_STATE_DICT"},
    "bin": {"kind": "FULL_STATE_DICT", "save": {"safe_serialization": False}},
    "ranks": {"kind": "SHARDED_STATE_DICT", "save": {"use_dcp": False}},
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_an_interrupted_run_goes_on_to_the_bit(tmp_path, kind, optimizer):
    losses, state = on(2, None, 6, optimizer=optimizer)
    first, _ = on(2, str(tmp_path / "ck"), 3, optimizer=optimizer, **KINDS[kind])
    second, resumed = on(2, None, 3, load=str(tmp_path / "ck"), optimizer=optimizer, fresh=optimizer == "adamw")
    compare(first + second, losses, EXACT)
    compare(resumed, state, EXACT)
    store.verify(tmp_path / "ck", checksums=True)


# -- other numbers of processes, other engines -------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.parametrize("kind", ["folders", "file"])
def test_the_number_of_processes_may_change_at_every_start(tmp_path, kind, optimizer):
    losses, state = on(1, None, 6, kind=None, optimizer=optimizer)
    found, last = [], None
    for ranks in (2, 3, 1):
        part, reached = on(ranks, str(tmp_path / str(ranks)), 2, load=last, optimizer=optimizer, **KINDS[kind])
        found += part
        last = str(tmp_path / str(ranks))
    compare(found, losses, CLOSE)
    compare(reached, state, 1e-4)


def hybrid(folder: str | None, steps: int, load: str | None = None, **settings: Any) -> Any:
    mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    return train(folder, steps, load, parallelism_config=mesh, **settings)


def test_copies_of_shards_are_written_once_and_load_without_copies(tmp_path):
    losses, state = on(1, None, 6, kind=None)
    first = run_ranks(hybrid, 4, str(tmp_path / "hybrid"), 2, timeout=60)[0]
    sizes = [path.stat().st_size for path in (tmp_path / "hybrid/pytorch_model_fsdp_0").glob("*.distcp")]
    assert len(sizes) == 4
    weights = sum(each.numel() * 4 for name, each in first[1].items() if ":" not in name and name != "head.weight")
    assert sum(sizes) < weights + 4 * 40_000  # each tensor has about a kilobyte of its own around it
    second = on(2, str(tmp_path / "two"), 2, load=str(tmp_path / "hybrid"))
    third = run_ranks(hybrid, 4, None, 2, load=str(tmp_path / "two"), timeout=60)[0]
    compare(first[0] + second[0] + third[0], losses, CLOSE)
    compare(third[1], state, 1e-4)


@pytest.mark.parametrize("kind", ["folders", "file", "bin"])
def test_plain_runs_load_sharded_checkpoints_and_the_other_way_round(tmp_path, kind):
    losses, state = on(1, None, 8, kind=None)
    found = on(1, str(tmp_path / "plain"), 2, kind=None)[0]
    found += on(2, str(tmp_path / "sharded"), 2, load=str(tmp_path / "plain"), **KINDS[kind])[0]
    found += on(2, str(tmp_path / "copies"), 2, load=str(tmp_path / "sharded"), kind=None)[0]
    part, reached = on(2, None, 2, load=str(tmp_path / "copies"))
    compare(found + part, losses, CLOSE)
    compare(reached, state, 1e-4)


# -- what is in a checkpoint ---------------------------------------------------------------------------------------------


def test_recomputation_makes_no_difference(tmp_path):
    losses, state = on(2, None, 4)
    first, _ = on(2, str(tmp_path / "ck"), 2, activation_checkpointing=True)
    second, reached = on(2, None, 2, load=str(tmp_path / "ck"))
    compare(first + second, losses, EXACT)
    compare(reached, state, EXACT)
    compare(on(2, None, 2, load=str(tmp_path / "ck"), activation_checkpointing=True)[0], second, EXACT)


def test_weights_of_mixed_precision_are_saved_as_they_are_kept(tmp_path):
    losses, state = on(2, None, 4, mixed_precision="bf16")
    first, _ = on(2, str(tmp_path / "ck"), 2, mixed_precision="bf16")
    second, reached = on(2, None, 2, load=str(tmp_path / "ck"), mixed_precision="bf16")
    compare(first + second, losses, EXACT)
    compare(reached, state, EXACT)
    assert reached["layers.0.up.weight"].dtype is torch.float32


def again_and_again(folder: str) -> list[list[float]]:
    run = Run()
    found = [[run.step()]]
    run.accelerator.save_state(folder)
    for _ in range(2):
        found.append([run.step(), run.step()])
        run.accelerator.load_state(folder)
    run.accelerator.save_state(folder)  # the plan is known now
    found.append([run.step(), run.step()])
    run.accelerator.load_state(folder)
    found.append([run.step(), run.step()])
    return found


def test_loading_in_the_process_that_saved(tmp_path):
    for found in run_ranks(again_and_again, 2, str(tmp_path / "ck")):
        assert found[1] == found[2] == found[3] == found[4]


def two_models(folder: str, save: bool, kind: str) -> dict[str, Tensor]:
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    )
    torch.manual_seed(0 if save else 1)
    one, other, watched = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 2)
    optimizers = [
        torch.optim.AdamW([{"params": one.parameters()}, {"params": [other.weight], "lr": 0.5}]),
        torch.optim.SGD([other.bias], lr=0.1, momentum=0.9),
    ]
    one, other, *prepared = accelerator.prepare(one, other, *optimizers)
    watched = accelerator.prepare_model(watched, evaluation_mode=True)
    for _ in range(2 if save else 1):
        watched(other(one(torch.ones(1, 3)))).sum().backward()
        for optimizer in prepared:
            optimizer.step()
    if save:
        accelerator.save_state(folder)
    else:
        accelerator.load_state(folder)
    held = {
        f"{index}.{name}": each
        for index, model in enumerate((one, other, watched))
        for name, each in model.state_dict().items()
    }
    for index, optimizer in enumerate(optimizers):
        held |= {f"rate{index}": torch.tensor([group["lr"] for group in optimizer.param_groups])}
        for number, entries in optimizer.state_dict()["state"].items():
            held |= {f"optimizer{index}.{number}.{key}": value for key, value in entries.items()}
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in held.items()}


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_several_models_and_optimizers(tmp_path, kind):
    saved = run_ranks(two_models, 2, str(tmp_path / "ck"), True, kind)[0]
    compare(run_ranks(two_models, 2, str(tmp_path / "ck"), False, kind)[0], saved, EXACT)
    if kind == "SHARDED_STATE_DICT":
        compare(run_ranks(two_models, 3, str(tmp_path / "ck"), False, kind)[0], saved, EXACT)


def test_names_of_files(tmp_path):
    common = {
        "scheduler.bin",
        "random_states_0.pkl",
        "random_states_1.pkl",
        "custom_checkpoint_0.pkl",
        "hasten_manifest.json",
    }
    own = {
        "folders": {
            f"{folder}/{name}"
            for folder in ("pytorch_model_fsdp_0", "optimizer_0")
            for name in (".metadata", "__0_0.distcp", "__1_0.distcp")
        },
        "file": {"pytorch_model_fsdp.safetensors", "optimizer.bin"},
        "bin": {"pytorch_model_fsdp.bin", "optimizer.bin"},
        "ranks": {f"{name}_0_rank{rank}.bin" for name in ("pytorch_model_fsdp", "optimizer") for rank in (0, 1)},
    }
    for kind, names in own.items():  # all into the same folder: each save replaces the one before
        on(2, str(tmp_path / "ck"), 1, **KINDS[kind])
        folder = store.resolve(tmp_path / "ck")
        there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        if kind == "ranks":
            names |= {"hasten_rank_0.json", "hasten_rank_1.json"}
            common.remove("hasten_manifest.json")
        assert there == names | common
        store.verify(tmp_path / "ck", checksums=True)
    on(2, None, 1, load=str(tmp_path / "ck"))


# -- what does not fit ---------------------------------------------------------------------------------------------------


def complaint(folder: str, change: str) -> str:
    run = Run()
    if change == "steps":
        run.step()
    model = run.accelerator._session.models[0]
    if change == "missing":
        model.extra = nn.Parameter(torch.ones(2))
    elif change == "unexpected":
        del model.unused
    elif change == "shape":
        model.seen = torch.zeros(3)
    elif change == "groups":
        groups = run.optimizer.optimizer.param_groups
        groups[1]["params"].append(groups[0]["params"].pop())
    elif change == "optimizer":
        run.optimizer.optimizer.param_groups[1]["params"].pop()
    with pytest.raises((RuntimeError, ValueError, FileNotFoundError)) as error:
        run.accelerator.load_state(folder)
    return str(error.value)


@pytest.mark.parametrize("kind", ["folders", "file"])
def test_what_does_not_fit_is_named(tmp_path, kind):
    on(2, str(tmp_path / "ck"), 1, **KINDS[kind])
    for change, text in {
        "missing": "not in the checkpoint: extra",
        "unexpected": "not in the model: unused",
        "shape": r"seen has the shape [1] in the checkpoint and [3] in the model",
        "groups": "the parameters of group 1 were in 2 groups",
        "optimizer": "not in the optimizer: layers.1.down.bias",
    }.items():
        for found in run_ranks(complaint, 2, str(tmp_path / "ck"), change):
            assert text in found
            assert str(tmp_path / "ck") in found


def test_another_number_of_files_of_single_processes(tmp_path):
    on(2, str(tmp_path / "ck"), 1, **KINDS["ranks"])
    for found in run_ranks(complaint, 3, str(tmp_path / "ck"), ""):
        assert "was saved by 2 processes" in found
        assert "sharded_save='dcp'" in found


def test_missing_files_are_named(tmp_path):
    on(2, str(tmp_path / "ck"), 1)
    (tmp_path / "ck/pytorch_model_fsdp_0/__1_0.distcp").unlink()
    for found in run_ranks(complaint, 2, str(tmp_path / "ck"), ""):
        assert "__1_0.distcp is missing" in found
    (tmp_path / "ck/hasten_manifest.json").unlink()
    for found in run_ranks(complaint, 2, str(tmp_path / "ck"), ""):
        assert "__1_0.distcp" in found
    (tmp_path / "ck/pytorch_model_fsdp_0/.metadata").unlink()
    for found in run_ranks(complaint, 2, str(tmp_path / "ck"), ""):
        assert "holds no model number 0" in found
        assert "pytorch_model_fsdp_0" in found


def test_what_only_version_1_can_read(tmp_path):
    on(2, str(tmp_path / "ck"), 1)
    store_files = tmp_path / "ck/pytorch_model_fsdp_0"
    for path in store_files.iterdir():
        path.unlink()
    (tmp_path / "ck/hasten_manifest.json").unlink()
    torch.save({}, tmp_path / "ck/pytorch_model_fsdp_rank0.bin")
    with pytest.raises(AssertionError, match="LOCAL_STATE_DICT"):
        run_ranks(train, 2, None, 1, load=str(tmp_path / "ck"))


# -- weights for others --------------------------------------------------------------------------------------------------


def exported(folder: str, size: int | str, safe: bool) -> tuple[dict[str, Tensor], int]:
    """Export; the whole model, and how many whole tensors were alive at most while this process kept them."""
    import weakref

    run = Run()
    run.step()
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0
    full_tensor = DTensor.full_tensor

    def counted(self: DTensor, **settings: Any) -> Tensor:
        nonlocal most
        whole = full_tensor(self, **settings)
        alive.add(whole)
        most = max(most, len(alive))
        return whole

    DTensor.full_tensor = counted  # type: ignore[method-assign]
    try:
        run.accelerator.save_model(run.model, folder, max_shard_size=size, safe_serialization=safe)
    finally:
        DTensor.full_tensor = full_tensor  # type: ignore[method-assign]
    return run.state(), most


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", ["5GB", 700])
def test_weights_for_others_are_made_whole_one_after_the_other(tmp_path, size, safe):
    import json

    import safetensors.torch

    (expected, _), (_, most) = run_ranks(exported, 2, str(tmp_path / "out"), size, safe)
    assert most == 1, "the second process keeps nothing"
    read = safetensors.torch.load_file if safe else torch.load
    files = [path for path in (tmp_path / "out").iterdir() if path.suffix != ".json"]
    found = {name: each for path in files for name, each in read(path).items()}
    names = {name for name in expected if ":" not in name and name != "rate"}
    assert set(found) == (names - {"head.weight"} if safe else names)
    compare(found, {name: expected[name] for name in found}, EXACT)
    assert (len(files) > 1) == (size == 700)
    if size == 700:
        [index] = (tmp_path / "out").glob("*.index.json")
        assert set(json.loads(index.read_text())["weight_map"]) == set(found)


def without_space(folder: str) -> str:
    from hasten.weights.stream import Stream

    run = Run()
    if run.accelerator.is_main_process:

        def fail(self: Stream, view: memoryview) -> None:
            raise OSError(28, "No space left on device")

        Stream._write_all = fail  # type: ignore[method-assign]
    with pytest.raises((OSError, RuntimeError)) as error:
        run.accelerator.save_model(run.model, folder, max_shard_size=700)
    return f"{type(error.value).__name__}: {error.value}"


def test_a_full_disk_is_an_error_of_all(tmp_path):
    main, other = run_ranks(without_space, 2, str(tmp_path / "out"), fresh=True)
    assert main.startswith("OSError")
    assert other.startswith("RuntimeError")
    assert "rank 0 failed with OSError: [Errno 28]" in other
    assert not (tmp_path / "out").exists()


# -- who must come -------------------------------------------------------------------------------------------------------


def optimizer_of_its_own(folder: str) -> str:
    run = Run()
    run.step()
    for parameter, entries in run.optimizer.optimizer.state.items():
        if parameter.dim() == 2 and run.accelerator.process_index == 1:
            entries["whole"] = torch.zeros(parameter.shape)
    with pytest.raises((NotImplementedError, RuntimeError)) as error:
        run.accelerator.save_state(folder)
    return f"{type(error.value).__name__}: {error.value}"


def test_a_state_that_one_process_has_whole_is_refused(tmp_path):
    first, second = run_ranks(optimizer_of_its_own, 2, str(tmp_path / "ck"))
    assert second.startswith("NotImplementedError: AdamW holds whole of ")
    assert "rank 1 failed with NotImplementedError" in first
    assert not (tmp_path / "ck").exists()


def hooked(folder: str) -> tuple[list[str], str]:
    run = Run()
    seen: list[str] = []

    def saving(models: list[Any], weights: list[Any], place: str) -> None:
        seen.append(f"{len(models)} {len(weights)} {type(weights[0]['layers.0.up.weight']).__name__}")
        weights.clear()

    handle = run.accelerator.register_save_state_pre_hook(saving)
    run.accelerator.save_state(folder)
    names = sorted(path.name for path in Path(folder).iterdir())
    handle.remove()
    if run.accelerator.process_index == 1:

        def failing(models: list[Any], weights: list[Any], place: str) -> None:
            raise ValueError("no")

        run.accelerator.register_save_state_pre_hook(failing)
    with pytest.raises((ValueError, RuntimeError)) as error:
        run.accelerator.save_state(folder)
    return seen + names, str(error.value)


def test_hooks_take_over(tmp_path):
    found = run_ranks(hooked, 2, str(tmp_path / "ck"))
    assert found[0][0][0] == "1 1 DTensor"
    assert "pytorch_model_fsdp_0" not in found[0][0]
    assert "optimizer_0" in found[0][0]
    assert found[1][1] == "no"
    assert "rank 1 failed with ValueError: no" in found[0][1]


def test_how_shards_are_saved_is_no_question_where_there_are_none(tmp_path):
    with pytest.raises(AssertionError, match="ValueError: `use_dcp` says how sharded models are saved"):
        run_ranks(train, 1, str(tmp_path / "ck"), 1, kind=None, save={"use_dcp": False})

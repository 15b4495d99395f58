"""The functions that training programs call, and folders that version 1 of FSDP wrote."""

import inspect
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hasten import utils
from tests.checkpoint.test_sharded import EXACT, Run, compare
from tests.ranks import run_ranks

SIGNATURES = {
    "load_fsdp_model": "(fsdp_plugin, accelerator, model, input_dir, model_index=0, adapter_only=False, use_dcp=True)",
    "load_fsdp_optimizer": "(fsdp_plugin, accelerator, optimizer, model, input_dir, optimizer_index=0, "
    "adapter_only=False, use_dcp=True)",
    "merge_fsdp_weights": "(checkpoint_dir, output_path, safe_serialization=True, remove_checkpoint_dir=False)",
    "save_fsdp_model": "(fsdp_plugin, accelerator, model, output_dir, model_index=0, adapter_only=False, use_dcp=True)",
    "save_fsdp_optimizer": "(fsdp_plugin, accelerator, optimizer, model, output_dir, optimizer_index=0, use_dcp=True)",
}


@pytest.mark.parametrize("name", list(SIGNATURES))
def test_they_are_called_as_those_of_the_reference(name):
    parameters = inspect.signature(getattr(utils, name)).parameters.values()
    told = [each.name if each.default is each.empty else f"{each.name}={each.default}" for each in parameters]
    assert f"({', '.join(told)})" == SIGNATURES[name]


def one_by_one(folder: str, kind: str, use_dcp: bool) -> tuple[set[str], list[bool]]:
    run = Run(kind=kind)
    plugin = run.accelerator.state.fsdp_plugin
    run.step()
    for index in (0, 1):
        utils.save_fsdp_model(plugin, run.accelerator, run.model, folder, index, use_dcp=use_dcp)
        utils.save_fsdp_optimizer(plugin, run.accelerator, run.optimizer, run.model, folder, index, use_dcp=use_dcp)
    saved = run.state()
    run.step()
    dist.barrier()
    result = utils.load_fsdp_model(plugin, run.accelerator, run.model, folder, 1, use_dcp=use_dcp)
    utils.load_fsdp_optimizer(plugin, run.accelerator, run.optimizer, run.model, folder, 1, use_dcp=use_dcp)
    assert str(result) == "<All keys matched successfully>"
    found = run.state()
    changed = ("rate",)  # the scheduler's
    same = [torch.equal(found[name], saved[name]) for name in saved if name not in changed]
    names = {path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()}
    if use_dcp and kind == "SHARDED_STATE_DICT":  # the folder itself
        utils.load_fsdp_model(plugin, run.accelerator, run.model, Path(folder, "pytorch_model_fsdp_0"))
    return names, same


NAMES = {
    ("FULL_STATE_DICT", True): {
        "pytorch_model_fsdp.bin",
        "pytorch_model_fsdp_1.bin",
        "optimizer.bin",
        "optimizer_1.bin",
    },
    ("SHARDED_STATE_DICT", True): {
        f"{folder}_{index}/{name}"
        for folder in ("pytorch_model_fsdp", "optimizer")
        for index in (0, 1)
        for name in (".metadata", "__0_0.distcp", "__1_0.distcp")
    },
    ("SHARDED_STATE_DICT", False): {
        f"{name}_{index}_rank{rank}.bin"
        for name in ("pytorch_model_fsdp", "optimizer")
        for index in (0, 1)
        for rank in (0, 1)
    },
}


@pytest.mark.parametrize(("kind", "use_dcp"), list(NAMES))
def test_a_model_and_an_optimizer_by_themselves(tmp_path, kind, use_dcp):
    for names, same in run_ranks(one_by_one, 2, str(tmp_path), kind, use_dcp, timeout=60):
        assert names == NAMES[kind, use_dcp]
        assert all(same)


def silent(folder: str) -> list[str]:
    """Which collectives saving and loading process by process uses."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if str(operation).startswith(("c10d", "_c10d")):
                calls.append(str(operation))
            return operation(*args, **(kwargs or {}))

    run = Run()
    plugin = run.accelerator.state.fsdp_plugin
    run.step()
    dist.barrier()
    for name in ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "barrier"):
        setattr(dist, name, lambda *args, name=name, **kwargs: calls.append(name))
    with Watch():
        utils.save_fsdp_model(plugin, run.accelerator, run.model, folder, use_dcp=False)
        utils.save_fsdp_optimizer(plugin, run.accelerator, run.optimizer, run.model, folder, use_dcp=False)
    return calls


def test_files_of_single_processes_need_no_exchange(tmp_path):
    assert run_ranks(silent, 2, str(tmp_path), fresh=True) == [[], []]


def adapters(folder: str, kind: str) -> tuple[list[str], dict[str, Any]]:
    run = Run(kind=kind)
    plugin = run.accelerator.state.fsdp_plugin
    names = [name for name, each in run.model.named_parameters() if each.requires_grad]
    utils.save_fsdp_model(plugin, run.accelerator, run.model, folder, adapter_only=True)
    with torch.no_grad():
        for each in run.model.parameters():
            each.zero_()
    dist.barrier()
    result = utils.load_fsdp_model(plugin, run.accelerator, run.model, folder, adapter_only=True)
    assert result.missing_keys == ["frozen", "seen"]
    held = {
        name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in run.model.named_parameters()
    }
    return names, {name: each.detach() for name, each in held.items()}


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_what_is_trained_alone(tmp_path, kind):
    names, found = run_ranks(adapters, 2, str(tmp_path), kind)[0]
    fresh = Run(kind=None)
    expected = dict(fresh.model.named_parameters())
    compare({name: found[name] for name in names}, {name: expected[name].detach() for name in names}, EXACT)
    assert not found["frozen"].any()
    if kind == "FULL_STATE_DICT":
        saved = torch.load(tmp_path / "pytorch_model_fsdp.bin")
        assert set(saved) == {*names, "head.weight"}
        assert {type(each) for each in saved.values()} == {Tensor}
    fresh.accelerator.free_memory()


# -- version 1 -----------------------------------------------------------------------------------------------------------


def written_by_version_1(folder: str, kind: str) -> None:
    """What a program with FSDP version 1 leaves, written by torch alone."""
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from tests.checkpoint.test_sharded import Block, Model

    torch.manual_seed(7)
    model: Any = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this version is out of date
        fsdp = FullyShardedDataParallel
        wrapped = fsdp(
            model, auto_wrap_policy=ModuleWrapPolicy([Block]), use_orig_params=True, device_id=torch.device("cpu")
        )
        optimizer = torch.optim.AdamW(
            [
                {
                    "params": [each for name, each in wrapped.named_parameters() if "bias" not in name],
                    "weight_decay": 0.1,
                },
                {"params": [each for name, each in wrapped.named_parameters() if "bias" in name], "weight_decay": 0.0},
            ],
            lr=0.02,
        )
        wrapped(torch.arange(10).reshape(2, 5)).square().mean().backward()
        optimizer.step()
        chosen = StateDictType[kind]
        with fsdp.state_dict_type(wrapped, chosen, FullStateDictConfig() if kind == "FULL_STATE_DICT" else None):
            weights, state = wrapped.state_dict(), fsdp.optim_state_dict(wrapped, optimizer)
            if kind == "SHARDED_STATE_DICT":
                torch_checkpoint.save({"model": weights}, checkpoint_id=Path(folder, "pytorch_model_fsdp_0"))
                torch_checkpoint.save({"optimizer": state}, checkpoint_id=Path(folder, "optimizer_0"))
            elif dist.get_rank() == 0:
                torch.save(weights, Path(folder, "pytorch_model_fsdp.bin"))
                torch.save(state, Path(folder, "optimizer.bin"))
        with fsdp.summon_full_params(wrapped):
            whole = {name: each.clone() for name, each in model.state_dict().items()}
        if dist.get_rank() == 0:
            torch.save(whole, Path(folder, "expected.bin"))


def loaded_from_version_1(folder: str) -> dict[str, Tensor]:
    from hasten import Accelerator, FullyShardedDataParallelPlugin
    from tests.checkpoint.test_sharded import Model

    accelerator = Accelerator(
        cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"])
    )
    model = Model()
    optimizer = torch.optim.AdamW(
        [
            {"params": [each for name, each in model.named_parameters() if "bias" not in name]},
            {"params": [each for name, each in model.named_parameters() if "bias" in name], "weight_decay": 0.5},
        ]
    )
    model, prepared = accelerator.prepare(model, optimizer)
    plugin = accelerator.state.fsdp_plugin
    utils.load_fsdp_model(plugin, accelerator, model, folder)
    utils.load_fsdp_optimizer(plugin, accelerator, prepared, model, folder)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    named = dict(model.named_parameters())
    assert len(optimizer.state) >= len(named) - 2  # all but the frozen and the unused one
    state = {
        f"{name}:step": optimizer.state[each]["step"] for name, each in named.items() if "step" in optimizer.state[each]
    }
    assert {float(step) for step in state.values()} == {1.0}
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in model.state_dict().items()
    }


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_checkpoints_of_version_1_load(tmp_path, kind):
    run_ranks(written_by_version_1, 2, str(tmp_path), kind, fresh=True, timeout=60)
    expected = torch.load(tmp_path / "expected.bin")
    for ranks in (2, 3):
        compare(run_ranks(loaded_from_version_1, ranks, str(tmp_path))[0], expected, EXACT)


def test_without_an_accelerator_of_ours_the_default_world_counts(tmp_path):
    model = nn.Linear(2, 2)
    plugin = SimpleNamespace(state_dict_type="SHARDED_STATE_DICT")
    utils.save_fsdp_model(plugin, SimpleNamespace(), model, tmp_path)
    saved = json.dumps(sorted(path.name for path in (tmp_path / "pytorch_model_fsdp_0").iterdir()))
    assert saved == '[".metadata", "__0_0.distcp"]'
    with pytest.raises(ValueError, match="LOCAL_STATE_DICT is not a form"):
        utils.save_fsdp_model(SimpleNamespace(state_dict_type="LOCAL_STATE_DICT"), SimpleNamespace(), model, tmp_path)

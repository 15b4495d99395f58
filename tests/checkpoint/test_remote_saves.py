"""Checkpoints behind URLs: in memory, and in a folder that several processes see."""

import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hasten import Accelerator, FullyShardedDataParallelPlugin, ProjectConfiguration
from hasten.checkpoint import remote
from hasten.checkpoint.manifest import MANIFEST
from hasten.checkpoint.remote import RemoteFolder
from tests.parallel.test_units import Language
from tests.ranks import RankError, run_ranks

TOKENS = torch.arange(12).view(4, 3) % 10


@pytest.fixture
def spools(tmp_path, monkeypatch):
    monkeypatch.setattr(remote.tempfile, "gettempdir", lambda: str(tmp_path / "spool"))
    (tmp_path / "spool").mkdir()
    fsspec.filesystem("memory").store.clear()
    return lambda: [path for path in (tmp_path / "spool").rglob("*") if path.is_file() and path.name != "lock"]


@pytest.fixture(params=["memory", "file"])
def base(request, tmp_path, spools):
    return f"memory://{tmp_path.name}/run" if request.param == "memory" else f"file://{tmp_path}/there/run"


def built(**options: Any) -> tuple[Accelerator, Any, Any]:
    one = Accelerator(cpu=True, **options)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return one, *one.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def step(one: Accelerator, model: Any, optimizer: Any, inputs: Any = None) -> float:
    loss = model(torch.ones(2, 3) if inputs is None else inputs).square().mean()
    one.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.parametrize("blocking", [True, False])
def test_a_run_goes_on_from_a_url(base, spools, blocking):
    one, *run = built()
    step(one, *run)
    saved = one.save_state(f"{base}/ck", blocking=blocking)
    assert (saved if blocking else saved.result(60)) == f"{base}/ck"
    first = [step(one, *run) for _ in range(2)]
    one.load_state(f"{base}/ck", checksums=True)
    assert [step(one, *run) for _ in range(2)] == first
    assert spools() == []
    names = set(RemoteFolder(f"{base}/ck").files())
    assert {MANIFEST, "model.safetensors", "optimizer.bin", "random_states_0.pkl"} <= names
    one.save_state(f"{base}/ck", safe_serialization=False)
    names = set(RemoteFolder(f"{base}/ck").files())
    assert "pytorch_model.bin" in names
    assert "model.safetensors" not in names


def test_numbers_limit_and_fallback(base, spools, caplog):
    project = ProjectConfiguration(project_dir=base, automatic_checkpoint_naming=True, total_limit=2)
    one, *run = built(project_config=project)
    losses = []
    for _ in range(4):
        losses.append(step(one, *run))
        one.save_state()
    kept = RemoteFolder(f"{base}/checkpoints")
    assert kept.children() == ["checkpoint_2", "checkpoint_3"]
    (kept / "checkpoint_3").remove(["optimizer.bin"])  # sent in part
    one.load_state("latest")
    assert "checkpoint_3 is not complete" in caplog.text
    assert step(one, *run) == losses[3]
    assert one.save_state() == f"{base}/checkpoints/checkpoint_4"
    with pytest.raises(ValueError, match=r"checkpoint_4 already exists, of an earlier run"):
        built(project_config=ProjectConfiguration(project_dir=base, automatic_checkpoint_naming=True))[0].save_state()
    path = kept / "checkpoint_4"
    content = bytearray(path._fs.cat_file(f"{path._root}/model.safetensors"))
    content[-1] ^= 1
    path._fs.pipe_file(f"{path._root}/model.safetensors", bytes(content))
    with pytest.raises(RuntimeError, match=r"model\.safetensors has changed"):
        one.load_state(checksums=True)
    one.load_state(checksums=True, fallback=True)
    assert "Taking the one before" in caplog.text


def test_what_is_missing_or_refused(base):
    one, *_ = built()
    with pytest.raises(ValueError, match=r"Tried to find .*/none but folder does not exist"):
        one.load_state(f"{base}/none")
    other, *_ = built(project_config=ProjectConfiguration(save_on_each_node=True))
    with pytest.raises(ValueError, match="a URL is one place for all of them"):
        other.save_state(f"{base}/x")


def test_a_save_that_fails_is_no_checkpoint(base, monkeypatch):
    one = built()[0]
    one.save_state(f"{base}/ck")
    send = RemoteFolder.send

    def fails(self: Any, local: Path, names: Any) -> None:
        if MANIFEST in names:
            raise OSError("the network is gone")
        send(self, local, names)

    monkeypatch.setattr(RemoteFolder, "send", fails)
    with pytest.raises(OSError, match="the network is gone"):
        one.save_state(f"{base}/ck")
    assert not RemoteFolder(f"{base}/ck").is_complete()
    with pytest.raises(
        RuntimeError, match=r"is damaged: hasten_manifest\.json is missing: it is the last file to be sent"
    ):
        one.load_state(f"{base}/ck")


def test_weights_and_objects(base, spools, tmp_path):
    one, model, _ = built()
    one.save_model(model, f"{base}/export", max_shard_size=30)
    assert {"model.safetensors.index.json", "model-00001-of-00002.safetensors"} <= set(
        RemoteFolder(f"{base}/export").files()
    )
    one.save_model(model, f"{base}/export")
    assert set(RemoteFolder(f"{base}/export").files()) == {"model.safetensors"}
    one.save({"a": 3}, f"{base}/objects/a.pt")
    RemoteFolder(base).fetch(tmp_path, ["export/model.safetensors", "objects/a.pt"])
    assert torch.equal(load_file(tmp_path / "export" / "model.safetensors")["weight"], model.weight)
    assert torch.load(tmp_path / "objects" / "a.pt") == {"a": 3}
    assert spools() == []


def together(kind: str, url: str, spool: str) -> tuple[list[float], list[float]]:
    os.environ["TMPDIR"], remote.tempfile.tempdir = spool, None
    plugin = None
    if kind != "whole":
        plugin = FullyShardedDataParallelPlugin(
            transformer_cls_names_to_wrap=["Block"],
            state_dict_type="FULL_STATE_DICT" if kind == "full" else "SHARDED_STATE_DICT",
            sharded_save="per_rank" if kind == "per_rank" else None,
        )
    one = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = Language()
    run = one.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    step(one, *run, TOKENS)
    assert one.save_state(url) == url
    first = [step(one, *run, TOKENS) for _ in range(2)]
    one.load_state(url)
    return first, [step(one, *run, TOKENS) for _ in range(2)]


@pytest.mark.parametrize(("kind", "ranks"), [("whole", 2), ("sharded", 3), ("full", 2)])
def test_several_processes(kind, ranks, tmp_path):
    (tmp_path / "spool").mkdir()
    for first, again in run_ranks(together, ranks, kind, f"file://{tmp_path}/ck", str(tmp_path / "spool"), fresh=True):
        assert first == again
    assert [path for path in (tmp_path / "spool").rglob("*") if path.is_file() and path.name != "lock"] == []
    assert (tmp_path / "ck" / MANIFEST).exists()
    assert len(list((tmp_path / "ck").glob("random_states_*.pkl"))) == ranks


def test_files_of_single_processes_need_a_disk(tmp_path):
    (tmp_path / "spool").mkdir()
    with pytest.raises(RankError) as caught:
        run_ranks(together, 2, "per_rank", f"file://{tmp_path}/ck", str(tmp_path / "spool"), fresh=True)
    assert all("need a folder on a disk" in text for text in caught.value.tracebacks.values())

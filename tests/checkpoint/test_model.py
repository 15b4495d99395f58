import json
import logging
import os

import pytest
import safetensors.torch
import torch

from hasten.checkpoint import state, store
from hasten.checkpoint.model import save_model
from hasten.checkpoint.state import Contents
from hasten.weights.read import load_model
from hasten.world import process
from hasten.world.process import World
from tests.checkpoint.objects import Tied
from tests.ranks import run_ranks

ALONE = World()


def names(folder) -> list[str]:
    return sorted(os.listdir(folder))


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_one_file(tmp_path, caplog):
    model = Tied()
    with caplog.at_level(logging.WARNING):
        assert save_model(model, tmp_path / "new" / "m", world=ALONE) is None
    assert "Removed shared tensor {'head.weight'}" in caplog.text
    assert names(tmp_path / "new" / "m") == ["model.safetensors"]
    again = Tied()
    load_model(again, tmp_path / "new" / "m" / "model.safetensors")
    assert equal(model, again)


def test_a_state_dict_is_not_changed(tmp_path):
    given = Tied().state_dict()
    before = list(given)
    save_model(given, tmp_path, world=ALONE)
    assert list(given) == before


@pytest.mark.parametrize(
    ("safe", "stem", "suffix"), [(True, "model", ".safetensors"), (False, "pytorch_model", ".bin")]
)
def test_shards_and_index(tmp_path, safe, stem, suffix):
    model = Tied()
    save_model(model, tmp_path, max_shard_size=64, safe_serialization=safe, world=ALONE)
    index = json.loads((tmp_path / f"{stem}{suffix}.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert names(tmp_path) == sorted([*shards, f"{stem}{suffix}.index.json"])
    assert shards[0] == f"{stem}-00001-of-{len(shards):05d}{suffix}"
    merged = {}
    for shard in shards:
        part = safetensors.torch.load_file(tmp_path / shard) if safe else torch.load(tmp_path / shard)
        assert all(index["weight_map"][name] == shard for name in part)
        merged.update(part)
    wanted = {k: v for k, v in model.state_dict().items() if not (safe and k == "head.weight")}
    assert merged.keys() == wanted.keys()
    assert all(torch.equal(merged[name], wanted[name]) for name in wanted)
    assert index["metadata"]["total_size"] == sum(v.nbytes for k, v in wanted.items() if k != "head.weight")


def test_what_is_stale_goes_and_the_rest_stays(tmp_path):
    others = [
        "model-1.safetensors",
        "other.safetensors",
        "optimizer.bin",
        "pytorch_model.bin",
        "model-00009-of-00009.safetensors.bak",
    ]
    stale = ["model-00009-of-00009.safetensors", "model.safetensors.index.json"]
    for name in (*others, *stale):
        (tmp_path / name).write_text("x")
    save_model(Tied(), tmp_path, world=ALONE)
    assert names(tmp_path) == sorted([*others, "model.safetensors"])
    save_model(Tied(), tmp_path, max_shard_size=64, world=ALONE)
    assert "model.safetensors" not in names(tmp_path)
    save_model(Tied(), tmp_path, safe_serialization=False, world=ALONE)
    assert "model.safetensors.index.json" in names(tmp_path)


def test_in_a_checkpoint_both_stay_valid(tmp_path):
    model = Tied()
    state.save(tmp_path / "ck", Contents([model]), ALONE)
    save_model(torch.nn.Linear(9, 9), tmp_path / "ck", world=ALONE)
    store.verify(tmp_path / "ck", checksums=True)
    assert "model.safetensors" not in json.loads((tmp_path / "ck" / "hasten_manifest.json").read_text())["files"]
    state.save(tmp_path / "ck", Contents([model]), ALONE)
    state.load(tmp_path / "ck", Contents([Tied()]), ALONE)


def test_a_file_instead_of_a_folder_is_reported_and_nothing_happens(tmp_path, caplog):
    (tmp_path / "f").write_text("x")
    with caplog.at_level(logging.ERROR):
        save_model(Tied(), tmp_path / "f", world=ALONE)
    assert "should be a directory, not a file" in caplog.text
    assert (tmp_path / "f").read_text() == "x"


def test_models_without_values(tmp_path):
    with pytest.raises(RuntimeError, match="You can't save the model since some parameters are on the meta device"):
        save_model(torch.nn.Linear(2, 2, device="meta"), tmp_path / "m", world=ALONE)
    assert names(tmp_path) == []


def test_a_bad_size(tmp_path):
    with pytest.raises(ValueError, match="is not in a valid format"):
        save_model(Tied(), tmp_path / "m", max_shard_size="big", world=ALONE)
    assert names(tmp_path) == []


def test_a_failure_keeps_the_old_weights(tmp_path, monkeypatch):
    from hasten.weights.write import FolderWriter

    save_model(Tied(), tmp_path, world=ALONE)
    before = (tmp_path / "model.safetensors").read_bytes()

    def full(self, *arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FolderWriter, "save_text", full)
    with pytest.raises(OSError, match="No space left"):
        save_model(Tied(), tmp_path, max_shard_size=64, world=ALONE)
    assert names(tmp_path) == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


def on_ranks(folder: str, main_alone: bool, on_each_node: bool) -> bool:
    world = process.start(cpu=True)
    if world.is_main or not main_alone:
        save_model(Tied(), f"{folder}/{world.rank}", save_on_each_node=on_each_node)
    return os.path.exists(f"{folder}/{world.rank}")


@pytest.mark.parametrize("main_alone", [True, False])
def test_only_the_main_process_writes_and_nobody_waits(tmp_path, main_alone):
    assert run_ranks(on_ranks, 2, str(tmp_path), main_alone, False) == [True, False]

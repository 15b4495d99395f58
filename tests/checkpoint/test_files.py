import io
from collections import OrderedDict

import numpy
import pytest
import safetensors.torch
import torch

from hasten.checkpoint import files
from hasten.world import process
from hasten.world.process import World
from tests.ranks import run_ranks

ALONE = World()


def test_objects_round_trip(tmp_path):
    item = {"a": torch.ones(2), "b": numpy.arange(2), "c": [1, "x"]}
    assert files.save(item, tmp_path / "f", world=ALONE) is None
    read = files.load(tmp_path / "f")
    assert read["a"].tolist() == [1, 1]
    assert read["b"].tolist() == [0, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_safetensors_without_repeated_memory(tmp_path, kind):
    tensor = torch.arange(6.0).view(2, 3)
    given = kind(a=tensor.t(), b=tensor)
    files.save(given, str(tmp_path / "f"), safe_serialization=True, world=ALONE)
    assert torch.equal(safetensors.torch.load_file(tmp_path / "f")["a"], tensor.t())
    assert list(given) == ["a", "b"]


@pytest.mark.parametrize("item", [torch.ones(2), [torch.ones(2)], {"a": 1}])
def test_what_safetensors_can_not_hold(tmp_path, item):
    with pytest.raises(TypeError, match="safe_serialization=False"):
        files.save(item, tmp_path / "f", safe_serialization=True, world=ALONE)
    assert list(tmp_path.iterdir()) == []


def test_file_like_objects():
    buffer = io.BytesIO()
    files.save(torch.ones(2), buffer, world=ALONE)
    buffer.seek(0)
    assert files.load(buffer).tolist() == [1, 1]
    with pytest.raises(TypeError, match="needs a path"):
        files.save({}, buffer, safe_serialization=True, world=ALONE)


def test_a_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Parent directory .*nope does not exist"):
        files.save(1, tmp_path / "nope" / "f", world=ALONE)


def test_a_failure_keeps_the_old_file(tmp_path):
    files.save([1], tmp_path / "f", world=ALONE)
    with pytest.raises(AttributeError):
        files.save(lambda: 1, tmp_path / "f", world=ALONE)
    assert files.load(tmp_path / "f") == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def on_ranks(folder: str, on_each_node: bool) -> None:
    rank = process.start(cpu=True).rank
    files.save(rank, f"{folder}/{rank}", save_on_each_node=on_each_node)


def test_one_process_writes(tmp_path):
    run_ranks(on_ranks, 2, str(tmp_path), False)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]

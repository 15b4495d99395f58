import enum
import pickle
from collections import OrderedDict
from io import BytesIO

import numpy as np
import pytest
import torch

from hasten.weights import torch_file
from hasten.weights.torch_file import read_torch, read_torch_into


class Mode(enum.Enum):
    FAST = 1


def test_numpy_data_is_plain_data(tmp_path):
    item = {"array": np.arange(3), "scalar": np.float32(1.5), "type": np.dtype("int8"), "numbers": (1, 2.0, None)}
    torch.save(item, tmp_path / "f")
    read = read_torch(tmp_path / "f")
    assert read["array"].tolist() == [0, 1, 2]
    assert read["scalar"] == 1.5
    assert read["type"] == np.dtype("int8")
    assert read["numbers"] == (1, 2.0, None)


def test_the_list_of_allowed_types_is_the_users_again_afterwards(tmp_path):
    torch.save(1, tmp_path / "f")
    before = set(torch.serialization.get_safe_globals())
    read_torch(tmp_path / "f")
    assert set(torch.serialization.get_safe_globals()) == before


def test_another_type_is_named_with_the_ways_out(tmp_path):
    torch.save({"state": {0: {"mode": Mode.FAST}}}, tmp_path / "f")
    with pytest.raises(
        pickle.UnpicklingError, match=r"f holds objects of .*\.test_torch_file\.Mode.*weights_only=False"
    ):
        read_torch(tmp_path / "f")
    assert read_torch(tmp_path / "f", weights_only=False)["state"][0]["mode"] is Mode.FAST
    with torch.serialization.safe_globals([Mode]):
        assert read_torch(tmp_path / "f")["state"][0]["mode"] is Mode.FAST


def test_file_like_objects(tmp_path):
    buffer = BytesIO()
    torch.save(torch.ones(2), buffer)
    buffer.seek(0)
    assert read_torch(buffer).tolist() == [1, 1]


@pytest.mark.parametrize("content", [b"", b"not a file", b"PK\x03\x04 and then nothing"])
def test_damaged_files(tmp_path, content):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises((RuntimeError, pickle.UnpicklingError), match=str(tmp_path / "f")):
        read_torch(tmp_path / "f")
    with pytest.raises((RuntimeError, pickle.UnpicklingError), match=str(tmp_path / "f")):
        read_torch_into(tmp_path / "f", None)


def test_a_truncated_file(tmp_path):
    torch.save(torch.ones(1000), tmp_path / "f")
    content = (tmp_path / "f").read_bytes()
    (tmp_path / "f").write_bytes(content[:-100])
    with pytest.raises(RuntimeError, match="damaged"):
        read_torch(tmp_path / "f")


def states() -> tuple[dict, dict]:
    saved = {
        "state": {0: {"a": torch.arange(20_000.0), "step": torch.tensor(3.0)}, 1: {"a": torch.ones(2, 3), "n": 4}},
        "groups": [{"lr": 0.1, "params": [0, 1]}, (torch.zeros(2), "x")],
        "ordered": OrderedDict(b=torch.ones(3).bfloat16(), empty=torch.zeros(0)),
    }
    live = {
        "state": {0: {"a": torch.zeros(20_000), "step": torch.tensor(0.0)}, 1: {"a": torch.zeros(3, 2)}},
        "groups": [{"lr": 0.2}, (torch.full((2,), 7.0), "y")],
        "ordered": OrderedDict(b=torch.zeros(3)),
    }
    return saved, live


@pytest.mark.parametrize("known", [True, False])
def test_reading_into_memory_that_exists(tmp_path, monkeypatch, known):
    if not known:  # the place of the tensors in the file can not be found out
        monkeypatch.setattr(torch_file, "_start_of_mapping", lambda path, mapped: None)
    saved, live = states()
    torch.save(saved, tmp_path / "f")
    read = read_torch_into(tmp_path / "f", live)
    assert read["state"][0]["a"] is live["state"][0]["a"]
    assert read["state"][0]["step"] is live["state"][0]["step"]
    assert read["groups"][1][0] is live["groups"][1][0]
    assert torch.equal(live["state"][0]["a"], saved["state"][0]["a"])
    assert live["state"][0]["step"] == 3
    assert torch.equal(read["state"][1]["a"], torch.ones(2, 3))  # another shape: new memory
    assert live["state"][1]["a"].sum() == 0
    assert read["state"][1]["n"] == 4
    assert read["groups"] == [{"lr": 0.1, "params": [0, 1]}, read["groups"][1]]
    assert torch.equal(read["ordered"]["b"], torch.ones(3).bfloat16())  # another type: new memory
    assert type(read["ordered"]) is OrderedDict
    # Nothing is a view of the file: it may change now.
    (tmp_path / "f").write_bytes(b"\0" * (tmp_path / "f").stat().st_size)
    assert torch.equal(live["state"][0]["a"], saved["state"][0]["a"])
    assert torch.equal(read["state"][1]["a"], torch.ones(2, 3))


def test_the_place_of_tensors_in_a_file_is_found(tmp_path):
    saved, _ = states()
    torch.save(saved, tmp_path / "f")
    mapped = read_torch(tmp_path / "f", "cpu", mmap=True)
    start = torch_file._start_of_mapping(tmp_path / "f", mapped)
    content = (tmp_path / "f").read_bytes()
    place = mapped["state"][0]["a"].data_ptr() - start
    assert content[place : place + 80_000] == saved["state"][0]["a"].numpy().tobytes()


def test_tensors_that_do_not_tell_their_place_are_copied(tmp_path):
    torch.save({"a": torch.arange(9.0), "hidden": {1: {2}}, "other": torch.zeros(4)}, tmp_path / "f")
    mapped = read_torch(tmp_path / "f", "cpu", mmap=True)
    del mapped["other"]
    assert torch_file._start_of_mapping(tmp_path / "f", mapped) is None


def test_shared_and_turned_tensors(tmp_path):
    tensor = torch.arange(6.0).view(2, 3)
    torch.save({"a": tensor, "turned": tensor.t(), "part": tensor[1]}, tmp_path / "f")
    read = read_torch_into(tmp_path / "f", None)
    assert torch.equal(read["a"], tensor)
    assert torch.equal(read["turned"], tensor.t())
    assert torch.equal(read["part"], tensor[1])


def test_old_files_and_unsafe_reading_still_work(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "old", _use_new_zipfile_serialization=False)
    assert read_torch_into(tmp_path / "old", None)["a"].tolist() == [1, 1]
    torch.save({"a": Mode.FAST}, tmp_path / "f")
    assert read_torch_into(tmp_path / "f", None, weights_only=False)["a"] is Mode.FAST

import json
import math
import struct
import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasten.weights.safe_file import SafeFile
from tests.weights.test_write import every_dtype


def test_what_the_library_wrote_is_read(tmp_path):
    tensors = {**every_dtype(), "scalar": torch.tensor(3), "empty": torch.zeros(0, 2)}
    safetensors.torch.save_file(tensors, tmp_path / "f", {"who": "me"})
    with SafeFile(tmp_path / "f") as file:
        assert file.metadata == {"who": "me"}
        assert file.entries.keys() == tensors.keys()
        for name, tensor in tensors.items():
            read = file.read(name)
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(
                read.float() if not read.is_complex() else read, tensor.float() if not read.is_complex() else tensor
            )


def test_reading_into_memory_that_exists(tmp_path):
    safetensors.torch.save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / "f")
    target = torch.zeros(2, 3)
    with SafeFile(tmp_path / "f") as file:
        file.read_into("a", target)
        with pytest.raises(AssertionError):
            file.read_into("a", torch.zeros(3, 2))
    assert target.tolist() == [[0, 1, 2], [3, 4, 5]]


def damaged(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        struct.pack("<Q", 10**12) + b"{}",
        struct.pack("<Q", 4) + b"\xff\xff\xff\xff",
        damaged([]),
        damaged({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"),  # ends too early
        damaged({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, b"12345678"),  # too short for its shape
        damaged({"a": {"dtype": "X9", "shape": [2], "data_offsets": [0, 8]}}, b"12345678"),
        damaged({"a": {"shape": [2]}}),
    ],
)
def test_damaged_files_are_refused(tmp_path, content):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(RuntimeError, match=r"f is not a readable safetensors file"):
        SafeFile(tmp_path / "f")


def test_a_pointer_of_git_lfs_is_told_from_damage(tmp_path):
    (tmp_path / "f").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(RuntimeError, match=r"pointer of Git LFS.*git lfs pull"):
        SafeFile(tmp_path / "f")


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        SafeFile(tmp_path / "f")


@given(st.data())
def test_a_part_is_that_part_of_the_whole(data):
    shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
    starts = [data.draw(st.integers(0, size)) for size in shape]
    sizes = [data.draw(st.integers(0, size - start)) for size, start in zip(shape, starts, strict=True)]
    whole = torch.arange(float(math.prod(shape))).reshape(shape)
    with tempfile.TemporaryDirectory() as folder:
        safetensors.torch.save_file({"before": torch.ones(3), "a": whole}, Path(folder, "f"))
        with SafeFile(Path(folder, "f")) as file:
            part = file.read_part("a", starts, sizes)
    wanted = whole[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]
    assert torch.equal(part, wanted)

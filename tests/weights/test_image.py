import os
from typing import Any

import pytest
import torch

from hasten.weights import image
from hasten.weights.image import LARGE, safetensors_image, torch_image
from hasten.weights.write import FolderWriter
from tests.checkpoint.objects import make

COUNT = LARGE // 4 + 3  # floats of a large tensor, of an odd size


def model_state() -> dict[str, torch.Tensor]:
    """Large and small tensors of several types, some empty, some not one after the other in memory."""
    torch.manual_seed(0)
    return {
        "a": torch.randn(COUNT),
        "b": torch.randn(7).bfloat16(),
        "c": torch.randn(300, 400).t(),
        "d": torch.empty(0),
        "e": torch.randn(2 * COUNT).bfloat16(),
        "f": torch.arange(5) > 2,
        "g": torch.randn(()),
        "h": torch.randn(1, 16, 64, 64).to(memory_format=torch.channels_last),
    }


def torch_state() -> dict[str, Any]:
    shared = torch.randn(2 * COUNT)
    state = model_state()
    return {"state": {0: state, 1: {"x": shared, "y": shared[5:9]}}, "groups": [{"lr": 0.1, "params": [0, 1]}]}


def whole(found: image.Image) -> bytes:
    return b"".join(bytes(part) for part in found.parts(0, found.size))


def test_a_safetensors_file(tmp_path):
    state = model_state()
    with FolderWriter(tmp_path) as writer:
        writer.save_safetensors("x", state)
    found = safetensors_image(state)
    assert whole(found) == (tmp_path / "x").read_bytes()
    assert len(found.large) == 4


def test_what_safetensors_can_not_hold():
    with pytest.raises(TypeError, match="'x' is a int"):
        safetensors_image({"x": 3})


@pytest.mark.parametrize("kind", ["tensors", "optimizers", "nothing"])
def test_a_file_of_torch(tmp_path, kind):
    state: Any = torch_state() if kind == "tensors" else {}
    if kind == "optimizers":
        state = [optimizer.state_dict() for optimizer in make(2).optimizers]
    with FolderWriter(tmp_path) as writer:
        writer.save_torch("x", state)
    found = torch_image(state)
    assert whole(found) == (tmp_path / "x").read_bytes()
    assert len(found.large) == (5 if kind == "tensors" else 0)


def test_the_temporary_file_takes_no_room(tmp_path, monkeypatch):
    if os.name == "nt":
        pytest.skip("files may have no holes here")
    sizes = []
    places = image._places

    def watched(file: Any) -> Any:
        status = os.fstat(file.fileno())
        sizes.append((status.st_size, status.st_blocks * 512))
        return places(file)

    monkeypatch.setattr(image, "_places", watched)
    torch_image({"x": torch.zeros(16 << 20, dtype=torch.uint8)})
    [(size, used)] = sizes
    assert size > 16 << 20
    assert used < 1 << 20


def test_ranges():
    found = torch_image(torch_state())
    expected = whole(found)
    for start, stop in [(0, 1), (100, 5000), (found.size - 1, found.size), (LARGE, 2 * LARGE), (7, found.size - 7)]:
        assert b"".join(bytes(part) for part in found.parts(start, stop)) == expected[start:stop]


def test_other_bytes_between_large_tensors():
    mine, other = torch_state(), torch_state()
    mine["groups"][0]["lr"], mine["state"][0]["b"] = 0.3, torch.ones(7).bfloat16()
    expected = whole(torch_image(mine))
    found = torch_image(other)
    assert whole(found) != expected
    assert found.large == torch_image(mine).large
    assert whole(found.with_small(torch_image(mine).small())) == expected
    assert len(torch_image(mine).small()) < LARGE


@pytest.mark.parametrize("ranges", [[(0, 70000)], [(70000, 70010), (200000, 500001)], []])
def test_copies_of_ranges(ranges):
    state = torch_state()
    found = torch_image(state)
    expected, small = whole(found), found.small()
    copies = found.copied(ranges)
    for tensor in (*state["state"][0].values(), state["state"][1]["x"]):
        tensor.zero_()
    assert copies.large == found.large
    complete = copies.with_small(small)
    for start, stop in ranges:
        assert b"".join(bytes(part) for part in complete.parts(start, stop)) == expected[start:stop]

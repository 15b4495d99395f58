from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hasten.cli.model_sizes import Sizes, layer_of, library_in, read_config, sizes_of_model, sizes_of_path


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("encoder.layer.3.attention.weight", "encoder.layer.3"),
        ("model.layers.10.mlp.experts.7.up.weight", "model.layers.10"),
        ("0.weight", "0"),
        ("embeddings.word.weight", "embeddings.word"),
        ("scales.0", "scales"),
        ("bias", "bias"),
    ],
)
def test_layers_by_name(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_a_file_by_its_header(tmp_path: Path) -> None:
    tensors = {
        "l.0.w": torch.zeros(3, 4, dtype=torch.bfloat16),
        "l.0.b": torch.zeros(4),
        "l.1.w": torch.zeros(5, dtype=torch.float8_e4m3fn),
        "n": torch.zeros(2, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = sizes_of_path(str(tmp_path))
    assert found == Sizes(
        total=100, largest=64, layer="l.0", parameters=21,
        stored={"bfloat16": 24, "float32": 16, "float8_e4m3fn": 5, "int64": 16},
    )  # fmt: skip


def test_a_file_of_other_things_is_refused(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "x.pt")
    with pytest.raises(RuntimeError, match="does not hold tensors by name"):
        sizes_of_path(str(tmp_path / "x.pt"))


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    with pytest.raises(FileNotFoundError, match="model-00001-of-00001"):
        sizes_of_path(str(index))


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1000, 1000), nn.Sequential(nn.Linear(1000, 10, bias=False), nn.BatchNorm1d(10)))
    found = sizes_of_model(model)
    assert (found.total, found.largest, found.layer) == (4_004_000 + 40_000 + 4 * 40 + 8, 4_004_000, "0")
    assert found.parameters == 1_001_000 + 10_000 + 20


def test_a_model_without_tensors() -> None:
    assert sizes_of_model(nn.ReLU()) == Sizes(0, 0, "", 0)


def test_configurations(tmp_path: Path) -> None:
    assert read_config(tmp_path / "config.json") == {}
    (tmp_path / "config.json").write_text('{"architecture": "resnet50", "architectures": null}')
    assert library_in(read_config(tmp_path / "config.json")) == "timm"
    assert library_in({"architectures": ["BertModel"]}) == "transformers"
    assert library_in({"other": 1}) is None
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        read_config(tmp_path / "config.json")

"""What a sharded model of transformers writes, `from_pretrained` reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.extras.models import FAMILIES, LIMIT, adamw, alone, seeded, sharding, train
from tests.ranks import run_ranks

STEPS = 2


def saved(name: str, folder: str, way: str) -> bool:
    accelerator = sharding()
    model = seeded(FAMILIES[name])
    model, optimizer = accelerator.prepare(model, adamw(model))
    train(accelerator, model, optimizer, steps=STEPS)
    inner: Any = accelerator.unwrap_model(model)
    whole = accelerator.get_state_dict(model)
    if way == "save_model":
        accelerator.save_model(model, folder)
        if accelerator.is_main_process:
            inner.config.save_pretrained(folder)
    else:
        inner.save_pretrained(
            folder, is_main_process=accelerator.is_main_process, state_dict=whole, save_function=accelerator.save
        )
    accelerator.wait_for_everyone()
    return inner.get_output_embeddings().weight is inner.get_input_embeddings().weight


@pytest.mark.parametrize("way", ["save_model", "save_pretrained"])
@pytest.mark.parametrize("name", FAMILIES)
def test_files_are_read_back(name, way, tmp_path: Path):
    model = seeded(FAMILIES[name])
    alone(model, steps=STEPS)
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert run_ranks(saved, 2, name, str(tmp_path), way, timeout=LIMIT) == [is_tied, is_tied]
    assert is_tied is (name in ("tied llama", "t5", "gpt2"))
    back = type(model).from_pretrained(tmp_path)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(back.state_dict()[key], value, rtol=1e-4, atol=1e-5)
    assert (back.get_output_embeddings().weight is back.get_input_embeddings().weight) is is_tied
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        written = sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118
    assert written == sum(each.numel() for each in model.parameters())  # tied weights once

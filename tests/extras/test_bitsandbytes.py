"""Quantized weights stay whole on every rank; adapters beside them are sharded and trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from tests.extras.models import LIMIT, adamw, alone, llama, seeded, sharding, train
from tests.ranks import run_ranks

STEPS = 10
KINDS: dict[str, dict[str, Any]] = {
    "4 bits": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "4 bits, held in bf16": {"load_in_4bit": True, "bnb_4bit_quant_storage": torch.bfloat16},
    "8 bits": {"load_in_8bit": True},
}


def quantized(folder: str, kind: str) -> Any:
    base = LlamaForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(**KINDS[kind]), dtype=torch.float32, device_map={"": "cpu"}
    )
    base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(base, config)


def sharded(folder: str, kind: str, **fields: Any) -> tuple[list[float], set[str], dict[str, torch.Tensor]]:
    accelerator = sharding(**fields)
    model = seeded(quantized, folder, kind)
    model, optimizer = accelerator.prepare(model, adamw(model))
    losses = train(accelerator, model, optimizer, STEPS)
    whole = {name for name, each in model.named_parameters() if not isinstance(each, DTensor)}
    return losses, whole, accelerator.get_state_dict(model)


@pytest.mark.parametrize("how", [{}, {"activation_checkpointing": True}], ids=["plain", "recomputed"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_quantized_weights(kind, how, tmp_path: Path):
    seeded(llama, hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)  # kernels want widths like these
    model = seeded(quantized, str(tmp_path), kind)
    packed = {name for name, each in model.named_parameters() if type(each).__name__ in ("Params4bit", "Int8Params")}
    assert len(packed) == 14
    expected = alone(model, steps=STEPS)
    for rank, (losses, whole, state) in enumerate(run_ranks(sharded, 2, str(tmp_path), kind, timeout=LIMIT, **how)):
        assert losses == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert whole == packed
        assert set(state) == (set() if rank else set(model.state_dict()))
        for name, value in state.items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-5, equal_nan=True)

"""Adapters of PEFT on a sharded base, which is frozen."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from hasten.checkpoint.fsdp import load_fsdp_model, save_fsdp_model
from tests.extras.models import LIMIT, adamw, alone, llama, loss_of, seeded, sharding, tokens, train
from tests.ranks import run_ranks

CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16 base": {"dtype": torch.bfloat16},
    "tied": {"tied": True},
    "tied, bf16 base": {"tied": True, "dtype": torch.bfloat16},
    "own head": {"save": ["lm_head"]},
    "own head, bf16 base": {"save": ["lm_head"], "dtype": torch.bfloat16},
}


def lora(dtype: torch.dtype = torch.float32, save: list[str] | None = None, **settings: Any) -> PeftModel:
    """Adapters in fp32 that already change the result."""
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], modules_to_save=save, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return get_peft_model(llama(**settings).to(dtype), config)


def adapted(case: str, folder: str, **fields: Any) -> tuple[list[float], bool, list[str], float]:
    accelerator = sharding(**fields)
    model = seeded(lora, **CASES[case])
    before = {name: each.clone() for name, each in model.named_parameters() if not each.requires_grad}
    model, optimizer = accelerator.prepare(model, adamw(model))
    losses = train(accelerator, model, optimizer)
    now = dict(model.named_parameters())
    assert all(isinstance(each, DTensor) for each in now.values())
    same = all(
        torch.equal(now[name].full_tensor(), each) and now[name].dtype == each.dtype for name, each in before.items()
    )
    whole = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        model.save_pretrained(folder, state_dict=whole)
    accelerator.wait_for_everyone()
    with torch.no_grad():
        last = loss_of(model, tokens(0, 0)).item()
    return losses, same, sorted(whole), last


@pytest.mark.parametrize("how", [{}, {"activation_checkpointing": True}], ids=["plain", "recomputed"])
@pytest.mark.parametrize("case", CASES)
def test_adapters_train_as_on_one_process(case, how, tmp_path: Path):
    model = seeded(lora, **CASES[case])
    expected = alone(model)
    names = sorted(model.state_dict())
    # A head in bf16 is trained in bf16, where the order of a sum shows.
    close = 1e-5 if all(each.dtype is torch.float32 for each in model.parameters() if each.requires_grad) else 5e-3
    results = run_ranks(adapted, 2, case, str(tmp_path), timeout=LIMIT, **how)
    for rank, (losses, same, saved, _) in enumerate(results):
        assert losses == pytest.approx(expected, rel=close, abs=close)
        assert same
        assert saved == ([] if rank else names)
    settings = {key: value for key, value in CASES[case].items() if key == "tied"}
    base = seeded(llama, **settings).to(CASES[case].get("dtype", torch.float32))
    back = PeftModel.from_pretrained(base, tmp_path)
    for name, value in get_peft_model_state_dict(back).items():
        torch.testing.assert_close(value, get_peft_model_state_dict(model)[name], rtol=10 * close, atol=4 * close)
    with torch.no_grad():
        assert loss_of(back, tokens(0, 0)).item() == pytest.approx(results[0][3], rel=10 * close)


def generated() -> list[list[int]]:
    accelerator = sharding()
    model = seeded(lora)
    model = accelerator.prepare(model).eval()
    prompt = tokens(accelerator.process_index, 0)
    return model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=5
    ).tolist()


def test_generation():
    model = seeded(lora).eval()
    for rank, found in enumerate(run_ranks(generated, 2, timeout=LIMIT)):
        prompt = tokens(rank, 0)
        mask = torch.ones_like(prompt)
        assert (
            found == model.generate(input_ids=prompt, attention_mask=mask, do_sample=False, max_new_tokens=5).tolist()
        )


def adapters_alone(folder: str) -> dict[str, Any]:
    """Save the adapters of a sharded model by themselves, set them to zero, and load them."""
    accelerator = sharding(state_dict_type="FULL_STATE_DICT")
    plugin = accelerator.state.fsdp_plugin
    model = seeded(lora)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    model = accelerator.prepare(model)
    save_fsdp_model(plugin, accelerator, model, folder, adapter_only=True)
    with torch.no_grad():
        for each in model.parameters():
            if each.requires_grad:
                each.zero_()
    accelerator.wait_for_everyone()
    missing, unexpected = load_fsdp_model(plugin, accelerator, model, folder, adapter_only=True)
    same = all(torch.equal(each.full_tensor(), before[name]) for name, each in model.named_parameters())
    accelerator.save_state(f"{folder}/ck")  # and a whole last checkpoint
    return {
        "trained": trained,
        "same": same,
        "missing": sorted(missing) == sorted(set(before) - set(trained)),
        "unexpected": list(unexpected),
        "values": {name: before[name] for name in trained},
    }


def test_adapters_are_saved_and_loaded_by_themselves(tmp_path: Path):
    results = run_ranks(adapters_alone, 2, str(tmp_path), timeout=LIMIT)
    saved = torch.load(tmp_path / "pytorch_model_fsdp.bin", weights_only=True)
    for found in results:
        assert found["same"]
        assert found["missing"]
        assert found["unexpected"] == []
    assert sorted(saved) == sorted(results[0]["trained"])
    assert all("lora_A.default.weight" in name or "lora_B.default.weight" in name for name in saved)
    for name, value in results[0]["values"].items():
        assert type(saved[name]) is torch.Tensor
        assert torch.equal(saved[name], value)
    whole = load_file(tmp_path / "ck" / "pytorch_model_fsdp.safetensors")
    assert all(torch.equal(whole[name], value) for name, value in saved.items())

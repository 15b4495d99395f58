"""Files of transformers, read by each process for itself, or by the first one for all."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras.models import FAMILIES, LIMIT, adamw, alone, seeded, sharding, train
from tests.ranks import RankError, run_ranks

STEPS = 3


def empty(name: str) -> Any:
    """A model without values; ties are made when a model of transformers is built."""
    with torch.device("meta"):
        return FAMILIES[name]()


def loaded(name: str, folder: str) -> tuple[bool, list[float]]:
    accelerator = sharding()
    model = empty(name)
    model, optimizer = accelerator.prepare(model, adamw(model))
    accelerator.load_weights(model, folder, initialise=model._init_weights)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return tied, train(accelerator, model, optimizer, steps=STEPS)


def from_first(name: str, folder: str) -> tuple[bool, list[float]]:
    """Only rank 0 reads the files."""
    accelerator = sharding(cpu_ram_efficient_loading=True)
    model: Any = type(seeded(FAMILIES[name])).from_pretrained(folder)
    if not accelerator.is_main_process:  # what it has read would be another model's
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.is_meta:
                    parameter.fill_(3.0)
    model, optimizer = accelerator.prepare(model, adamw(model))
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return tied, train(accelerator, model, optimizer, steps=STEPS)


@pytest.mark.parametrize("way", [loaded, from_first])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "mixtral"])
def test_a_model_is_loaded_into_its_shards(name: str, way: Any, tmp_path: Path) -> None:
    model = seeded(FAMILIES[name])
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    wanted = alone(model, steps=STEPS)
    for tied, losses in run_ranks(way, 2, name, str(tmp_path), timeout=LIMIT):
        assert tied is is_tied
        torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-5)


def test_files_in_other_names_than_the_model_has(tmp_path: Path) -> None:
    """transformers joins the experts of some models when it reads them: rank 0 can do that for all."""
    model = seeded(FAMILIES["mixtral"])
    model.save_pretrained(tmp_path)
    with pytest.raises(RankError, match=r"not in the model: .*experts.*, and \d+ more"):
        run_ranks(loaded, 2, "mixtral", str(tmp_path), timeout=LIMIT)
    wanted = alone(model, steps=STEPS)
    for _, losses in run_ranks(from_first, 2, "mixtral", str(tmp_path), timeout=LIMIT):
        torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-5)

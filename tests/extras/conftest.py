"""Tests with libraries that `hasten` does without: `make test-extras` gives them an environment of their own.

Nothing is fetched: models are tiny, and their weights random.
"""

import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported; ranks inherit it
os.environ["TOKENIZERS_PARALLELISM"] = "false"


# Warnings are errors here too, but for what these libraries do themselves.
ALLOWED = (
    # T5 hands its position bias, a view, from layer to layer; nothing changes it in place.
    "ignore:FSDP2-wrapped module .FSDP(Recomputed)?T5Block. returned a view tensor:UserWarning",
    # PEFT asks transformers for a name that is going away.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
    # torch.compile looks at all that a tensor has.
    "ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    for warning in ALLOWED:
        config.addinivalue_line("filterwarnings", warning)

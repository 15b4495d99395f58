"""Tiny models of transformers with random weights, and the loop that trains one: on one process, or sharded over several."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from hasten import Accelerator, FullyShardedDataParallelPlugin

WORDS = 32
STEPS = 20
BATCH = 2
LENGTH = 6
LIMIT = 180.0  # seconds for a case; the first one of a rank imports these libraries, which is slow on a busy machine

_DECODER: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(tied: bool = False, **settings: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**_DECODER, "tie_word_embeddings": tied, **settings}))


def tied_llama() -> PreTrainedModel:
    return llama(tied=True)


def mixtral() -> PreTrainedModel:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(**_DECODER, **experts, router_aux_loss_coef=0.02))


def t5() -> PreTrainedModel:
    config = T5Config(
        vocab_size=WORDS,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def gpt2() -> PreTrainedModel:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(vocab_size=WORDS, n_positions=32, n_embd=16, n_layer=2, n_head=4, eos_token_id=2, **dropout)
    return GPT2LMHeadModel(config)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "tied llama": tied_llama,
    "t5": t5,
    "gpt2": gpt2,
    "mixtral": mixtral,
}


def seeded(build: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    """What a function builds, with the same random weights everywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build(*args, **settings)


def tokens(rank: int, step: int, micro: int = 0) -> Tensor:
    """Words that follow one another, from other beginnings on each rank and in each step."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    first = torch.randint(WORDS - 3, (BATCH, 1), generator=generator)
    return 3 + (first + torch.arange(LENGTH)) % (WORDS - 3)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch).loss


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)  # small gradients must not be blown up


def alone(model: nn.Module, ranks: int = 2, micros: int = 1, steps: int = STEPS) -> list[float]:
    """Train on one process with what several ranks would see; returns the losses."""
    optimizer = adamw(model)
    losses = []
    for step in range(steps):
        for micro in range(micros):
            found = [loss_of(model, tokens(rank, step, micro)) / ranks for rank in range(ranks)]
            (sum(found, torch.zeros(())) / micros).backward()
            losses.append(sum(each.item() for each in found))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, steps: int = STEPS) -> list[float]:
    """Train a prepared model; returns the losses, averaged over the ranks."""
    micros = accelerator.gradient_accumulation_steps
    losses = []
    for step in range(steps):
        for micro in range(micros):
            with accelerator.accumulate(model):
                loss = loss_of(model, tokens(accelerator.process_index, step, micro))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
    return losses


def sharding(precision: str = "no", micros: int = 1, **fields: Any) -> Accelerator:
    """An Accelerator that shards; the layers are those that a model names itself."""
    plugin = FullyShardedDataParallelPlugin(**fields)
    return Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=micros, fsdp_plugin=plugin)

"""What users do with a sharded model beside training it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import CommDebugMode

from tests.parallel.test_gathered import accelerate
from tests.parallel.test_shard import language, loss_of, tokens
from tests.ranks import run_ranks

STEPS = 3


def evaluated(kind: str) -> tuple[list[Tensor], list[Tensor]]:
    accelerator = accelerate(kind)
    model, optimizer = language(tied=True), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    outputs = []
    for step in range(STEPS):
        accelerator.backward(loss_of(model, tokens(accelerator.process_index, step)))
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad() if step % 2 else torch.inference_mode():
            outputs.append(accelerator.gather(model(tokens(accelerator.process_index, 9))).clone())
        model.train()
    with accelerator.gathered(model) as whole:
        return outputs, [each.detach().clone() for each in whole.parameters()]


@pytest.mark.parametrize("kind", ["sharded", "recomputed", "offloaded"])
def test_evaluation_between_steps(kind):
    model = language(tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    expected = []
    for step in range(STEPS):
        for rank in range(2):
            (loss_of(model, tokens(rank, step)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            expected.append(torch.cat([model(tokens(rank, 9)) for rank in range(2)]))
    for outputs, parameters in run_ranks(evaluated, 2, kind):
        torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(parameters, [each.detach() for each in model.parameters()], rtol=1e-4, atol=1e-5)


def held_back() -> tuple[bool, list[int], bool]:
    accelerator = accelerate()
    model = accelerator.prepare(language())
    counts = []
    for contexts in (2, 0):
        with CommDebugMode() as collectives:
            if contexts:
                with accelerator.no_sync(model):
                    loss = loss_of(model, tokens(0, 0))
                    accelerator.backward(loss)
            else:
                accelerator.backward(loss_of(model, tokens(0, 1)))
        found = collectives.get_comm_counts().items()
        counts.append(sum(count for kind, count in found if "reduce_scatter" in str(kind)))
    bare = accelerator.unwrap_model(model)
    return bare is model, counts, all(each.grad is not None for each in model.parameters())


@pytest.mark.filterwarnings("ignore")
def test_no_sync_and_unwrap_model():
    for same, counts, has_gradients in run_ranks(held_back, 2):
        assert same
        assert counts == [0, 4]
        assert has_gradients


def compiled(which: str, kind: str) -> dict[str, Any]:
    counter = CompileCounter()
    accelerator = accelerate(kind)
    model: Any = language(tied=True)
    if which == "layers":
        for layer in model.layers:
            layer.compile(backend=counter)
    else:
        model = torch.compile(model, backend=counter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    given = model
    model, optimizer = accelerator.prepare(model, optimizer)
    assert model is given
    for step in range(STEPS):
        with accelerator.no_sync(model):
            accelerator.backward(loss_of(model, tokens(accelerator.process_index, step)) / 2)
        accelerator.backward(loss_of(model, tokens(accelerator.process_index, step, 1)) / 2)
        optimizer.step()
        optimizer.zero_grad()
    own = accelerator.unwrap_model(model, keep_torch_compile=False)
    with accelerator.gathered(model) as whole:
        assert whole is own
        parameters = {name: each.detach().clone() for name, each in whole.named_parameters()}
    return {
        "graphs": counter.frame_count,
        "units": [name for name, module in own.named_modules() if isinstance(module, FSDPModule)],
        "planned": len(accelerator.explain(model).details.units),
        "parameters": parameters,
        "state": list(accelerator.get_state_dict(model)),
        "streamed": sorted(name for name, _ in accelerator.stream_weights(model)),
    }


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own look at them
@pytest.mark.parametrize(("which", "kind"), [("layers", "sharded"), ("layers", "recomputed"), ("model", "sharded")])
def test_compiled_models_are_sharded(which, kind):
    model = language(tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        for rank in range(2):
            for micro in range(2):
                (loss_of(model, tokens(rank, step, micro)) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    names = [name for name, _ in model.named_parameters()]
    for rank, found in enumerate(run_ranks(compiled, 2, which, kind, timeout=120)):
        assert found["graphs"] >= 1
        assert found["units"] == ["", "embedding", "layers.0", "layers.1", "norm", "head"]
        assert found["planned"] == 4
        assert list(found["parameters"]) == names
        expected = dict(model.named_parameters())
        torch.testing.assert_close(found["parameters"], expected, rtol=1e-4, atol=1e-5)
        assert found["streamed"] == sorted(model.state_dict())
        assert sorted(found["state"]) == (sorted(model.state_dict()) if rank == 0 else [])

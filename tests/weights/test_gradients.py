from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hasten import Accelerator
from hasten.weights.gradients import clip_grad_norm_, clip_grad_value_, local_parts, multiply_all
from tests.plain import TinyMLP
from tests.ranks import run_ranks

SHAPES = [(5, 4), (4, 6), (3,), (7, 2), (1,), (2, 3, 2)]
NORMS = [1.0, 2.0, 3.0, float("inf")]


def whole(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def with_gradients(gradients: list[Any]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return parameters


def clipped(gradients: list[Tensor], max_norm: float, norm_type: float) -> tuple[float, list[Tensor]]:
    """What torch does with whole gradients in one process."""
    parameters = with_gradients([gradient.clone() for gradient in gradients])
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    return norm.item(), [parameter.grad for parameter in parameters if parameter.grad is not None]


# ---- plain tensors ----


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_plain_gradients_are_clipped_as_torch_clips_them(norm_type, max_norm):
    norm, expected = clipped(whole(), max_norm, norm_type)
    for form in (list, tuple, iter):
        parameters = with_gradients(whole())
        found = clip_grad_norm_(form(parameters), max_norm, norm_type)
        assert found.item() == norm
        assert found.shape == ()
        for parameter, gradient in zip(parameters, expected, strict=True):
            assert torch.equal(parameter.grad, gradient)


def test_one_tensor_some_without_a_gradient_and_none_at_all():
    parameter = nn.Parameter(torch.zeros(2))
    assert clip_grad_norm_([parameter, nn.Parameter(torch.zeros(1))], 1.0).item() == 0.0
    assert clip_grad_norm_([], 1.0).item() == 0.0
    clip_grad_value_([parameter], 1.0)
    clip_grad_value_([], 1.0)
    assert parameter.grad is None
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_(parameter, 1.0).item() == 5.0
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)


def test_where_there_is_no_operation_on_all_at_once(monkeypatch):
    from torch.nn.utils import get_total_norm

    def without(tensors: Any, norm_type: float = 2.0, *, foreach: bool | None = None) -> Tensor:
        if foreach:
            raise RuntimeError("foreach=True was passed, but can't use the foreach API on such tensors")
        return get_total_norm(tensors, norm_type, foreach=False)

    monkeypatch.setattr("hasten.weights.gradients.get_total_norm", without)
    parameter = with_gradients([torch.tensor([3.0, 4.0])])
    assert clip_grad_norm_(parameter, 10.0).item() == 5.0


def test_values_are_limited():
    parameters = with_gradients([torch.tensor([-3.0, 0.5]), torch.tensor([2.0])])
    clip_grad_value_(iter(parameters), 1.0)
    assert [parameter.grad.tolist() for parameter in parameters] == [[-1.0, 0.5], [1.0]]


def test_tensors_of_every_kind_are_multiplied():
    tensors = [torch.ones(2), torch.ones(3, dtype=torch.bfloat16), torch.ones(2, 2).to_sparse()]
    multiply_all(tensors, torch.tensor(0.5, dtype=torch.float64))
    multiply_all(iter(tensors), 0.5)
    assert [tensor.to_dense().unique().tolist() for tensor in tensors] == [[0.25]] * 3
    multiply_all([], 2.0)


# ---- DTensors ----


def spread(meshes: str) -> list[Any]:
    """The gradients of `whole()`: plain, sharded in every way and replicated, on one mesh or on two."""
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    one = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    other = init_device_mesh("cpu", (2, size // 2) if size % 2 == 0 else (1, size), mesh_dim_names=("out", "in"))
    first = [(one, [Shard(0)]), (one, [Shard(1)]), (one, [Replicate()]), (one, [Shard(0)])]
    second: list[Any] = [(other, [Shard(0), Shard(1)]), (other, [Replicate(), Shard(0)])]
    places = {"plain and one": [None, None, *first], "one": [*first, first[0], first[2]]}
    places["plain and two"] = [None, None, *second, *first[:2]]
    # The places that shapes allow: the second and third shapes have too few dimensions for some.
    chosen: list[Any] = []
    for gradient, place in zip(whole(), places[meshes], strict=True):
        if place is None:
            chosen.append(gradient)
            continue
        mesh, placements = place
        fitting = [
            Replicate() if isinstance(each, Shard) and each.dim >= gradient.ndim else each for each in placements
        ]
        chosen.append(distribute_tensor(gradient, mesh, fitting))
    return chosen


def full(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def clip_spread(meshes: str, norm_type: float, max_norm: float) -> tuple[float, list[Tensor], int]:
    from torch.distributed.tensor.debug import CommDebugMode

    accelerator = Accelerator(cpu=True)
    parameters = with_gradients(spread(meshes))
    with CommDebugMode() as collectives:
        norm = accelerator.clip_grad_norm_(iter(parameters), max_norm, norm_type)
    return norm.item(), [full(parameter.grad) for parameter in parameters], collectives.get_total_counts()


@pytest.mark.parametrize("meshes", ["one", "plain and one", "plain and two"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_norm_of_any_mix_is_that_of_one_process(meshes, norm_type, ranks):
    norm, expected = clipped(whole(), 0.5, norm_type)
    for found, gradients, _ in run_ranks(clip_spread, ranks, meshes, norm_type, 0.5):
        assert found == pytest.approx(norm, rel=1e-6)
        torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-7)


def norms_that_can_not_be_put_together() -> list[str]:
    texts = []
    for norm_type in (0, -1.0, float("-inf")):
        with pytest.raises(ValueError) as caught:
            clip_grad_norm_(with_gradients(spread("one")), 1.0, norm_type)
        texts.append(str(caught.value))
    return texts


def test_norms_that_can_not_be_put_together_are_refused_by_all():
    first, second = run_ranks(norms_that_can_not_be_put_together, 2)
    assert first == second
    assert [text.split(":")[0] for text in first] == [
        f"clip_grad_norm_(norm_type={norm_type})" for norm_type in ("0.0", "-1.0", "-inf")
    ]


def test_one_collective_for_each_axis_of_a_mesh():
    counts = {meshes: run_ranks(clip_spread, 2, meshes, 2.0, 0.5)[0][2] for meshes in ("plain and one", "one")}
    assert counts == {"plain and one": 1, "one": 1}


def clip_values_of_spread() -> list[Tensor]:
    parameters = with_gradients(spread("plain and two"))
    Accelerator(cpu=True).clip_grad_value_(parameters, 0.3)
    return [full(parameter.grad) for parameter in parameters]


def test_values_of_any_mix_are_limited():
    expected = [gradient.clamp(-0.3, 0.3) for gradient in whole()]
    for gradients in run_ranks(clip_values_of_spread, 2):
        torch.testing.assert_close(gradients, expected, rtol=0, atol=0)


def partial_gradient() -> str:
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (2,))
    gradient = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    parameter = nn.Parameter(DTensor.from_local(torch.ones(2), mesh))
    parameter.grad = gradient
    with pytest.raises(ValueError, match="Redistribute") as caught:
        clip_grad_value_([parameter], 1.0)
    return str(caught.value)


def test_elements_that_are_not_summed_can_not_be_limited():
    assert all("Partial" in text for text in run_ranks(partial_gradient, 2))


def sharded_by_hand(max_norm: float) -> tuple[float, list[Tensor]]:
    from torch.distributed.fsdp import fully_shard

    accelerator = Accelerator(cpu=True)
    model = TinyMLP()
    head = nn.Linear(8, 1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.fill_(0.1)
    fully_shard(model, mesh=init_device_mesh("cpu", (accelerator.num_processes,)))
    inputs = torch.linspace(-1, 1, 16).reshape(2, 8)
    (model(inputs).sum() + head(inputs).sum()).backward()
    parameters = [*model.parameters(), *head.parameters()]
    norm = accelerator.clip_grad_norm_(parameters, max_norm)
    assert [type(part) for part in local_parts(parameters)] == [torch.Tensor] * 4 + [nn.Parameter] * 2
    return norm.item(), [full(parameter.grad) for parameter in parameters]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_model_that_is_sharded_by_hand_beside_a_whole_one(ranks):
    model, head = TinyMLP(), nn.Linear(8, 1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.fill_(0.1)
    inputs = torch.linspace(-1, 1, 16).reshape(2, 8)
    (model(inputs).sum() + head(inputs).sum()).backward()
    parameters = [*model.parameters(), *head.parameters()]
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    for found, gradients in run_ranks(sharded_by_hand, ranks, 0.5):
        assert found == pytest.approx(norm.item(), rel=1e-5)
        torch.testing.assert_close(gradients, [parameter.grad for parameter in parameters], rtol=1e-4, atol=1e-6)

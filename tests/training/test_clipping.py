import pytest
import torch

from hasten.training.clipping import clip_grad_norm_, clip_grad_value_


def parameters() -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    for parameter in made:
        parameter.grad = torch.tensor([3.0, 4.0])
    return made


@pytest.mark.parametrize("kind", [list, iter, tuple, lambda given: (parameter for parameter in given)])
def test_the_norm_before_is_returned_and_the_norm_after_is_the_limit(kind: object):
    given = parameters()
    norm = clip_grad_norm_(kind(given), 1.0)  # type: ignore[operator]
    assert norm.item() == pytest.approx(50**0.5)
    after = torch.cat([parameter.grad for parameter in given if parameter.grad is not None])
    assert after.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_one_tensor_and_other_norms():
    (first, _) = parameters()
    assert clip_grad_norm_(first, 10.0, norm_type=float("inf")).item() == 4.0
    assert first.grad is not None
    assert first.grad.tolist() == [3.0, 4.0]


def test_nothing_to_clip():
    assert clip_grad_norm_([], 1.0).item() == 0.0
    assert clip_grad_norm_([torch.nn.Parameter(torch.zeros(2))], 1.0).item() == 0.0


def test_values():
    given = parameters()
    clip_grad_value_(iter(given), 3.5)
    assert [parameter.grad.tolist() for parameter in given if parameter.grad is not None] == [[3.0, 3.5]] * 2

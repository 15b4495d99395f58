import copy

import pytest
import torch
from torch import nn

from hasten.weights.successors import Replaced, all_current, current, replace


def pair() -> tuple[nn.Parameter, nn.Parameter]:
    old, new = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.zeros(1, 3))
    old.grad = torch.ones(2, 3)
    replace(old, new)
    return old, new


def test_what_a_parameter_has_become():
    old, new = pair()
    newest = nn.Parameter(torch.zeros(1))
    assert current(old) is current(new) is new
    replace(new, newest)
    assert current(old) is newest
    assert [id(each) for each in all_current(iter([old, newest]))] == [id(newest)] * 2
    assert all_current(old)[0] is newest
    assert current("a name") == "a name"


def test_nothing_happens_to_one_that_stays():
    parameter = nn.Parameter(torch.ones(2))
    replace(parameter, parameter)
    assert type(parameter) is nn.Parameter
    assert parameter.sum() == 2


def test_memory_is_let_go():
    old = nn.Parameter(torch.ones(2, 3))
    storage = old.data.untyped_storage()
    replace(old, nn.Parameter(torch.zeros(1)))
    object.__setattr__(old, "__class__", nn.Parameter)
    assert old.numel() == 0
    assert old.untyped_storage().data_ptr() != storage.data_ptr()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizer_that_was_forgotten_says_so(kind):
    old = nn.Parameter(torch.ones(2, 3))
    optimizer = kind([old], lr=0.1)
    replace(old, nn.Parameter(torch.zeros(1, 3)))
    for use in (optimizer.step, optimizer.zero_grad):
        with pytest.raises(
            RuntimeError, match=r"`grad` of a parameter that its model no longer has.*prepare\(optimizer\)"
        ):
            use()


@pytest.mark.parametrize(
    "use",
    [
        lambda old: old.shape,
        lambda old: old + 1,
        lambda old: nn.functional.linear(torch.ones(3), old),
        lambda old: torch._foreach_add([old], 1.0),
        lambda old: setattr(old, "grad", None),
        copy.deepcopy,
    ],
)
def test_every_use_is_refused(use):
    old, _ = pair()
    with pytest.raises(RuntimeError, match="no longer has"):
        use(old)


def test_it_can_still_be_shown_and_found():
    old, _ = pair()
    assert repr(old) == "Replaced parameter (its model was prepared)"
    assert isinstance(old, Replaced)
    assert isinstance(old, nn.Parameter)
    assert {old: 1}[old] == 1


def test_other_classes_of_parameters_keep_theirs():
    class Own(nn.Parameter):
        pass

    old, new = Own(torch.ones(2)), nn.Parameter(torch.ones(1))
    replace(old, new)
    assert type(old) is Own
    assert current(old) is new

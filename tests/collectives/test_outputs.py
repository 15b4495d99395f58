import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hasten.collectives.outputs import ConvertOutputsToFp32, GatheredParameters, convert_outputs_to_fp32


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        """Some outputs."""
        return {"half": x.half(), "list": [x.bfloat16(), "text"], "double": x.double()}


def check(outputs: Any) -> None:
    assert outputs["half"].dtype is outputs["list"][0].dtype is torch.float32
    assert outputs["list"][1] == "text"
    assert outputs["double"].dtype is torch.float64
    assert outputs["half"].tolist() == [1, 1]


def test_outputs_are_converted_whatever_the_structure():
    forward = Model().forward
    wrapped = convert_outputs_to_fp32(forward)
    check(wrapped(torch.ones(2)))
    assert type(wrapped) is type(test_outputs_are_converted_whatever_the_structure)
    assert isinstance(wrapped.__wrapped__, ConvertOutputsToFp32)  # type: ignore[attr-defined]
    assert (wrapped.__name__, wrapped.__doc__) == ("forward", "Some outputs.")
    converted = ConvertOutputsToFp32(forward)
    check(converted(x=torch.ones(2)))
    assert converted.model_forward == forward
    assert converted.__name__ == "forward"  # type: ignore[attr-defined]
    with pytest.raises(pickle.PicklingError, match="unwrap it first with"):
        pickle.dumps(converted)


def test_parameters_that_are_whole_are_left_alone():
    parameter = torch.nn.Parameter(torch.ones(2))
    for params in (parameter, [parameter], iter([parameter]), []):
        with GatheredParameters(params, modifier_rank=0):
            assert parameter.tolist() == [1, 1]


def test_deepspeed_makes_its_own_parameters_whole(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    zero = SimpleNamespace(GatheredParameters=lambda params, **options: asked.append((params, options)) or "block")
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(zero=zero))
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.ds_id = 3  # type: ignore[attr-defined]
    assert GatheredParameters(parameter, 0) == "block"
    assert asked == [([parameter], {"modifier_rank": 0, "fwd_module": None, "enabled": True})]
    with GatheredParameters(parameter, enabled=False):
        assert len(asked) == 1

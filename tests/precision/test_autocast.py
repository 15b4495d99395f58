import copy
import functools
import inspect
import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from hasten import Accelerator
from hasten.precision import autocast
from hasten.precision.autocast import (
    AutocastForward,
    autocast_context,
    check_supported,
    convert_to_fp32,
    restore_forward,
)
from hasten.settings.handlers import AutocastKwargs
from hasten.world.devices import DEVICES, device_row

BF16 = torch.bfloat16
Pair = namedtuple("Pair", ["left", "right"])


class Model(nn.Module):
    """One layer; it notes the format in which it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, inputs: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        """What it computes."""
        outputs = self.layer(inputs)
        self.seen.append(outputs.dtype)
        return {"outputs": outputs * scale, "count": torch.tensor(3), "nothing": None}


def wrap(model: nn.Module, dtype: torch.dtype = BF16, handler: AutocastKwargs | None = None) -> nn.Module:
    return AutocastForward("cpu", dtype, handler).apply(model)


# ---- contexts ----


def computed_in(context: Any) -> torch.dtype:
    with context:
        return nn.Linear(2, 2)(torch.ones(1, 2)).dtype


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_the_context_computes_in_the_chosen_format(dtype: torch.dtype):
    assert computed_in(autocast_context("cpu", dtype)) == dtype
    assert computed_in(autocast_context("cpu", dtype, AutocastKwargs(enabled=False))) == torch.float32
    assert computed_in(autocast_context("cpu", None)) == torch.float32


def test_without_mixed_precision_an_outer_region_stays_unless_it_is_switched_off():
    with torch.autocast("cpu", dtype=BF16):
        assert computed_in(autocast_context("cpu", None)) == BF16
        assert computed_in(autocast_context("cpu", None, AutocastKwargs(enabled=False))) == torch.float32
        assert computed_in(autocast_context("cpu", BF16, AutocastKwargs(enabled=False))) == torch.float32


def test_the_cache_can_be_chosen():
    with autocast_context("cpu", BF16, AutocastKwargs(cache_enabled=False)):
        assert not torch.is_autocast_cache_enabled()
    with autocast_context("cpu", BF16):
        assert torch.is_autocast_cache_enabled()


def test_an_error_inside_ends_the_region():
    with pytest.raises(KeyError), autocast_context("cpu", BF16):
        raise KeyError
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_the_cpu_supports_every_precision(precision: str):
    check_supported(precision, DEVICES["cpu"])


def test_a_device_without_autocast_is_refused():
    check_supported("no", device_row("meta"))
    with pytest.raises(
        ValueError, match=r"mixed_precision='bf16' is not supported on 'meta' with torch .*; supported here: \['no'\]"
    ):
        check_supported("bf16", device_row("meta"))


# ---- forward ----


def test_forward_computes_in_the_format_and_returns_fp32():
    model = wrap(Model())
    outputs = model(torch.ones(1, 2), scale=2.0)
    assert model.seen == [BF16]
    assert outputs["outputs"].dtype == torch.float32
    assert outputs["count"].dtype == torch.int64
    assert outputs["nothing"] is None
    assert model.layer.weight.dtype == torch.float32  # type: ignore[union-attr]


def test_gradients_flow_through_the_conversion():
    model = wrap(Model())
    model(torch.ones(1, 2))["outputs"].sum().backward()
    gradient = model.layer.weight.grad  # type: ignore[union-attr]
    assert gradient is not None
    assert gradient.dtype == torch.float32
    assert gradient.tolist() == [[1.0, 1.0]] * 2


def test_forward_can_be_kept_in_fp32():
    model = wrap(Model(), handler=AutocastKwargs(enabled=False))
    model(torch.ones(1, 2))
    assert model.seen == [torch.float32]


def test_name_text_and_signature_survive():
    model, plain = wrap(Model()), Model()
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert (model.forward.__name__, model.forward.__doc__) == ("forward", "What it computes.")
    assert model._original_forward.__func__ is Model.forward  # type: ignore[union-attr]
    assert inspect.unwrap(model.forward).__func__ is Model.forward  # type: ignore[attr-defined]
    assert autocast.is_wrapped(model)
    assert not autocast.is_wrapped(plain)


def test_hooks_see_fp32():
    seen = []
    model = wrap(Model())
    model.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs["outputs"].dtype))
    model(torch.ones(1, 2))
    assert seen == [torch.float32]


def test_it_says_what_it_does():
    transform = AutocastForward("cpu", BF16)
    assert (transform.name, repr(transform)) == ("autocast", "autocast forward to torch.bfloat16, outputs in fp32")


# ---- undoing ----


def test_undo_gives_the_model_back_exactly():
    model = Model()
    before = dict(model.__dict__)
    transform = AutocastForward("cpu", BF16)
    assert transform.undo(transform.apply(model)) is model
    assert model.__dict__ == before
    pickle.loads(pickle.dumps(model))
    model(torch.ones(1, 2))
    assert model.seen == [torch.float32]
    assert restore_forward(model) is model


def shout(inputs: torch.Tensor) -> torch.Tensor:
    return inputs


@pytest.mark.parametrize("forward", [shout, functools.partial(shout), Model().forward])
def test_a_forward_that_somebody_else_has_replaced_is_kept(forward: Any):
    model = Model()
    model.forward = forward
    wrap(model)
    model(torch.ones(1, 2))
    restore_forward(model)
    assert model.forward is forward
    assert "_original_forward" not in model.__dict__


def test_a_bound_forward_of_another_class_is_kept():
    model = Model()
    model.forward = shouted = Other.forward.__get__(model)
    restore_forward(wrap(model))
    assert model.forward is shouted


class Other(Model):
    def forward(self, inputs: torch.Tensor, *, scale: float = 0.0) -> Any:
        return super().forward(inputs, scale=scale)


def test_a_compiled_model_is_wrapped_outside_and_given_back():
    model = Model()
    compiled = torch.compile(model, backend="eager")
    assert wrap(compiled)(torch.ones(1, 2))["outputs"].dtype == torch.float32  # type: ignore[arg-type]
    assert model.seen == [BF16]
    assert not autocast.is_wrapped(model)
    assert restore_forward(model) is model
    model(torch.ones(1, 2))
    restore_forward(compiled)  # type: ignore[arg-type]
    compiled(torch.ones(1, 2))
    assert model.seen == [BF16, torch.float32, torch.float32]


# ---- copies ----


def test_pickling_a_wrapped_model_says_what_to_do():
    with pytest.raises(
        pickle.PicklingError, match=r"Unwrap it first: `accelerator.unwrap_model\(model, keep_fp32_wrapper=False\)`"
    ):
        pickle.dumps(wrap(Model()))


def test_a_copy_runs_its_own_weights():
    model = wrap(Model())
    again = copy.deepcopy(model)
    nn.init.zeros_(again.layer.weight)  # type: ignore[union-attr, arg-type]
    nn.init.zeros_(again.layer.bias)  # type: ignore[union-attr, arg-type]
    assert again(torch.ones(1, 2))["outputs"].tolist() == [[0.0, 0.0]]
    assert model(torch.ones(1, 2))["outputs"].abs().sum() > 0
    assert again.seen[-1] == BF16
    restore_forward(again)
    assert again(torch.ones(1, 2))["outputs"].tolist() == [[0.0, 0.0]]
    assert again.seen[-1] == torch.float32
    assert autocast.is_wrapped(model)


def test_a_model_with_a_replaced_forward_can_be_copied():
    model = Model()
    model.forward = shout  # type: ignore[assignment, method-assign]
    again = copy.deepcopy(wrap(model))
    assert again(torch.ones(1, 2)).tolist() == [[1.0, 1.0]]


# ---- outputs ----


@dataclass
class Output:
    logits: torch.Tensor
    label: str = "kept"


def test_outputs_of_every_shape_become_fp32():
    half = torch.ones(2, dtype=BF16)
    assert convert_to_fp32(half).dtype == torch.float32
    assert convert_to_fp32(half.to(torch.float16)).dtype == torch.float32
    for kept in (torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int8)):
        assert convert_to_fp32(kept) is kept
    assert convert_to_fp32([half, (half, "text")])[1][0].dtype == torch.float32
    pair = convert_to_fp32(Pair(half, 3))
    assert isinstance(pair, Pair)
    assert (pair.left.dtype, pair.right) == (torch.float32, 3)
    mapping = convert_to_fp32(OrderedDict(a=half, b=[half]))
    assert isinstance(mapping, OrderedDict)
    assert mapping["b"][0].dtype == torch.float32
    assert convert_to_fp32(None) is None


def test_dtypes_have_the_names_of_the_precisions():
    assert {"bf16": torch.bfloat16, "fp16": torch.float16} == autocast.DTYPES
    assert all(hasattr(autocast, name) for name in autocast.__all__)


# ---- the format of outputs ----


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("fp32", torch.float32),
        ("keep", BF16),
        ("bf16", BF16),
        ("fp16", torch.float16),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_outputs_have_the_format_that_is_asked_for(wanted: Any, expected: torch.dtype):
    model = wrap(Model(), handler=AutocastKwargs(output_dtype=wanted))
    for each in (model, copy.deepcopy(model)):
        outputs = each(torch.ones(1, 2))
        assert outputs["outputs"].dtype == expected
        assert (outputs["count"].dtype, outputs["nothing"]) == (torch.int64, None)
    assert model.seen == [BF16]
    restored = restore_forward(model)
    assert restored(torch.ones(1, 2))["outputs"].dtype == torch.float32
    assert "forward" not in restored.__dict__


def test_what_is_done_to_outputs_is_told():
    assert repr(AutocastForward("cpu", BF16)) == "autocast forward to torch.bfloat16, outputs in fp32"
    kept = AutocastForward("cpu", BF16, AutocastKwargs(output_dtype="keep"))
    assert repr(kept) == "autocast forward to torch.bfloat16, outputs as they are"


@pytest.mark.parametrize("wanted", ["half", "float32"])
def test_unknown_names_of_formats_are_refused(wanted: str):
    with pytest.raises(ValueError, match="'fp32', 'bf16', 'fp16', 'keep'"):
        AutocastKwargs(output_dtype=wanted)


@pytest.mark.parametrize("wanted", [torch.int64, 3, None])
def test_formats_of_outputs_are_floating_point(wanted: Any):
    with pytest.raises(ValueError, match="floating-point format, or 'keep'"):
        AutocastForward("cpu", BF16, AutocastKwargs(output_dtype=wanted))


def test_the_format_of_outputs_needs_mixed_precision():
    handlers = [AutocastKwargs(output_dtype="keep")]
    with pytest.raises(ValueError, match="needs mixed precision"):
        Accelerator(cpu=True, kwargs_handlers=handlers)
    model = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=handlers).prepare(Model())
    assert model(torch.ones(1, 2))["outputs"].dtype == BF16

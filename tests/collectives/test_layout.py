from collections import UserDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasten.collectives.layout import Layout, flatten, paths
from hasten.collectives.parcels import ALONE_BYTES, Parcels, as_bytes
from tests.collectives.data import Pair, Record

DTYPES = [torch.float32, torch.bool, torch.complex128, torch.int64, torch.bfloat16]


class Opaque:
    pass


def test_tensors_come_in_order_with_their_paths():
    a, b, c, d, e = torch.zeros(5, 1).unbind()
    data = {"x": a, 1: [b, Pair(c, ())], "u": UserDict(y=d), "r": Record(e, [])}
    leaves, _ = flatten("gather", data)
    assert all(one is other for one, other in zip(leaves, [a, b, c, d, e], strict=True))
    assert paths(data) == ["['x']", "[1][0]", "[1][1][0]", "['u']['y']", "['r'].value"]
    assert paths(a) == ["the tensor"]


def test_keys_without_a_text_of_their_own_have_the_same_path_in_every_process():
    assert paths({Opaque(): torch.zeros(1)}) == ["[<tests.collectives.test_layout.Opaque object>]"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["t"], ["t", "t"]),
        (["t", ["t"]], [["t"], "t"]),
        ({"a": "t"}, {"b": "t"}),
        ({"a": "t"}, ["t"]),
        ([["t"], "t"], [["t", "t"]]),
        (Record("t", ()), {"value": "t", "note": ()}),
        ([[], "t"], ["t", []]),
    ],
)
def test_structures_that_differ_have_different_traces(one: Any, other: Any):
    def filled(data: Any) -> Any:
        if data == "t":
            return torch.zeros(1)
        if isinstance(data, Record):
            return Record(filled(data.value), data.note)
        return {k: filled(v) for k, v in data.items()} if isinstance(data, dict) else type(data)(map(filled, data))

    assert flatten("gather", filled(one))[1] != flatten("gather", filled(other))[1]


def test_other_leaves_are_refused_with_their_place():
    with pytest.raises(TypeError, match=r"\(<class 'int'>\) passed to `gather`.*It is at \['a'\]\[1\]\.note\.$"):
        flatten("gather", {"a": [torch.zeros(1), Record(torch.zeros(1), 3)]})
    with pytest.raises(TypeError, match=r"is_torch_tensor` should be passed\.$"):
        flatten("gather", 3)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)), max_size=6))
def test_views_do_not_overlap_and_lie_within(kinds: list[tuple[torch.dtype, list[int]]]):
    tensors = [torch.zeros(shape, dtype=dtype) for dtype, shape in kinds]
    layout = Layout([str(index) for index in range(len(tensors))], tensors)
    packed = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for view in layout.views(packed):
        as_bytes(view).add_(1)
    content = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert int(packed.sum()) == content
    assert layout.nbytes <= content + 16 * len(DTYPES)
    for view, tensor in zip(layout.views(packed), tensors, strict=True):
        assert (view.dtype, view.shape) == (tensor.dtype, tensor.shape)
    assert sum(run.within(packed).numel() for run in layout.runs) == sum(tensor.numel() for tensor in tensors)


def test_the_layout_does_not_depend_on_the_order_of_the_tensors():
    tensors = {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.int64), "c": torch.zeros(5)}
    places = dict(zip(tensors, Layout(list(tensors), list(tensors.values())).places, strict=True))
    turned = list(tensors)[::-1]
    assert places == dict(zip(turned, Layout(turned, [tensors[name] for name in turned]).places, strict=True))


def test_large_tensors_travel_alone_in_the_order_of_their_names():
    large, small = torch.zeros(ALONE_BYTES, dtype=torch.uint8), torch.zeros(ALONE_BYTES - 1, dtype=torch.uint8)
    parcels = Parcels(["b", "c", "a"], [large, small, large])
    assert (parcels.alone, parcels.together) == ((2, 0), (1,))
    assert parcels.layout.nbytes == ALONE_BYTES - 1

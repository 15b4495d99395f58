import sys
from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor as T  # noqa: N812

from hasten.collectives import nested
from tests.collectives.data import Frozen, Pair, Record
from tests.ranks import run_ranks
from tests.simulated_device import install

META = torch.device("meta")
CPU = torch.device("cpu")


class Tagged(dict):
    """A dictionary whose constructor takes something else, with an attribute."""

    def __init__(self, tag: str, **items: Any) -> None:
        super().__init__(**items)
        self.tag = tag


class ReadOnly(Mapping):
    def __init__(self, items: dict[str, Any]) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Words(list):
    pass


def structures() -> st.SearchStrategy[Any]:
    leaf = st.one_of(st.integers(0, 9).map(torch.tensor), st.none(), st.text(max_size=2))
    keys = st.text(max_size=2)

    def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.lists(inner, max_size=3).map(Words),
            st.dictionaries(keys, inner, max_size=3),
            st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
            st.dictionaries(keys, inner, max_size=3).map(lambda items: defaultdict(list, items)),
            st.dictionaries(keys, inner, max_size=3).map(UserDict),
            st.tuples(inner, inner).map(lambda items: Pair(*items)),
            inner.map(Record),
            inner.map(Frozen),
        )

    return st.recursive(leaf, grow, max_leaves=8)


def shape_of(data: Any) -> Any:
    """The types of a structure, without its tensors' values."""
    inner = nested.children(data) if not isinstance(data, torch.Tensor) else None
    if inner is None:
        return type(data) if isinstance(data, torch.Tensor) else data
    return type(data), [(key, shape_of(item)) for key, item in inner]


def tensors_of(data: Any) -> list[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        return [data]
    return [leaf for _, item in nested.children(data) or () for leaf in tensors_of(item)]


# ---- walking ----


@settings(max_examples=60, deadline=None)
@given(structures())
def test_every_container_keeps_its_type_and_every_tensor_is_visited_once(data: Any):
    before = [int(leaf) for leaf in tensors_of(data)]
    result = nested.recursively_apply(lambda leaf: leaf + 1, data)
    assert shape_of(result) == shape_of(data)
    assert [int(leaf) for leaf in tensors_of(result)] == [value + 1 for value in before]
    assert [int(leaf) for leaf in tensors_of(data)] == before


@settings(max_examples=60, deadline=None)
@given(structures())
def test_refilling_puts_leaves_back_in_order(data: Any):
    numbered = [torch.tensor(index) for index in range(len(tensors_of(data)))]
    rest = iter([*numbered, torch.tensor(-1)])
    result = nested.refill(data, rest)
    assert shape_of(result) == shape_of(data)
    assert all(one is other for one, other in zip(tensors_of(result), numbered, strict=True))
    assert int(next(rest)) == -1


def test_a_defaultdict_keeps_its_factory_and_a_subclass_its_attributes():
    data = defaultdict(list, a=T(1))
    result = nested.recursively_apply(lambda leaf: leaf + 1, data)
    assert result.default_factory is list
    assert result["a"] == 2
    assert data["a"] == 1
    tagged = nested.recursively_apply(lambda leaf: leaf + 1, Tagged("x", a=T(1)))
    assert (type(tagged), tagged.tag, int(tagged["a"])) == (Tagged, "x", 2)


def test_a_mapping_that_cannot_be_written_is_built_anew():
    result = nested.recursively_apply(lambda leaf: leaf + 1, ReadOnly({"a": T(1)}))
    assert isinstance(result, ReadOnly)
    assert result["a"] == 2


def test_dataclass_objects_are_rebuilt_and_left_alone_without_tensors():
    record = Record(T(1), note=[T(2)])
    result = nested.recursively_apply(lambda leaf: leaf * 10, record)
    assert (int(result.value), int(result.note[0]), int(record.value)) == (10, 20, 1)
    assert int(nested.recursively_apply(lambda leaf: leaf * 10, Frozen(T(1))).value) == 10
    plain = Record("text")
    assert nested.recursively_apply(lambda leaf: leaf * 10, plain) is plain
    assert nested.recursively_apply(lambda leaf: leaf * 10, Record) is Record


def test_arguments_reach_the_function():
    assert nested.recursively_apply(lambda leaf, a, b=0: leaf + a + b, [T(1)], 2, b=3) == [T(6)]


def test_other_types_stay_or_raise():
    assert nested.recursively_apply(torch.neg, {"a": "text", "b": None, "c": {1, 2}}) == {
        "a": "text",
        "b": None,
        "c": {1, 2},
    }
    with pytest.raises(TypeError) as caught:
        nested.recursively_apply(
            torch.neg, {"a": "text"}, test_type=nested.is_tensor_information, error_on_other_type=True
        )
    assert str(caught.value) == (
        "Unsupported types (<class 'str'>) passed to `neg`. Only nested list/tuple/dicts of objects that are valid for "
        "`is_tensor_information` should be passed."
    )


def test_tensors_of_intel_gpus():
    assert not nested.is_torch_xpu_tensor(torch.ones(1))
    assert not nested.is_torch_xpu_tensor("text")
    assert nested.is_torch_xpu_tensor(mock.Mock(spec=torch.Tensor, device=torch.device("xpu")))


def test_honor_type():
    assert nested.honor_type([1], (index for index in range(2))) == [0, 1]
    assert nested.honor_type(Pair(1, 2), (index for index in range(2))) == Pair(0, 1)
    assert nested.honor_type(torch.Size([1]), (index for index in range(2))) == torch.Size([0, 1])
    assert nested.is_namedtuple(Pair(1, 2))
    assert not nested.is_namedtuple((1, 2))


# ---- moving ----


def test_a_flat_batch_that_is_there_already_costs_one_call():
    batch = {"x": torch.zeros(2), "y": torch.zeros(2), "name": "text", "n": 3}
    for data in (batch, list(batch.values()), tuple(batch.values())):
        calls = 0

        def note(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(note)
        try:
            nested.send_to_device(data, CPU)
        finally:
            sys.setprofile(None)
        assert calls == 1


def test_what_is_there_already_is_not_copied():
    x = torch.zeros(2)
    assert nested.send_to_device(x, CPU) is x
    flat, pair = (x, x), Pair(x, x)
    assert nested.send_to_device(flat, CPU) is flat
    assert nested.send_to_device(pair, CPU)[0] is x
    for data in ([x], {"a": x}, OrderedDict(a=x), UserDict(a=x), defaultdict(list, a=x), {"a": [x]}):
        result = nested.send_to_device(data, CPU)
        assert type(result) is type(data)
        assert result is not data  # changing a batch must not change the data set it came from
        assert tensors_of(result)[0] is x
    for other in ("text", 5, None, Record(x)):
        assert nested.send_to_device(other, "cpu") is other


def test_everything_that_can_be_moved_is_moved():
    x = torch.zeros(2)
    data = {"a": x, "b": [x, "text"], "c": Pair(x, None), "d": Record(x), "e": torch.nn.Linear(1, 1)}
    for device in (META, "meta"):
        moved = nested.send_to_device(data, device)
        assert {leaf.device.type for leaf in tensors_of(moved)} == {"meta"}
        assert moved["b"][1] == "text"
        assert moved["d"].value.is_meta
    assert not x.is_meta
    assert all(parameter.is_meta for parameter in data["e"].parameters())
    assert nested.send_to_device([x, x], META)[1].is_meta


def test_keys_can_be_skipped_at_any_depth():
    x = torch.zeros(2)
    moved = nested.send_to_device({"a": x, "b": [{"a": x, "b": x}]}, META, skip_keys="a")
    assert moved["a"] is x
    assert moved["b"][0]["a"] is x
    assert moved["b"][0]["b"].is_meta
    assert nested.send_to_device({"a": x, "b": x}, META, skip_keys=["a", "b"])["b"] is x


def test_objects_with_a_to_of_their_own():
    class Blocking:
        def to(self, device: Any) -> Any:
            return "moved", device

    class Both:
        def to(self, device: Any, non_blocking: bool = False) -> Any:
            return device, non_blocking

    assert nested.send_to_device(Blocking(), "cpu", non_blocking=True) == ("moved", "cpu")
    assert nested.send_to_device([Both()], "cpu", non_blocking=True) == [("cpu", True)]


def move_between_devices() -> list[Any]:
    memory = install("npu")[0]
    device = torch.device("npu", 0)
    host = torch.zeros(1000)
    batch = nested.send_to_device({"x": host, "n": 1}, device)
    once = memory.live
    again = nested.send_to_device(batch, device)
    unnumbered = nested.send_to_device(batch, torch.device("npu"))
    return [
        once,
        memory.live,
        again["x"] is batch["x"],
        unnumbered["x"] is batch["x"],
        str(nested.find_device([1, batch])),
        nested.send_to_device(batch, CPU)["x"].device.type,
    ]


def test_a_batch_is_copied_to_an_accelerator_once():
    assert run_ranks(move_between_devices, 1, fresh=True, initialise=False) == [
        [4000, 4000, True, True, "npu:0", "cpu"]
    ]


# ---- describing ----


def test_structure_shape_and_initialisation():
    data = {"a": torch.zeros(2, 3), "b": [torch.zeros(1, dtype=torch.int64), "text"]}
    structure = nested.get_data_structure(data)
    assert structure["a"] == nested.TensorInformation(torch.Size([2, 3]), torch.float32)
    assert nested.is_tensor_information(structure["b"][0])
    made = nested.initialize_tensors(structure)
    assert (made["a"].shape, made["b"][0].dtype, made["b"][1]) == ((2, 3), torch.int64, "text")
    assert nested.get_shape(data) == {"a": [2, 3], "b": [[1], "text"]}


@pytest.mark.parametrize(
    ("data", "size"),
    [
        ([T([1, 2])], 2),
        ({"a": torch.zeros(3, 1), "b": T([1])}, 3),
        (UserDict(a=T([1])), 1),
        (torch.zeros(0, 2), 0),
        (Record(T([1, 2])), 2),
    ],
)
def test_batch_size(data: Any, size: int):
    assert nested.find_batch_size(data) == size
    assert nested.ignorant_find_batch_size(data) == size


@pytest.mark.parametrize("data", [[], {}, (), [[], T([1])], T(1.0)])
def test_no_batch_size_in_what_is_empty(data: Any):
    with pytest.raises(ValueError, match="batch size"):
        nested.find_batch_size(data)
    assert nested.ignorant_find_batch_size(data) is None


@pytest.mark.parametrize("data", ["text", 5, None, ["text", T([1])], {"a": None, "b": T([1])}])
def test_no_batch_size_of_what_is_not_a_tensor(data: Any):
    with pytest.raises(TypeError, match="Can only find the batch size of tensors but got"):
        nested.find_batch_size(data)
    assert nested.ignorant_find_batch_size(data) is None


def test_device():
    assert nested.find_device({"a": "text", "b": [T([1])]}) == CPU
    assert nested.find_device(Record(torch.zeros(1, device="meta"))) == META
    assert nested.find_device([None, {}]) is None


def test_listify():
    data = [T([1.5], dtype=torch.bfloat16), T([[True]]), "text", UserDict(a=T(2, requires_grad=False)), T([1 + 2j])]
    assert nested.listify(data) == [[1.5], [[True]], "text", UserDict(a=2), [1 + 2j]]
    assert nested.listify(torch.tensor([0.5], requires_grad=True)) == [0.5]
    assert nested.listify(T([1.5]).to(torch.float8_e5m2)) == [1.5]


def test_slices():
    data = {"a": T([1, 2, 3]), "b": [T([4, 5, 6])], "c": "text"}
    assert nested.listify(nested.slice_tensors(data, slice(0, 2), 0, 2)) == {"a": [1, 2], "b": [[4, 5]], "c": "text"}
    with pytest.raises(IndexError):
        nested.slice_tensors(T(1), slice(0, 2))


# ---- joining ----


def test_concatenation_keeps_types():
    assert nested.listify(nested.concatenate([{"a": T([1])}, {"a": T([2])}])) == {"a": [1, 2]}
    assert nested.listify(nested.concatenate([Pair(T([1]), T([3])), Pair(T([2]), T([4]))])) == Pair([1, 2], [3, 4])
    assert type(nested.concatenate([UserDict(a=T([1]))] * 2)) is UserDict
    assert nested.concatenate([Frozen(T([1])), Frozen(T([2]))]).value.tolist() == [1, 2]
    assert nested.concatenate([T([[1]]), T([[2]])], dim=1).tolist() == [[1, 2]]
    assert nested.concatenate(["text"]) == "text"


def test_what_cannot_be_concatenated():
    with pytest.raises(TypeError, match="Can only concatenate tensors but got <class 'str'>"):
        nested.concatenate(["a", "b"])
    with pytest.raises(ValueError, match=r"these 2 of type list have the lengths \[1, 2\]"):
        nested.concatenate([[T([1])], [T([1]), T([2])]])
    with pytest.raises(ValueError, match="have the keys"):
        nested.concatenate([{"a": T([1])}, {"a": T([1]), "b": T([1])}])


def test_conversion_to_fp32():
    data = {"a": T([1.0], dtype=torch.float16), "b": T([1]), "c": T([1.0], dtype=torch.float64), "d": "text"}
    result = nested.convert_to_fp32(data)
    assert [result[key].dtype for key in "abc"] == [torch.float32, torch.int64, torch.float64]
    x = torch.zeros(1)
    assert nested.convert_to_fp32(x) is x
    assert nested.convert_to_fp32(x.bfloat16()).dtype is torch.float32
    assert nested.convert_to_fp32(SimpleNamespace(a=1)).a == 1
    assert nested.convert_to_fp32(Counter("aa")) == Counter("aa")

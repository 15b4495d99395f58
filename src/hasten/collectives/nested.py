"""Nested structures of tensors: walk them, move them, rebuild them with every container's type kept."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

__all__ = [
    "TensorInformation",
    "concatenate",
    "convert_to_fp32",
    "find_batch_size",
    "find_device",
    "get_data_structure",
    "get_shape",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "is_torch_xpu_tensor",
    "listify",
    "recursively_apply",
    "send_to_device",
    "slice_tensors",
]

_Tensor = torch.Tensor
# The types of the items of a container of plain tensors. Asking for them at once is faster than asking each item.
ONLY_TENSORS = frozenset({torch.Tensor})
# Values that no device holds: a batch may carry them beside its tensors without leaving the fast path.
_INERT = frozenset({str, bytes, int, float, bool, type(None)})


@dataclasses.dataclass
class TensorInformation:
    """What must be known of a tensor to allocate one like it."""

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(tensor: Any) -> bool:
    """Whether `tensor` is a `torch.Tensor`."""
    return isinstance(tensor, _Tensor)


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Whether `tensor` is a tensor on an Intel GPU."""
    return isinstance(tensor, _Tensor) and tensor.device.type == "xpu"


def is_tensor_information(tensor_info: Any) -> bool:
    """Whether `tensor_info` is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: Any) -> bool:
    """Whether `data` is an instance of a named tuple class."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def is_dataclass_instance(data: Any) -> bool:
    """Whether `data` is an object of a dataclass, not the class itself."""
    return hasattr(type(data), "__dataclass_fields__")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """The items of `generator` in a sequence of the type of `obj`, named tuples included."""
    if is_namedtuple(obj):
        return type(obj)(*list(generator))
    return type(obj)(generator)


def honor_mapping(obj: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """`items` in a mapping of the type of `obj`; a default factory and other attributes are kept."""
    kind = type(obj)
    if kind is dict:
        return items
    if kind is OrderedDict:
        return OrderedDict(items)
    if isinstance(obj, (dict, UserDict)):
        # Not through the constructor: that of a subclass may want other arguments, and would lose the attributes.
        twin = obj.copy() if kind is defaultdict else copy.copy(obj)
        for key, value in items.items():
            twin[key] = value
        return twin
    return kind(items)  # type: ignore[call-arg]


def honor_dataclass(obj: Any, values: dict[str, Any]) -> Any:
    """A copy of a dataclass object with some fields replaced, frozen ones included; `obj` itself if nothing differs."""
    if all(getattr(obj, name) is value for name, value in values.items()):
        return obj
    twin = copy.copy(obj)
    for name, value in values.items():
        object.__setattr__(twin, name, value)
    return twin


def dataclass_values(obj: Any) -> dict[str, Any]:
    """The fields of a dataclass object that are set, by name."""
    return {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj) if hasattr(obj, field.name)}


def children(data: Any) -> Iterable[tuple[Any, Any]] | None:
    """Keys (or indices, or field names) and values of a container; None for a leaf."""
    if isinstance(data, (tuple, list)):
        return enumerate(data)
    if isinstance(data, Mapping):
        return data.items()
    if is_dataclass_instance(data):
        return dataclass_values(data).items()
    return None


def unsupported(name: str, found: object, path: str = "", test_name: str = "is_torch_tensor") -> TypeError:
    """The error for a leaf, found at `path`, of a type that `name` cannot work on."""
    return TypeError(
        f"Unsupported types ({type(found)}) passed to `{name}`. Only nested list/tuple/dicts of objects that are valid for "
        f"`{test_name}` should be passed." + (f" It is at {path}." if path else "")
    )


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply `func` to every leaf of a nested structure.

    Tuples, lists, named tuples, mappings and dataclass objects are rebuilt with their own types (a `defaultdict` keeps its
    factory).

    Args:
        func: called as `func(leaf, *args, **kwargs)`.
        data: any nesting of containers.
        test_type: says what is a leaf for `func`.
        error_on_other_type: raise for anything else instead of keeping it as it is.

    Raises:
        TypeError: something else was found, and `error_on_other_type` is set.

    Example:
        >>> recursively_apply(lambda tensor: tensor + 1, {"a": torch.tensor(1), "b": ["text"]})
        {'a': tensor(2), 'b': ['text']}
    """

    def walk(node: Any) -> Any:
        if isinstance(node, (tuple, list)):
            return honor_type(node, [walk(item) for item in node])
        if isinstance(node, Mapping):
            return honor_mapping(node, {key: walk(value) for key, value in node.items()})
        if test_type(node):
            return func(node, *args, **kwargs)
        if is_dataclass_instance(node):
            return honor_dataclass(node, {name: walk(value) for name, value in dataclass_values(node).items()})
        if error_on_other_type:
            test_name = getattr(test_type, "__name__", repr(test_type))
            raise unsupported(getattr(func, "__name__", repr(func)), node, test_name=test_name)
        return node

    return walk(data)


def refill(data: Any, leaves: Iterator[Any]) -> Any:
    """A structure like `data` whose tensors are replaced by `leaves`, in order."""
    if isinstance(data, _Tensor):
        return next(leaves)
    if isinstance(data, (tuple, list)):
        if set(map(type, data)) == ONLY_TENSORS:
            filled = list(islice(leaves, len(data)))
        else:
            filled = [refill(item, leaves) for item in data]
        return filled if type(data) is list else honor_type(data, filled)
    if isinstance(data, Mapping):
        if set(map(type, data.values())) == ONLY_TENSORS:
            items = dict(zip(data, leaves))  # noqa: B905 - the keys come first and end it
        else:
            items = {key: refill(item, leaves) for key, item in data.items()}
        return items if type(data) is dict else honor_mapping(data, items)
    if is_dataclass_instance(data):
        return honor_dataclass(data, {name: refill(value, leaves) for name, value in dataclass_values(data).items()})
    return data


def send_to_device(
    tensor: Any, device: Any, non_blocking: bool = False, skip_keys: str | Iterable[str] | None = None
) -> Any:
    """Move everything in a nested structure that can be moved to `device`.

    What is there already is never copied. A flat tuple of tensors that are all there is returned itself; lists and mappings
    are always new ones, on every device, so that changing the result never changes the argument.

    Args:
        tensor: any nesting of containers; leaves with a `.to` method are moved.
        device: anything that `Tensor.to` accepts as a device.
        non_blocking: start the copies without waiting for them, where the leaf's `.to` can.
        skip_keys: keys of mappings, at any depth, whose values stay where they are.
    """
    if skip_keys is None and type(device) is torch.device:
        kind = type(tensor)
        if kind is dict or kind is tuple or kind is list:
            for value in tensor.values() if kind is dict else tensor:
                if type(value) is _Tensor:
                    if value.device != device:
                        break
                elif type(value) not in _INERT:
                    break
            else:
                return tensor if kind is tuple else tensor.copy()
    skip = frozenset((skip_keys,) if isinstance(skip_keys, str) else skip_keys or ())
    return _send(tensor, device, non_blocking, skip)


def _send(data: Any, device: Any, non_blocking: bool, skip: frozenset[str]) -> Any:
    if isinstance(data, _Tensor) or hasattr(data, "to"):
        return _move(data, device, non_blocking)
    if isinstance(data, (tuple, list)):
        return honor_type(data, [_send(item, device, non_blocking, skip) for item in data])
    if isinstance(data, Mapping):
        moved = {key: item if key in skip else _send(item, device, non_blocking, skip) for key, item in data.items()}
        return honor_mapping(data, moved)
    if is_dataclass_instance(data):
        fields = dataclass_values(data).items()
        return honor_dataclass(
            data, {name: item if name in skip else _send(item, device, non_blocking, skip) for name, item in fields}
        )
    return data


def _move(item: Any, device: Any, non_blocking: bool) -> Any:
    if isinstance(item, _Tensor):
        return item.to(device, non_blocking=non_blocking)
    try:
        return item.to(device, non_blocking=non_blocking)
    except TypeError:  # a `.to` of its own that takes the device only
        return item.to(device)


def get_data_structure(data: Any) -> Any:
    """The same structure with a `TensorInformation` in place of each tensor."""
    return recursively_apply(lambda tensor: TensorInformation(shape=tensor.shape, dtype=tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """The same structure with the shape of each tensor as a list."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """The same structure with an uninitialised tensor in place of each `TensorInformation`."""
    return recursively_apply(
        lambda info: torch.empty(*info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )


def find_batch_size(data: Any) -> int:
    """Size of the first dimension of the first tensor in a nested structure.

    Raises:
        ValueError: a container on the way is empty, or the tensor has no dimension.
        TypeError: the first leaf is not a tensor.
    """
    while not isinstance(data, _Tensor):
        inner = children(data)
        if inner is None:
            raise TypeError(f"Can only find the batch size of tensors but got {type(data)}.")
        first = next(iter(inner), None)
        if first is None:
            raise ValueError(f"Cannot find the batch size from empty {type(data)}.")
        data = first[1]
    if data.dim() == 0:
        raise ValueError("Cannot find the batch size of a 0-d tensor: it has no first dimension.")
    return data.shape[0]


def ignorant_find_batch_size(data: Any) -> int | None:
    """As `find_batch_size`, but None where that raises."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def find_device(data: Any) -> torch.device | None:
    """Device of the first tensor in a nested structure; None if it has no tensor."""
    if isinstance(data, _Tensor):
        return data.device
    for _, item in children(data) or ():
        device = find_device(item)
        if device is not None:
            return device
    return None


def listify(data: Any) -> Any:
    """The same structure with each tensor as nested lists of numbers."""
    return recursively_apply(_to_list, data)


def _to_list(tensor: torch.Tensor) -> Any:
    # Only the plain number types know how to become Python numbers everywhere.
    narrow = tensor.is_floating_point() and tensor.element_size() < 4
    return (tensor.float() if narrow else tensor).tolist()


def slice_tensors(
    data: Any, tensor_slice: Any, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """The same structure with `tensor[tensor_slice]` in place of each tensor.

    The last two arguments are for functions of the user that take the place of this one and are not used.
    """
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Concatenate structures of one form leaf by leaf.

    Args:
        data: a list or tuple of structures; one that is not of tensors is returned as it is if it is the only one.
        dim: dimension along which the tensors are joined.

    Raises:
        ValueError: the structures differ in length, keys or fields.
        TypeError: several leaves that are not tensors.

    Example:
        >>> concatenate([{"a": torch.tensor([1])}, {"a": torch.tensor([2])}])
        {'a': tensor([1, 2])}
    """
    first = data[0]
    if isinstance(first, _Tensor):
        return torch.cat(list(data), dim=dim)
    if isinstance(first, (tuple, list)):
        _check_alike(data, [len(item) for item in data], "lengths")
        return honor_type(first, [concatenate([item[index] for item in data], dim=dim) for index in range(len(first))])
    if isinstance(first, Mapping):
        _check_alike(data, [sorted(map(repr, item)) for item in data], "keys")
        return honor_mapping(first, {key: concatenate([item[key] for item in data], dim=dim) for key in first})
    if is_dataclass_instance(first):
        fields = [dataclass_values(item) for item in data]
        return honor_dataclass(
            first, {name: concatenate([values[name] for values in fields], dim=dim) for name in fields[0]}
        )
    if len(data) == 1:
        return first
    raise TypeError(f"Can only concatenate tensors but got {type(first)}")


def _check_alike(data: Any, forms: list[Any], what: str) -> None:
    if any(form != forms[0] for form in forms):
        raise ValueError(
            f"Structures of one form can be concatenated, but these {len(data)} of type {type(data[0]).__name__} have the "
            f"{what} {forms}."
        )


def convert_to_fp32(tensor: Any) -> Any:
    """The same structure with fp16 and bf16 tensors converted to fp32."""
    if isinstance(tensor, _Tensor):  # the commonest case, once per step
        return tensor.float() if _is_half(tensor) else tensor
    return recursively_apply(lambda leaf: leaf.float(), tensor, test_type=_is_half)


def _is_half(tensor: Any) -> bool:
    return isinstance(tensor, _Tensor) and tensor.dtype in (torch.float16, torch.bfloat16)

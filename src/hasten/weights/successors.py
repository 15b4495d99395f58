"""Parameters that a model has exchanged for others (shards), and those who still hold the old ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

_SUCCESSOR = "_sharded_as"  # on a parameter that has been replaced: what the model has now


class Replaced(nn.Parameter):
    """What becomes of a parameter that has been replaced: it holds nothing, and whoever uses it learns why.

    Without it an optimizer that was forgotten would find no gradients, and train nothing, forever and silently.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse every use.

        Raises:
            RuntimeError: always.
        """
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):  # an attribute
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        raise RuntimeError(
            f"`{name}` of a parameter that its model no longer has: the model was prepared, and its parameters have been divided "
            "over the processes. If an optimizer asks, give it to `accelerator.prepare(optimizer)`, or build it after the model "
            "was prepared; elsewhere take the parameter from the prepared model again."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return "Replaced parameter (its model was prepared)"


def replace(old: nn.Parameter, new: nn.Parameter) -> None:
    """Note on a parameter what it has become, and let go of its values and its gradient."""
    if old is new:
        return
    setattr(old, _SUCCESSOR, new)
    old.grad = None
    if type(old) is nn.Parameter:
        old.data = old.data.new_empty(0)
        old.__class__ = Replaced


def current(parameter: Any) -> Any:
    """What a parameter has become; itself, if it is still in use."""
    while (new := getattr(parameter, "__dict__", {}).get(_SUCCESSOR)) is not None:
        parameter = new
    return parameter


def all_current(parameters: torch.Tensor | Iterable[Any]) -> list[Any]:
    """What parameters have become, in their order; those that two names stand for may come twice."""
    return [current(each) for each in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)]

"""How the rooms speak of each other: what an engine, a transform, a stateful object, a loader and a tracker can do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state can be saved and restored."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state as a dictionary."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take a state over."""
        ...


class Transform(Protocol):
    """Something that is done to a model before or after the engine takes it."""

    name: str

    def apply(self, model: Any) -> Any:
        """Return the transformed model; usually the same object."""
        ...

    def undo(self, model: Any) -> Any:
        """Return the model as it was before `apply`, as far as that is possible."""
        ...


class Engine(Protocol):
    """How a model's parameters live on the ranks: replicated, sharded, or managed by another library."""

    name: str

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """What it wants done to a model before `wrap`."""
        ...

    @property
    def divides_state(self) -> bool:
        """Whether each process holds only parts of parameters, as DTensors, so that all must take part in saving and loading."""
        ...

    @property
    def moves_models(self) -> bool:
        """Whether `wrap` puts a model on its device, unit by unit."""
        ...

    @property
    def axes(self) -> dict[str, int]:
        """The mesh axes over which models live, with their sizes."""
        ...

    def notes(self, model: Any) -> list[str]:
        """What is worth knowing about how a model lives on the ranks, a line each."""
        ...

    def details(self, model: Any) -> Any:
        """How a model lives on the ranks, as data; None where there is no more to say."""
        ...

    def follow(self, optimizer: Any) -> int:
        """Let a torch optimizer hold what the parameters of wrapped models have become; returns how many it found."""
        ...

    @property
    def before_step(self) -> Callable[[Any], None] | None:
        """What is called with an optimizer before each of its steps; None where nothing is to be checked."""
        ...

    @property
    def before_save(self) -> Callable[[], None] | None:
        """What every rank calls before it saves together with the others; None where nothing is to be checked."""
        ...

    def locate(self, error: BaseException) -> None:
        """Add to an error of a backward pass where this rank was, if it comes from the backend."""
        ...

    def current(self, parameters: Any) -> Any:
        """What parameters have become that may have been listed before their model was wrapped."""
        ...

    def wrap(self, model: Any, evaluation: bool) -> Any:
        """Prepare a model that is already on its device."""
        ...

    def forward_methods(self, model: Any) -> Sequence[str]:
        """The methods of a wrapped model, beside `forward`, that must run as `forward` does."""
        ...

    def unwrap(self, model: Any) -> Any:
        """The user's own module inside a wrapped one."""
        ...

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        """Keep backward passes inside from exchanging gradients."""
        ...

    def sync_next_backward(self, model: Any) -> AbstractContextManager[Any]:
        """Make the next backward pass exchange gradients although its forward ran under `no_sync`."""
        ...

    def clip_grad_norm_(self, parameters: Iterable[Any], max_norm: float, norm_type: float) -> Any:
        """Scale gradients down to a global norm of at most `max_norm`; return the norm before."""
        ...

    def exchange_order(self, model: Any) -> list[str] | None:
        """The order in which gradients are exchanged, where sums depend on it in their last bit and it is known."""
        ...

    def repeat_exchange_order(self, model: Any, names: Sequence[str]) -> None:
        """Exchange in this order from the start, as the run did that is to be continued; called on every rank."""
        ...

    def load_weights(self, model: Any, path: Any, **options: Any) -> tuple[list[str], list[str]]:
        """Load weights from files into the user's own module, wrapped or not; returns the missing and the unexpected names."""
        ...

    def model_state_dict(self, model: Any) -> dict[str, Any]:
        """The whole model's tensors by qualified name."""
        ...


class Loader(Protocol):
    """What accumulation, metrics and checkpoints ask of a prepared data loader."""

    end_of_dataloader: bool
    remainder: int

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]:
        """The position: epoch, samples consumed, and the generators' states before the epoch's order was drawn."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a position."""
        ...


class Tracker(Protocol):
    """A sink for the values that a run logs."""

    name: str

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings of the run."""
        ...

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        """Record values of one step."""
        ...

    def finish(self) -> None:
        """Flush and close."""
        ...

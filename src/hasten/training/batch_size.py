"""A function that is called again with a smaller batch size as long as memory runs out."""

from __future__ import annotations

import inspect
import operator
import reprlib
import sys
import traceback
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from hasten.training.attempt import alone, together
from hasten.world import memory

_SMALLER = 0.9  # of the size that was too much comes next


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    minimum_batch_size: int = 1,
    on_retry: Callable[[int, Exception], object] | None = None,
    synchronize: bool = False,
) -> Callable[..., Any]:
    """Make a function that calls `function(batch_size, ...)`, and calls it again with less when memory runs out.

    The size that went through is kept for later calls. Before each retry everything that the failed attempt held is let go:
    the local variables of its frames are cleared, garbage is collected, and the device's cache is emptied. What `function`
    put elsewhere (prepared objects, globals) it has to forget itself: begin it with `accelerator.free_memory()`.

    Usable as `@find_executable_batch_size`, as `@find_executable_batch_size(starting_batch_size=64)`, and as a function.

    Args:
        function: takes the batch size first; callers of the result leave it out.
        starting_batch_size: the size to try first.
        reduce_batch_size_fn: called without arguments for the next size; by default 0.9 of the last one, rounded down.
        minimum_batch_size: smaller sizes are not tried.
        on_retry: called as `on_retry(batch_size, error)` before each retry, with the new size and the error, when the failed
            attempt's memory is free already.
        synchronize: let all processes reduce together. By default each one has a size of its own, and one that fails alone
            leaves those that wait for it in a collective operation waiting until that fails. With True they tell each other
            at the end of each attempt, and all retry where one ran out of memory. That works only for functions that do not
            exchange anything (a probe on one batch under `accelerator.no_sync`, generation, evaluation); where they do, the
            processes that wait in an exchange end with its error at the group's timeout, and those that ran out of memory
            with a RuntimeError that names them. Every process must make the call.

    Raises:
        TypeError: what is given is no function that could be called again: a method that takes `self` first, a generator or a
            coroutine; (by the result) a batch size was passed.
        ValueError: a setting is not legal, or `reduce_batch_size_fn` gave no whole number below the last size.
        RuntimeError: (by the result) no size went through; its `__cause__` is the last out-of-memory error.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=256)
        ... def train(batch_size, epochs):
        ...     accelerator.free_memory()
        ...     ...
        >>> train(3)
    """
    if operator.index(minimum_batch_size) < 1:
        raise ValueError(f"minimum_batch_size={minimum_batch_size}: it must be 1 or more.")
    _check_size(starting_batch_size)
    if function is None:
        return partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            minimum_batch_size=minimum_batch_size,
            on_retry=on_retry,
            synchronize=synchronize,
        )
    _check_function(function)
    search = _Search(function, starting_batch_size, reduce_batch_size_fn, minimum_batch_size, on_retry, synchronize)

    @wraps(function, updated=())
    def decorator(*args: Any, **kwargs: Any) -> Any:
        return search.run(args, kwargs)

    if search.signature is not None and search.signature.parameters:
        decorator.__signature__ = _without_first(search.signature)  # type: ignore[attr-defined]
    return decorator


class _Search:
    """The search for one function's batch size, which goes on from call to call."""

    def __init__(
        self,
        function: Callable[..., Any],
        batch_size: int,
        reduce: Callable[[], int] | None,
        minimum: int,
        on_retry: Callable[[int, Exception], object] | None,
        synchronize: bool,
    ) -> None:
        self.function = function
        self.batch_size = batch_size
        self.reduce = reduce
        self.minimum = minimum
        self.on_retry = on_retry
        self.synchronize = synchronize
        self.signature = _signature(function)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function with the present size, and with smaller ones as long as memory runs out."""
        self._check_call(args, kwargs)
        memory.clear_device_cache(garbage_collection=True)
        attempt = together if self.synchronize else alone
        error: Exception | None = None
        try:
            while self.batch_size >= self.minimum:
                result, error = attempt(partial(self.function, self.batch_size, *args, **kwargs))
                if error is None:
                    return result
                del result
                self._retry_smaller(error)
            raise RuntimeError(self._nothing_left()) from error
        finally:
            # The error knows this frame, whose variables are the caller's objects: they must not keep each other alive.
            del error

    def _retry_smaller(self, error: Exception) -> None:
        _let_go(error)
        self.batch_size = self._next(error)
        memory.clear_device_cache(garbage_collection=True)
        if self.on_retry is not None and self.batch_size >= self.minimum:
            self.on_retry(self.batch_size, error)

    def _next(self, error: Exception) -> int:
        if self.reduce is None:
            return int(self.batch_size * _SMALLER)
        given = self.reduce()
        try:
            smaller = operator.index(given)
        except TypeError:
            raise ValueError(f"reduce_batch_size_fn returned {given!r}; it must return a whole number.") from error
        if smaller >= self.batch_size:
            raise ValueError(
                f"reduce_batch_size_fn returned {smaller} after {self.batch_size} was too much; it must return less each time."
            ) from error
        return smaller

    def _nothing_left(self) -> str:
        if self.minimum == 1:
            return "No executable batch size found, reached zero."
        return f"No executable batch size found: the next one, {self.batch_size}, is below minimum_batch_size={self.minimum}."

    def _check_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.signature is None:
            return
        name = getattr(self.function, "__name__", type(self.function).__name__)
        parameters = list(self.signature.parameters.values())
        if not parameters or parameters[0].kind in (_KEYWORD_ONLY, _VAR_KEYWORD):
            raise TypeError(f"`{name}` must take the batch size as its first parameter.")
        positional = [each for each in parameters if each.kind not in (_KEYWORD_ONLY, _VAR_KEYWORD)]
        too_many = len(args) + 1 > len(positional) and positional[-1].kind is not _VAR_POSITIONAL
        if not too_many and parameters[0].name not in kwargs:
            return
        rest = args[1:] if too_many else args
        shown = [
            f"{parameter.name}={reprlib.repr(value)}" for parameter, value in zip(positional[1:], rest, strict=False)
        ]
        shown += [f"{key}={reprlib.repr(value)}" for key, value in kwargs.items() if key != parameters[0].name]
        raise TypeError(
            f"Batch size was passed into `{name}` as the first argument when called. Remove this as the decorator already does "
            f"so: `{name}({', '.join(shown)})`"
        )


_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
_VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD
_VAR_POSITIONAL = inspect.Parameter.VAR_POSITIONAL


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # a built-in function that does not tell
        return None


def _check_size(size: Any) -> None:
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        raise ValueError(f"starting_batch_size={size!r}: it must be a whole number.")


def _check_function(function: Any) -> None:
    if not callable(function):
        raise TypeError(
            f"find_executable_batch_size({function!r}): the first argument must be a function; "
            "`starting_batch_size=...` gives the size."
        )
    name = getattr(function, "__name__", type(function).__name__)
    later = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(is_of(function) for is_of in later):
        raise TypeError(
            f"`{name}` is a generator or a coroutine, which does nothing until it is iterated or awaited, when no smaller size can "
            "be tried any more. Let find_executable_batch_size call an ordinary function."
        )
    signature = _signature(function)
    if signature is not None and next(iter(signature.parameters), "") in ("self", "cls"):
        raise TypeError(
            f"`{name}` takes `{next(iter(signature.parameters))}` first, where the batch size goes. Use the bound method, "
            f"`find_executable_batch_size(self.{name})`, or a function inside of the method."
        )


def _without_first(signature: inspect.Signature) -> inspect.Signature:
    first, *rest = signature.parameters.values()
    return signature.replace(parameters=[first, *rest] if first.kind is _VAR_POSITIONAL else rest)


def _let_go(error: BaseException) -> None:
    """Clear the local variables of the frames that an error and its causes come from: they hold the failed attempt's tensors."""
    # What is being handled outside of the attempt is none of its causes.
    waiting, seen = [error], {id(sys.exc_info()[1])}
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        waiting += [other for other in (each.__cause__, each.__context__) if other is not None]

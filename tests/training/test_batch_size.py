import gc
import inspect
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hasten import Accelerator
from hasten.training.batch_size import find_executable_batch_size
from hasten.world import process
from tests.ranks import run_ranks

TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB"


def needs(limit: int, sizes: list[int], error: type[Exception] = torch.OutOfMemoryError) -> Any:
    """A function that runs out of memory with more than `limit`, and notes the sizes that it is called with."""

    def train(batch_size: int, *args: Any, **kwargs: Any) -> Any:
        sizes.append(batch_size)
        if batch_size > limit:
            raise error(TEXT)
        return batch_size, args, kwargs

    return train


# ---- forms ----


def test_called_as_a_function_and_the_size_is_kept():
    sizes: list[int] = []
    train = find_executable_batch_size(needs(7, sizes), starting_batch_size=16)
    assert train("data", epochs=2) == (7, ("data",), {"epochs": 2})
    assert sizes == [16, 14, 12, 10, 9, 8, 7]
    assert train() == (7, (), {})
    assert sizes[7:] == [7]


def test_the_bare_decorator_begins_with_128():
    @find_executable_batch_size
    def train(batch_size: int, epochs: int) -> tuple[int, int]:
        """What it does."""
        return batch_size, epochs

    assert train(3) == train(epochs=3) == (128, 3)
    assert (train.__name__, train.__doc__) == ("train", "What it does.")
    assert str(inspect.signature(train)) == "(epochs: int) -> tuple[int, int]"


def test_the_decorator_with_arguments_obeys_all_of_them():
    sizes: list[int] = []
    told: list[tuple[int, str]] = []
    decorate = find_executable_batch_size(
        starting_batch_size=64,
        reduce_batch_size_fn=lambda: sizes[-1] // 2,
        minimum_batch_size=16,
        on_retry=lambda size, error: told.append((size, str(error))),
    )
    with pytest.raises(RuntimeError, match=r"found: the next one, 8, is below minimum_batch_size=16\.$"):
        decorate(needs(7, sizes))()
    assert sizes == [64, 32, 16]
    assert told == [(32, TEXT), (16, TEXT)]
    assert decorate(needs(100, []))() == (64, (), {})  # another function, another search


def test_a_bound_method():
    class Trainer:
        def train(self, batch_size: int, epochs: int) -> tuple[int, int]:
            return batch_size, epochs

    train = find_executable_batch_size(Trainer().train, 5)
    assert train(2) == (5, 2)
    with pytest.raises(TypeError, match=r"`train\(epochs=2\)`"):
        train(5, 2)


# ---- the end ----


def test_nothing_left():
    sizes: list[int] = []
    train = find_executable_batch_size(needs(0, sizes, RuntimeError), starting_batch_size=4)
    with pytest.raises(RuntimeError, match=r"^No executable batch size found, reached zero\.$") as caught:
        train()
    assert sizes == [4, 3, 2, 1]
    assert repr(caught.value.__cause__) == repr(RuntimeError(TEXT))
    with pytest.raises(RuntimeError, match="reached zero") as caught:
        train()
    assert caught.value.__cause__ is None
    assert sizes == [4, 3, 2, 1]
    with pytest.raises(RuntimeError, match="reached zero"):
        find_executable_batch_size(needs(0, sizes), starting_batch_size=0)()


@pytest.mark.parametrize("error", [ValueError(TEXT), RuntimeError("shapes differ"), RuntimeError(TEXT, 2), KeyError(1)])
def test_other_errors_come_through_as_they_are(error: Exception):
    def train(batch_size: int) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        find_executable_batch_size(train)()
    assert caught.value is error
    assert error.__cause__ is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (8, r"returned 8 after 8 was too much; it must return less each time\."),
        (20, r"returned 20 after 8"),
        (4.5, r"returned 4\.5; it must return a whole number\."),
        (None, "returned None"),
    ],
)
def test_sizes_must_become_smaller(given: Any, message: str):
    train = find_executable_batch_size(needs(0, []), starting_batch_size=8, reduce_batch_size_fn=lambda: given)
    with pytest.raises(ValueError, match=message) as caught:
        train()
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_the_floor_must_be_positive():
    with pytest.raises(ValueError, match=r"minimum_batch_size=0: it must be 1 or more\."):
        find_executable_batch_size(minimum_batch_size=0)


@pytest.mark.parametrize("size", ["8", 8.0, None, True])
def test_the_first_size_must_be_a_whole_number(size: Any):
    with pytest.raises(ValueError, match=rf"starting_batch_size={size!r}: it must be a whole number\."):
        find_executable_batch_size(starting_batch_size=size)


# ---- what can not be called again ----


def test_a_method_that_is_not_bound_is_refused_where_it_is_decorated():
    with pytest.raises(
        TypeError, match=r"`train` takes `self` first, where the batch size goes\. Use the bound method"
    ):

        class Trainer:
            @find_executable_batch_size
            def train(self, batch_size: int) -> None: ...


def test_what_runs_later_is_refused():
    def generator(batch_size: int) -> Any:
        yield batch_size

    async def coroutine(batch_size: int) -> None: ...

    async def both(batch_size: int) -> Any:
        yield batch_size

    for function in (generator, coroutine, both):
        with pytest.raises(TypeError, match=rf"`{function.__name__}` is a generator or a coroutine"):
            find_executable_batch_size(function)


def test_a_number_is_no_function():
    with pytest.raises(TypeError, match=r"find_executable_batch_size\(64\): the first argument must be a function"):
        find_executable_batch_size(64)  # type: ignore[arg-type]


# ---- calls with a batch size ----


def test_passing_a_batch_size_is_an_error_with_the_right_call():
    @find_executable_batch_size
    def train(batch_size: int, one: int, two: str = "") -> Any:
        return batch_size, one, two

    told = r"Batch size was passed into `train` as the first argument when called\. Remove this .* does so: "
    with pytest.raises(TypeError, match=told + r"`train\(one=1, two='a'\)`"):
        train(128, 1, "a")
    with pytest.raises(TypeError, match=told + r"`train\(one=1\)`"):
        train(1, batch_size=128)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'one'"):
        train()


def test_a_function_without_parameters():
    with pytest.raises(TypeError, match="must take the batch size as its first parameter"):
        find_executable_batch_size(lambda: None)()  # type: ignore[misc]


def test_what_has_no_signature_or_takes_anything_is_called_as_it_is():
    assert find_executable_batch_size(range, 3)() == range(3)
    assert find_executable_batch_size(needs(9, []), 3)(4, 5) == (3, (4, 5), {})


# ---- memory ----


class Tensors:
    """What an attempt holds; in a cycle, as models are."""

    def __init__(self) -> None:
        self.itself = self


def test_a_failed_attempt_is_gone_before_the_next_one_and_before_the_callback():
    alive: list[bool] = []
    held: list[weakref.ref[Tensors]] = []
    errors: list[Exception] = []

    def look() -> None:
        alive.extend(reference() is not None for reference in held)

    def deeper(tensors: Tensors) -> None:
        own = tensors
        try:
            raise KeyError(own is None)
        except KeyError:
            raise RuntimeError(TEXT) from None  # its context has frames as well

    def train(batch_size: int) -> int:
        look()
        tensors = Tensors()
        held.append(weakref.ref(tensors))
        if batch_size > 2:
            deeper(tensors)
        return batch_size

    def on_retry(batch_size: int, error: Exception) -> None:
        look()
        errors.append(error)

    def check() -> None:
        gc.disable()
        try:
            assert find_executable_batch_size(train, 4, on_retry=on_retry)() == 2
        finally:
            gc.enable()

    check()
    assert [str(error) for error in errors] == [TEXT] * 2
    assert all(error.__traceback__ is not None for error in errors)
    assert alive == [False] * 6


@pytest.mark.parametrize("limit", [0, 2])
def test_nothing_keeps_the_arguments_when_it_is_over(limit: int):
    def call() -> weakref.ref[nn.Module]:
        model = nn.Linear(1, 1)
        with suppress(RuntimeError):
            find_executable_batch_size(needs(limit, []), 3)(model)
        return weakref.ref(model)

    gc.disable()  # there is no cycle that would have to be collected
    try:
        assert call()() is None
    finally:
        gc.enable()


def test_the_error_that_is_handled_outside_keeps_its_frames():
    def outside() -> None:
        own = "here"
        raise KeyError(own)

    try:
        outside()
    except KeyError as error:
        handled = error
        find_executable_batch_size(needs(2, []), 3)()
    assert handled.__traceback__ is not None
    assert handled.__traceback__.tb_next is not None
    assert handled.__traceback__.tb_next.tb_frame.f_locals == {"own": "here"}


# ---- several processes ----


def search(limits: list[int], synchronize: bool) -> Any:
    process.start()
    sizes: list[int] = []
    texts: list[str] = []
    train = find_executable_batch_size(
        needs(limits[dist.get_rank()], sizes),
        starting_batch_size=8,
        synchronize=synchronize,
        on_retry=lambda size, error: texts.append(str(error)),
    )
    train()
    train()
    return sizes, texts


def test_by_default_every_process_has_its_own_size():
    assert run_ranks(search, 2, [8, 6], False) == [([8, 8], []), ([8, 7, 6, 6], [TEXT] * 2)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_together_all_take_the_size_that_goes_through_everywhere(world_size: int):
    limits = [8, 6, 7][:world_size]
    reached = min(limits)
    expected = [8, *range(7, reached - 1, -1), reached]
    results = run_ranks(search, world_size, limits, True)
    assert [sizes for sizes, _ in results] == [expected] * world_size
    if world_size == 3:
        first = "; ".join(f"rank {rank} ran out of memory (OutOfMemoryError: {TEXT})" for rank in (1, 2))
        assert results[0][1] == [f"{first}.", f"rank 1 ran out of memory (OutOfMemoryError: {TEXT})."]


def probe() -> tuple[int, float]:
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(
        model := nn.Linear(1, 1, bias=False), torch.optim.SGD(model.parameters(), lr=1.0)
    )

    @find_executable_batch_size(starting_batch_size=6, synchronize=True)
    def search(batch_size: int) -> int:
        with accelerator.no_sync(model):
            accelerator.backward(model(torch.ones(batch_size, 1)).sum())
        if accelerator.process_index == 1 and batch_size > 3:
            raise RuntimeError(TEXT)
        optimizer.zero_grad()
        return batch_size

    found = search()
    accelerator.backward(model(torch.full((1, 1), float(accelerator.process_index))).sum())
    return found, model.module.weight.grad.item()


def test_a_step_that_keeps_to_itself_finds_the_size_for_a_replicated_model():
    assert run_ranks(probe, 2) == [(3, 0.5)] * 2

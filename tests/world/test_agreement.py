import pytest

from hasten.world.agreement import (
    DistributedOperationException,
    Statement,
    disagreement,
    failure,
    key_text,
)
from tests.collectives.data import message, start
from tests.ranks import run_ranks

LEAF = ("['x']", "float32", "[2]")


def test_statements_travel_as_text():
    statement = Statement("reduce", {"reduction": "mean"}, (LEAF,), site="train.py:3")
    told = statement.told("é" * 300)
    assert len(told) == statement.nbytes == len(statement.told(""))
    assert Statement.parse(told) == statement
    assert Statement.parse(told).digest == statement.digest
    assert Statement.parse(told).where == "é" * 128
    assert len(statement.digest) == 16


@pytest.mark.parametrize(
    "other",
    [
        Statement("reduce", {}, (LEAF,)),
        Statement("gather", {"a": 1}, (LEAF,)),
        Statement("gather", {}, (("['x']", "float32", "[3]"),)),
        Statement("gather", {}, (LEAF,), site="a.py:1"),
        Statement("gather", {}, error="ValueError: x"),
    ],
)
def test_whatever_differs_changes_the_digest(other: Statement):
    assert other.digest != Statement("gather", {}, (LEAF,)).digest


def test_addresses_do_not_count():
    assert key_text(object()) == key_text(object())
    one, other = (failure("gather", TypeError(f"{object()!r}"), None) for _ in range(2))
    assert one.digest == other.digest


def test_ranks_are_grouped():
    statements = [Statement("gather", {}, (("x", "int64", f"[{rank in (3, 5)}]"),)) for rank in range(7)]
    assert "  x: int64 [False] on ranks 0-2, 4, 6; int64 [True] on ranks 3, 5\n" in str(disagreement(statements))


def test_many_differences_are_shortened():
    statements = [
        Statement("gather", {}, tuple((f"[{i}]", "int64", f"[{rank}]") for i in range(20))) for rank in range(2)
    ]
    text = str(disagreement(statements))
    assert "[7]: int64 [0] on rank 0; int64 [1] on rank 1\n  and 12 more\n" in text
    assert "[8]:" not in text


def test_differences_beyond_what_is_sent_are_still_found():
    statements = [
        Statement("gather", {}, tuple((f"{i}", "int64", f"[{i == 9000 + rank}]") for i in range(10_000)))
        for rank in (0, 1)
    ]
    sent = [Statement.parse(statement.told("")) for statement in statements]
    assert statements[0].digest != statements[1].digest
    assert "differ after their first 5000 tensors" in str(disagreement(sent))


# ---- on ranks ----


def other_operations() -> list[str]:
    import torch

    from hasten.collectives.broadcast import broadcast
    from hasten.collectives.gather import gather
    from hasten.collectives.objects import broadcast_object_list, gather_object
    from hasten.collectives.pad import pad_across_processes
    from hasten.collectives.reduce import reduce

    rank = start().rank
    x, large = torch.zeros(2), torch.zeros(2**19)
    calls = [
        lambda: gather(x),
        lambda: gather(large),
        lambda: reduce(x),
        lambda: reduce(large),
        lambda: broadcast(x),
        lambda: broadcast(large),
        lambda: pad_across_processes(x),
        lambda: gather_object(["x" * 100_000]),
        lambda: broadcast_object_list(["x" * 100_000]),
    ]
    names = ["gather", "reduce", "broadcast", "pad_across_processes", "gather_object", "broadcast_object_list"]
    found = []
    for index, call in enumerate(calls):
        text = message(call if rank == 0 else calls[(index + 2) % len(calls)])
        assert text.startswith("The 2 processes did not call the same operation:\n  rank 0: ")
        assert sum(f": {name}(" in text for name in names) == 2
        found.append(text)
    assert gather_object([rank]) == [0, 1]
    return found


def test_different_operations_raise_the_same_error_everywhere():
    first, second = run_ranks(other_operations, 2)
    assert first == second


def from_two_places() -> list[str]:
    import torch

    from hasten.collectives.objects import gather_object
    from hasten.collectives.reduce import reduce

    rank = start().rank
    found = []
    for _ in range(2):
        assert reduce(torch.ones(1), "sum").item() == 2  # from one place: fine
    try:
        if rank == 0:
            reduce(torch.ones(1))
        else:
            reduce(torch.ones(1))
        found.append("")
    except DistributedOperationException as error:
        found.append(str(error))
    try:
        if rank == 0:
            gather_object([])
        else:
            gather_object([])
        found.append("")
    except DistributedOperationException as error:
        found.append(str(error))
    return found


def test_debug_mode_compares_call_sites():
    assert run_ranks(from_two_places, 2) == [["", ""]] * 2
    first, second = run_ranks(from_two_places, 2, env={"ACCELERATE_DEBUG_MODE": "true"})
    assert first == second
    for text in first:
        assert "from different places (checked in debug mode only)" in text
        assert text.count("test_agreement.py:") == 2

import pytest

from hasten.collectives.together import from_main, together
from hasten.world import process
from tests.ranks import run_ranks


def one_fails(victim: int) -> str:
    world = process.start(cpu=True)

    def action() -> int:
        if world.rank == victim:
            raise OSError("no space left")
        return world.rank

    assert together(world, "nothing was written", lambda: world.rank) == world.rank
    with pytest.raises((OSError, RuntimeError)) as error:
        together(world, "nothing was written", action)
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_failure_of_one_is_an_error_of_all(victim):
    found = run_ranks(one_fails, 2, victim)
    assert found[victim] == "OSError: no space left"
    assert found[1 - victim] == f"RuntimeError: nothing was written: rank {victim} failed with OSError: no space left"


def test_one_process_alone():
    assert together(None, "nothing was written", lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        together(None, "nothing was written", lambda: 1 // 0)


def of_the_main(fails: bool) -> str:
    rank = process.start(cpu=True).rank

    def action() -> str:
        assert rank == 0, "only the main process does it"
        if fails:
            raise KeyError("x")
        return f"found by {rank}"

    try:
        return from_main(process.current(), "nothing was found", action)
    except (KeyError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def test_what_the_main_process_finds_is_known_to_all():
    assert run_ranks(of_the_main, 3, False) == ["found by 0"] * 3
    first, *others = run_ranks(of_the_main, 3, True)
    assert first == "KeyError: 'x'"
    assert others == ["RuntimeError: nothing was found: rank 0 failed with KeyError: 'x'"] * 2
    assert from_main(None, "", lambda: 3) == 3

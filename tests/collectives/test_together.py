import pytest

from hasten.collectives.together import together
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

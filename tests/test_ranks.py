import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy
import psutil
import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.ranks import RankError, run_ranks


def total(start: int, step: int = 1) -> int:
    tensor = torch.tensor([start + step * dist.get_rank()])
    dist.all_reduce(tensor)
    return int(tensor)


def variables(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def pid() -> int:
    return os.getpid()


# ---- values ----


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_any_world_size_computes_together(world_size):
    assert run_ranks(total, world_size, 10, step=2) == [10 * world_size + world_size * (world_size - 1)] * world_size


def place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def test_results_come_in_rank_order():
    assert run_ranks(place, 3) == [(0, 3), (1, 3), (2, 3)]


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2 + dist.get_rank()


def test_big_tensors_travel_both_ways_by_value():
    tensor = torch.arange(2_500_000, dtype=torch.float32)  # 10 MB
    results = run_ranks(double, 2, tensor)
    for rank, result in enumerate(results):
        torch.testing.assert_close(result, tensor * 2 + rank)
        assert not result.is_shared()


def test_a_call_that_can_not_be_pickled_is_explained():
    with pytest.raises(TypeError, match="must stand at the top level of its module"):
        run_ranks(lambda: 1, 1)


def unpicklable() -> object:
    return lambda: 1


def test_a_result_that_can_not_be_pickled_is_the_error_of_its_rank():
    with pytest.raises(RankError, match=r"rank 0 =====\n(.*\n)*.*pickle"):
        run_ranks(unpicklable, 1)


# ---- the state that a case finds ----


def test_each_rank_has_the_variables_of_torchrun():
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    found = run_ranks(variables, 2, *names)
    assert [list(values.values()) for values in found] == [
        ["0", "0", "2", "2", "127.0.0.1"],
        ["1", "1", "2", "2", "127.0.0.1"],
    ]


def test_the_callers_variables_and_folder_are_seen_and_env_adds_and_removes(monkeypatch, tmp_path):
    monkeypatch.setenv("OF_CALLER", "1")
    monkeypatch.setenv("UNWANTED", "1")
    monkeypatch.chdir(tmp_path)
    env = {"UNWANTED": None, "EXTRA": "2", "LOCAL_WORLD_SIZE": "1"}
    found = run_ranks(variables, 1, "OF_CALLER", "UNWANTED", "EXTRA", "LOCAL_WORLD_SIZE", env=env)
    assert found == [{"OF_CALLER": "1", "UNWANTED": None, "EXTRA": "2", "LOCAL_WORLD_SIZE": "1"}]
    assert run_ranks(os.getcwd, 1) == [str(tmp_path.resolve())]


def spoil() -> int:
    os.environ["SPOILED"] = "1"
    os.chdir("/")
    sys.path.insert(0, "spoiled")
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    return os.getpid()


def spoiled() -> tuple[object, ...]:
    return (
        "SPOILED" in os.environ,
        os.getcwd(),
        "spoiled" in sys.path,
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        os.getpid(),
    )


def test_nothing_of_a_case_is_left_for_the_next():
    worker = run_ranks(spoil, 1)[0]
    assert run_ranks(spoiled, 1) == [(False, os.getcwd(), False, torch.float32, True, 1, False, worker)]


def draw() -> tuple[float, float, float]:
    return random.random(), numpy.random.rand(), torch.rand(()).item()


def test_random_generators_start_afresh():
    first = run_ranks(draw, 2)
    assert first[0] == first[1]
    assert run_ranks(draw, 2) == first


def warn(category: type[Warning]) -> None:
    warnings.warn("careful", category, stacklevel=1)


def test_warnings_are_errors_in_ranks_as_in_tests():
    with pytest.raises(RankError, match="FutureWarning: careful"):
        run_ranks(warn, 1, FutureWarning)


@pytest.mark.filterwarnings("ignore:care.*:FutureWarning")
def test_the_filters_of_a_test_hold_in_its_ranks():
    assert run_ranks(warn, 1, FutureWarning) == [None]
    with pytest.raises(RankError, match="UserWarning: careful"):
        run_ranks(warn, 1, UserWarning)


def start_group() -> tuple[bool, int, str]:
    before = dist.is_initialized()
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return before, total(1), type(store).__name__


def test_the_process_group_can_be_left_to_the_function_which_then_meets_in_a_file():
    assert run_ranks(start_group, 2, initialise=False) == [(False, 3, "FileStore")] * 2


def remember() -> None:
    sys.modules["hasten.world.context"] = SimpleNamespace(reset=lambda: print("forgotten"))  # type: ignore[assignment]


def test_what_hasten_knows_of_the_process_is_forgotten_after_a_case():
    assert run_ranks(remember, 1, fresh=True).stdout == ["forgotten\n"]


# ---- warm processes ----


def test_ranks_stay_warm():
    first = run_ranks(pid, 2)
    assert run_ranks(pid, 2) == first
    assert run_ranks(pid, 3)[:2] == first
    assert len({*first, os.getpid()}) == 3


def modules() -> tuple[bool, int]:
    return "tests.rank_zygote" in sys.modules and "torch._dynamo" in sys.modules, len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ranks are spawned")
def test_a_new_rank_has_imported_torch_already_and_has_one_thread_beside_the_main_one():
    assert run_ranks(modules, 1, fresh=True, initialise=False) == [(True, 2)]


def test_fresh_ranks_are_new_and_end_with_their_case():
    warm = run_ranks(pid, 1)
    fresh = run_ranks(pid, 1, fresh=True)
    assert fresh != warm
    assert not psutil.pid_exists(fresh[0])
    assert run_ranks(pid, 1) == warm


def leave(what: str) -> int:
    if what == "thread":
        threading.Thread(target=time.sleep, args=(60,), daemon=True, name="left-behind").start()
    elif what == "child process":
        torch.multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True).start()
    elif what == "signal handler":
        signal.signal(signal.SIGTERM, lambda *_: None)
    return os.getpid()


@pytest.mark.parametrize("what", ["thread", "child process", "signal handler"])
def test_a_rank_that_leaves_something_behind_is_named_and_replaced(what):
    left = run_ranks(leave, 2, what)
    assert [[text.startswith(what) for text in leaks] for leaks in left.leaks] == [[True], [True]]
    assert not set(run_ranks(pid, 2)) & set(left)


def test_a_group_left_behind_is_destroyed():
    run_ranks(start_group, 2, initialise=False)
    assert run_ranks(start_group, 2, initialise=False) == [(False, 3, "FileStore")] * 2


@pytest.mark.skipif(not hasattr(psutil.Process, "num_fds"), reason="needs file descriptors to count")
def test_replacing_ranks_leaks_no_descriptors():
    run_ranks(pid, 1, fresh=True)
    before = psutil.Process().num_fds()
    for _ in range(3):
        run_ranks(pid, 1, fresh=True)
    assert psutil.Process().num_fds() == before


@pytest.mark.full
def test_ranks_can_be_spawned_where_fork_is_not_safe(monkeypatch):
    ranks.close_pool()
    monkeypatch.setattr(ranks, "START_METHOD", "spawn")
    assert run_ranks(total, 2, 10) == [21, 21]
    ranks.close_pool()


# ---- failures ----


def fail(order: list[int]) -> str:
    rank = dist.get_rank()
    print(f"printed by {rank}")
    print(f"complained by {rank}", file=sys.stderr)
    if rank in order:
        with suppress(RuntimeError):
            for earlier in order[: order.index(rank)]:
                dist.recv(torch.zeros(1), earlier)  # ends when that rank is gone
        raise ValueError(f"wrong on {rank}")
    return "fine"


def test_every_traceback_is_shown_the_first_failure_first():
    with pytest.raises(RankError) as caught:
        run_ranks(fail, 3, [2, 0])
    text = str(caught.value)
    assert list(caught.value.tracebacks) == [2, 0]
    assert text.startswith("tests.test_ranks.fail: 2 of 3 ranks failed\n===== rank 2 =====\nTraceback")
    assert text.index("wrong on 2") < text.index("wrong on 0") < text.index("===== rank 1 =====\nreturned")
    assert 'raise ValueError(f"wrong on {rank}")' in text
    assert "rank_worker" not in text


def test_output_is_kept_of_good_and_of_bad_cases():
    good = run_ranks(fail, 2, [])
    assert good == ["fine", "fine"]
    assert good.stdout == ["printed by 0\n", "printed by 1\n"]
    assert good.leaks == [(), ()]
    assert good.stderr == ["complained by 0\n", "complained by 1\n"]
    with pytest.raises(RankError, match="----- stderr of rank 1 -----\ncomplained by 1") as caught:
        run_ranks(fail, 2, [1])
    assert caught.value.stdout == good.stdout
    assert list(caught.value.tracebacks) == [1]


def test_failed_ranks_are_replaced():
    before = run_ranks(pid, 2)
    with pytest.raises(RankError):
        run_ranks(fail, 2, [0, 1])
    assert not set(run_ranks(pid, 2)) & set(before)
    assert not any(psutil.pid_exists(process) for process in before)


def compare(left: int, right: int) -> None:
    assert left == right


def test_a_bare_assertion_shows_its_values():
    with pytest.raises(RankError, match=r"assert left == right(.*\n)*  where left = 1\n  where right = 2"):
        run_ranks(compare, 1, 1, 2)


def test_exiting_is_a_failure():
    with pytest.raises(RankError, match="SystemExit: 3"):
        run_ranks(sys.exit, 1, 3)


def fail_in_thread() -> None:
    thread = threading.Thread(target=compare, args=(1, 2))
    thread.start()
    thread.join()


def test_an_exception_lost_in_a_thread_is_a_failure():
    with pytest.raises(RankError, match=r"lost in <Thread(.*\n)*.*AssertionError"):
        run_ranks(fail_in_thread, 1)


def fail_alone(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("before the collective")
    dist.barrier()


def test_ranks_that_wait_for_a_failed_one_do_not_hang():
    with pytest.raises(RankError, match=r"2 of 2 .*\n===== rank 1 =====\n(.*\n)*ValueError: before") as caught:
        run_ranks(fail_alone, 2, 1, timeout=60)
    assert "dist.barrier()" in caught.value.tracebacks[0]


def hang(rank: int) -> None:
    print("still here")
    if dist.get_rank() == rank:
        time.sleep(600)
    total(1)


def test_a_hang_is_ended_and_every_stack_is_shown():
    with pytest.raises(RankError, match="2 of 2 ranks failed") as caught:
        run_ranks(hang, 2, 1, timeout=1)
    assert all("no result within 1 s; it was here:" in text for text in caught.value.tracebacks.values())
    assert "dist.all_reduce(tensor)" in caught.value.tracebacks[0]
    assert "time.sleep(600)" in caught.value.tracebacks[1]
    assert "rank_worker" not in str(caught.value)
    assert caught.value.stdout == ["still here\n"] * 2
    assert run_ranks(total, 2, 1) == [3, 3]


def meet(absent: int) -> None:
    if dist.get_rank() != absent:
        dist.barrier()


def test_a_collective_that_one_rank_never_joins_is_ended():
    with pytest.raises(RankError, match="===== rank 1 =====\nreturned") as caught:
        run_ranks(meet, 2, 1, timeout=1)
    assert list(caught.value.tracebacks) == [0]
    assert "dist.barrier()" in caught.value.tracebacks[0]


def hold_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(600)


@pytest.mark.skipif(sys.platform == "win32", reason="needs the C library's sleep")
def test_native_code_that_holds_the_interpreter_is_ended_and_shown(monkeypatch):
    monkeypatch.setattr(ranks, "ANSWER_LIMIT", 0.5)
    with pytest.raises(RankError, match="native code holds the interpreter") as caught:
        run_ranks(hold_the_interpreter, 1, timeout=0.5)
    assert "in hold_the_interpreter" in caught.value.stderr[0]


def die(rank: int, number: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), number)
    total(1)


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_a_killed_rank_is_named_and_replaced():
    with pytest.raises(RankError, match=r"===== rank 1 =====\nthe process died: signal 9 \(Killed\)") as caught:
        run_ranks(die, 2, 1, signal.SIGKILL)
    assert "dist.all_reduce(tensor)" in caught.value.tracebacks[0]
    assert run_ranks(total, 2, 1) == [3, 3]


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_a_crash_leaves_its_stack():
    with pytest.raises(RankError, match=r"signal 11(.*\n)*Fatal Python error: Segmentation fault(.*\n)*.* in die"):
        run_ranks(die, 1, 0, signal.SIGSEGV)


def test_a_warm_rank_that_died_meanwhile_is_replaced():
    process = psutil.Process(run_ranks(pid, 1)[0])
    process.kill()
    assert wait_until(lambda: not process.is_running(), 10)
    assert run_ranks(pid, 1) != [process.pid]


# ---- the end ----


def runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return (
            psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        )  # an orphan's may stay where init does not collect it
    return False


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


def test_a_closed_pool_has_ended_its_ranks_and_opens_again():
    before = run_ranks(pid, 2)
    ranks.close_pool()
    assert not any(runs(process) for process in before)
    assert not set(run_ranks(pid, 2)) & set(before)


SCRIPT = """
import os, pathlib, psutil, time
from tests.ranks import run_ranks

def stay(path):
    pathlib.Path(path).touch()
    time.sleep(600)

def test_two():
    run_ranks(os.getpid, 2)
    pathlib.Path("pids").write_text(" ".join(str(child.pid) for child in psutil.Process().children(recursive=True)))
    run_ranks(stay, 2, os.path.abspath("staying"), timeout=600)
"""


def test_no_process_outlives_a_killed_pytest(tmp_path):
    """The hardest end: no handler runs, and ranks are in the middle of a case. Each run of the tests shows the ordinary one."""
    (tmp_path / "test_script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_script.py"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as process:
        wait_until(lambda: (tmp_path / "staying").exists() or process.poll() is not None, 300)
        process.kill()
        output = process.communicate()[0]
    assert (tmp_path / "staying").exists(), output
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) >= 2, "two ranks, and their zygote where there is one"
    assert wait_until(lambda: not any(map(runs, pids)), 20)

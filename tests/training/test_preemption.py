import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hasten import Accelerator, DataLoaderConfiguration, ProjectConfiguration
from hasten.training import preemption
from hasten.world.context import CONTEXT
from tests.launch.jobs import LIMIT, PREEMPTIBLE, Jobs
from tests.plain import TinyMLP, loss_of, parts, sgd
from tests.ranks import run_ranks
from tests.training.preempted import BATCH, EPOCHS, SAMPLES, SIGNALS, train

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")

# ---- a run that is interrupted and goes on is the run that was not ----


def attempt(folder: str, sharded: bool, when: tuple[int, int, str] | None) -> Any:
    losses: list[str] = []
    try:
        return losses, train(folder, losses, sharded, when)
    except SystemExit as left:
        return losses, left.code


@pytest.mark.parametrize(
    ("size", "sharded", "when", "begun"),
    [
        (1, False, (0, 7, "SIGTERM"), 8),  # in the middle of a window: at its end
        (2, False, (1, 4, "SIGUSR1"), 4),
        (2, False, (0, 10, "SIGTERM"), 10),  # in the last batch of an epoch: before the next one
        (2, True, (1, 5, "SIGTERM"), 6),
        (3, False, (2, 3, "SIGUSR1"), 4),
        (3, True, (1, 9, "SIGUSR1"), 9),  # after the epoch's seven batches comes a window of two
    ],
)
def test_one_rank_gets_a_signal_and_the_job_goes_on_exactly(tmp_path, size, sharded, when, begun):
    whole = run_ranks(attempt, size, str(tmp_path / "whole"), sharded, None)
    first = run_ranks(attempt, size, str(tmp_path / "run"), sharded, when)
    second = run_ranks(attempt, size, str(tmp_path / "run"), sharded, None)
    batches = -(-SAMPLES // (BATCH * size)) * EPOCHS
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["checkpoint_0"]
    for (losses, end), (before, code), (after, again) in zip(whole, first, second, strict=True):
        assert code == 75
        assert end == {**again, "begun": 0}
        assert (again["begun"], again["count"]) == (begun, batches)
        assert before + after == losses
    said = "".join(first.stderr)
    assert said.count("Leaving with exit code 75") == 1
    assert f"{when[2]} has come after" in first.stderr[0]


# ---- real processes ----


@pytest.fixture
def jobs(tmp_path: Path, hears_signals: None) -> Iterator[Jobs]:
    started = Jobs(tmp_path)
    started.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    yield started
    started.end_all()


LOOP = ("--cpu", "-m", "tests.training.preempted")


def losses_of(jobs: Jobs) -> list[list[str]]:
    return [file.read_text().split() for file in sorted(jobs.folder.glob("losses-*"))]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="local"),
        pytest.param(("--max_restarts", "1"), id="torch.distributed.run", marks=pytest.mark.full),
    ],
)
def test_a_launched_job_leaves_with_75_and_a_new_launch_goes_on(jobs, options):
    arguments = ("--num_processes", "2", *options, *LOOP)
    left = jobs.run(*arguments, "run", "1:5:SIGTERM")
    assert left.returncode == 75, left.stderr
    assert "the job has saved and can be started again (exit code 75)" in left.stderr
    assert "failed with" not in left.stderr
    done = jobs.run(*arguments, "run")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["begun"] == 6
    goes_on = losses_of(jobs)
    whole = run_ranks(attempt, 2, str(jobs.folder / "whole"), False, None)
    assert goes_on == [losses for losses, _ in whole]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        pytest.param(("--num_processes", "1"), "SIGTERM"),
        pytest.param(("--num_processes", "1"), "SIGUSR1", marks=pytest.mark.full),
        pytest.param(("--num_processes", "2"), "SIGTERM", marks=pytest.mark.full),
        pytest.param(("--num_processes", "2"), "SIGUSR1"),
        pytest.param(("--num_processes", "2", "--max_restarts", "1"), "SIGTERM"),
        pytest.param(("--num_processes", "2", "--max_restarts", "1"), "SIGUSR1", marks=pytest.mark.full),
    ],
)
def test_a_signal_to_the_launcher_reaches_the_ranks(jobs, options, name):
    job = jobs.start("--cpu", *options, jobs.script(PREEMPTIBLE))
    jobs.wait_for_files("up-*", int(options[1]))
    job.send_signal(getattr(signal, name))
    _, said = job.communicate(timeout=LIMIT)
    assert job.returncode == 75, said
    assert f"{name} has come after" in said
    assert [path.name for path in (jobs.folder / "run" / "checkpoints").iterdir()] == ["checkpoint_0"]


# ---- handlers ----


def configured(folder: Any, **options: Any) -> Accelerator:
    project = ProjectConfiguration(project_dir=str(folder), save_on_signal=options.pop("signals", SIGNALS))
    return Accelerator(cpu=True, project_config=project, **options)


def run_loop(accelerator: Accelerator, act: Callable[[int], None], steps: int = 8) -> int:
    """Train until the end of the loader or of the job; the steps that were made."""
    model, optimizer, loader, schedule = accelerator.prepare(*parts())
    done = 0
    for number, batch in enumerate(loader):
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        done += 1
        act(number)
        if number + 1 == steps:
            break
    return done


def test_an_earlier_handler_is_called_too_and_put_back_in_the_end(tmp_path):
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    mine, default = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM)
    try:
        accelerator = configured(tmp_path)
        assert signal.getsignal(signal.SIGUSR1) != mine
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
        assert accelerator.check_preemption()
        accelerator.end_training()
        accelerator.end_training()
        assert (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM)) == (mine, default)
        assert CONTEXT.loaders.watcher is None
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_came_later_stays(tmp_path):
    before = signal.getsignal(signal.SIGUSR2)
    accelerator = configured(tmp_path, signals="SIGUSR2")
    ours = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    accelerator.end_training()
    assert ours is not before
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    signal.signal(signal.SIGUSR2, before)


def test_the_newest_accelerator_is_obeyed(tmp_path):
    first = configured(tmp_path / "first")
    second = configured(tmp_path / "second")
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        run_loop(second, lambda _: None)
    assert left.value.code == 75
    assert [path.name for path in tmp_path.iterdir()] == ["second"]
    second.end_training()
    first.end_training()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_ctrl_c_does_not_interrupt_what_is_to_be_saved(tmp_path, hears_signals):
    accelerator = configured(tmp_path, signals=(signal.SIGINT,))
    os.kill(os.getpid(), signal.SIGINT)
    assert accelerator.check_preemption()
    accelerator.end_training()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_forked_process_obeys_a_signal_as_before(tmp_path):
    accelerator = configured(tmp_path)
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert not accelerator.check_preemption()


def test_another_thread_is_told_that_it_hears_no_signals(tmp_path, caplog):
    before, made = signal.getsignal(signal.SIGTERM), []
    thread = threading.Thread(target=lambda: made.append(configured(tmp_path)), name="trainer")
    thread.start()
    thread.join()
    assert "save_on_signal=('SIGTERM', 'SIGUSR1') has no effect on rank 0" in caplog.text
    assert "the thread 'trainer'" in caplog.text
    assert signal.getsignal(signal.SIGTERM) == before
    assert not made[0].check_preemption()


def test_a_signal_that_the_platform_lacks_is_told(tmp_path, caplog):
    configured(tmp_path, signals=("SIGBREAK", "SIGTERM"))
    assert "this platform has no SIGBREAK" in caplog.text
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL


def test_a_handler_outside_of_python_is_left_alone(tmp_path, caplog, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    accelerator = configured(tmp_path)
    accelerator.end_training()
    monkeypatch.undo()
    assert "SIGUSR1 is handled by something outside of Python already" in caplog.text
    assert signal.getsignal(signal.SIGTERM) == before


# ---- where a job stops ----


def raise_after(step: int) -> Callable[[int], None]:
    return lambda number: os.kill(os.getpid(), signal.SIGTERM) if number == step else None


def test_the_folder_without_automatic_names(tmp_path):
    accelerator = configured(tmp_path, gradient_accumulation_steps=1)
    with pytest.raises(SystemExit) as left:
        run_loop(accelerator, raise_after(2))
    assert left.value.code == 75
    assert (tmp_path / "preempted" / "hasten_manifest.json").is_file()
    accelerator.end_training()
    again = Accelerator(cpu=True)
    _, _, loader, schedule = again.prepare(*parts())
    again.load_state(tmp_path / "preempted")
    assert schedule.get_last_lr() == [0.1 / 8]  # it had stepped three times
    assert loader.state_dict()["iteration"] == 0


def test_a_signal_needs_a_folder():
    with pytest.raises(ValueError, match="needs the folder of the run to save to: pass `project_dir`"):
        Accelerator(cpu=True, project_config=ProjectConfiguration(save_on_signal="SIGTERM"))


def test_evaluation_inside_the_loop_is_no_boundary(tmp_path):
    accelerator = configured(tmp_path)
    held_out = accelerator.prepare(parts()[2])
    seen = []

    def evaluate(number: int) -> None:
        if number == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        seen.append(sum(1 for _ in held_out))

    with pytest.raises(SystemExit):
        run_loop(accelerator, evaluate)
    assert seen == [8, 8]
    accelerator.end_training()


def test_loops_without_a_prepared_loader_stop_before_the_next_backward_pass(tmp_path):
    accelerator = configured(tmp_path)
    model = TinyMLP()
    model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    done: list[int] = []

    def loop() -> None:
        for number, batch in enumerate(parts()[2]):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            done.append(number)
            raise_after(2)(number)

    with pytest.raises(SystemExit):
        loop()
    assert done == [0, 1, 2]
    assert (tmp_path / "preempted").is_dir()
    accelerator.end_training()


def lockstep(accelerator: Accelerator, epochs: int, batch: int, act: Callable[[], None]) -> None:
    model = TinyMLP()
    model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    first, second = accelerator.prepare(parts(batch)[2], parts(batch)[2])
    for _ in range(epochs):
        for pair in zip(first, second, strict=True):
            for each in pair:
                accelerator.backward(loss_of(model, each))
            optimizer.step()
            optimizer.zero_grad()
        act()


def test_loaders_in_lockstep_have_one_boundary_per_step(tmp_path):
    accelerator = configured(tmp_path)
    lockstep(accelerator, 2, 8, lambda: None)
    watch = accelerator._session.preemption
    assert watch is not None
    assert watch._passed == 15  # 8 in each epoch, that of the very last batch is still to come
    accelerator.end_training()


def test_epochs_of_one_batch_stop_before_the_next(tmp_path):
    accelerator = configured(tmp_path)
    ends: list[int] = []

    def act() -> None:
        ends.append(1)
        if len(ends) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        lockstep(accelerator, 5, 64, act)
    assert len(ends) == 2
    accelerator.end_training()


def test_a_save_that_has_failed_in_the_background_does_not_prevent_this_one(tmp_path, caplog):
    class Failed:
        def settle(self) -> None:
            raise OSError("no space left")

    accelerator = configured(tmp_path)
    accelerator._session.saving = Failed()  # type: ignore[assignment]
    with pytest.raises(SystemExit):
        run_loop(accelerator, raise_after(2))
    assert "The save before this one, in the background, has failed: no space left" in caplog.text
    assert (tmp_path / "preempted").is_dir()
    accelerator.end_training()


def test_whoever_checks_decides(tmp_path):
    accelerator = configured(tmp_path)
    found: list[bool] = []

    def check(number: int) -> None:
        raise_after(2)(number)
        found.append(accelerator.check_preemption())

    assert run_loop(accelerator, check) == 8
    assert found == [False] * 2 + [True] * 6
    assert list(tmp_path.iterdir()) == []
    accelerator.end_training()


def test_checking_needs_signals():
    with pytest.raises(ValueError, match="check_preemption\\(\\) answers for signals that were named"):
        Accelerator(cpu=True).check_preemption()


def test_an_accelerator_that_waits_for_signals_can_be_pickled(tmp_path):
    accelerator = configured(tmp_path)
    copy = pickle.loads(pickle.dumps(accelerator))
    assert copy._session.preemption is None
    accelerator.end_training()


def test_nothing_is_loaded_or_watched_unless_it_is_asked_for():
    code = "import sys, hasten; hasten.Accelerator(cpu=True); print([m for m in sys.modules if 'preemption' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT)
    assert done.stdout.strip() == "[]"


# ---- agreement ----


def own_loop(folder: str) -> list[bool]:
    accelerator = configured(folder)
    found = [accelerator.check_preemption()]
    if accelerator.is_last_process:
        os.kill(os.getpid(), signal.SIGUSR1)
    found += [accelerator.check_preemption(), accelerator.check_preemption()]
    accelerator.end_training()
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_get_the_same_answer(tmp_path, size):
    assert run_ranks(own_loop, size, str(tmp_path)) == [[False, True, True]] * size


def exchanges(folder: str, period: float) -> tuple[int, int]:
    preemption.PERIOD = period
    accelerator = configured(folder, dataloader_config=DataLoaderConfiguration(split_batches=True))
    run_loop(accelerator, lambda _: None)
    watch = accelerator._session.preemption
    assert watch is not None
    accelerator.end_training()
    return watch._passed, watch.exchanges


def test_exchanges_become_rare(tmp_path):
    # the first two boundaries, or so: from one to the next exchange at most twice as many as before
    assert run_ranks(exchanges, 2, str(tmp_path), 0.0) == [(7, 7)] * 2
    ((passed, made), other) = run_ranks(exchanges, 2, str(tmp_path), 1e6)
    assert (passed, made) == other == (7, 3)  # at the boundaries 1, 3 and 7


def uneven(folder: str) -> Any:
    accelerator = configured(folder)
    rank = accelerator.process_index
    model = TinyMLP()
    model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    loader = accelerator.prepare(torch.utils.data.DataLoader(parts()[2].dataset, 8))
    done = 0
    try:
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for number, batch in enumerate(loader):
                if rank and number == 2:
                    break
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                if rank:
                    os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit as left:
        return done, left.code
    return done, None


def test_ranks_with_different_numbers_of_batches_stop_after_the_last_of_all(tmp_path):
    assert run_ranks(uneven, 2, str(tmp_path)) == [(4, 75), (2, 75)]
    assert (tmp_path / "preempted").is_dir()


def frozen_and_alone(folder: str) -> Any:
    """Ranks that exchange nothing, one of them much faster."""
    preemption.PERIOD = 0.02
    accelerator = configured(folder)
    layer = nn.Linear(8, 1)
    optimizer = accelerator.prepare(sgd(layer.parameters()))
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.ones(400, 8), 1))
    done = 0
    try:
        for _ in range(50):
            for batch in loader:
                layer(batch).sum().backward()
                optimizer.step()
                done += 1
                if accelerator.process_index:
                    time.sleep(0.001)
                    if done == 20:
                        os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit:
        return done
    return None


def test_ranks_that_drift_apart_stop_at_the_same_update(tmp_path):
    fast, slow = run_ranks(frozen_and_alone, 2, str(tmp_path))
    assert fast == slow >= 20

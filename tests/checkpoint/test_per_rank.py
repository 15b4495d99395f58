"""Saves in which each process commits its own files: nothing is exchanged, and the reader decides what is complete."""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hasten import Accelerator, FullyShardedDataParallelPlugin, ProjectConfiguration
from hasten.checkpoint import retention, sharded, sidecar, store
from tests.checkpoint import crash
from tests.checkpoint.objects import flip
from tests.checkpoint.test_sharded import EXACT, Run, compare, hybrid, on, train
from tests.ranks import RankError, run_ranks

OWN = {"sharded_save": "per_rank"}


# -- a resumed run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "optimizer"), [(1, "adamw"), (2, "adafactor"), (3, "adamw"), (3, "adafactor")])
def test_an_interrupted_run_goes_on_to_the_bit(tmp_path, ranks, optimizer):
    losses, state = on(ranks, None, 6, optimizer=optimizer)
    first, _ = on(ranks, str(tmp_path / "ck"), 3, optimizer=optimizer, **OWN)
    second, resumed = on(ranks, None, 3, load=str(tmp_path / "ck"), optimizer=optimizer)
    compare(first + second, losses, EXACT)
    compare(resumed, state, EXACT)
    store.verify(tmp_path / "ck", checksums=True)
    [save] = sidecar.saves(tmp_path / "ck")
    assert len(list(save.glob("pytorch_model_fsdp_0_rank*.bin"))) == ranks


def test_copies_of_shards(tmp_path):
    losses, state = run_ranks(hybrid, 4, None, 4, timeout=60)[0]
    first = run_ranks(hybrid, 4, str(tmp_path / "ck"), 2, timeout=60, **OWN)[0]
    second = run_ranks(hybrid, 4, None, 2, load=str(tmp_path / "ck"), timeout=60)[0]
    compare(first[0] + second[0], losses, EXACT)
    compare(second[1], state, EXACT)
    for found in run_ranks(refused, 4, str(tmp_path / "ck")):  # the same number of processes on another mesh
        assert "4 processes on the mesh dp_replicate 2 x dp_shard 2" in found
        assert "this is 4 processes on the mesh dp_shard 4" in found


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(size, size + 2, bias=False) for size in (3, 5, 7)))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def muon(folder: str, load: bool) -> tuple[dict[str, Tensor], list[int]]:
    """Save after two steps and make a third one, or load and make the third one: the state, and who owns the matrices."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **OWN))
    torch.manual_seed(4)
    model = Matrices()
    layers = list(model.layers)
    # Who comes first gets other owners: with those of its own the resumed run would lose the state of the others.
    late = layers[1:] if load else layers[:0:-1]
    model, optimizer = accelerator.prepare(model, torch.optim.Muon([layers[0].weight], lr=0.1))
    for layer in late:
        optimizer.add_param_group({"params": [layer.weight]})
    if load:
        accelerator.load_state(folder)
    for step in (2,) if load else (0, 1, 2):
        if step == 2 and not load:
            accelerator.save_state(folder)
        model(torch.full((1, 3), step + 1.0)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    owners = [optimizer.owners[layer.weight] for layer in model.layers]
    return whole(model, optimizer), owners


def whole(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    optimizer.divide_state()
    held = {name: each.detach() for name, each in model.named_parameters()}
    held |= {f"{name}:m": optimizer.state[each]["momentum_buffer"] for name, each in model.named_parameters()}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in held.items()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_whole_matrices_stay_with_their_owners(tmp_path, ranks):
    expected = run_ranks(muon, ranks, str(tmp_path / "ck"), False)
    for found, owners in run_ranks(muon, ranks, str(tmp_path / "ck"), True):
        compare(found, expected[0][0], EXACT)
        assert owners == expected[0][1]


# -- nothing is exchanged ------------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Notes every collective, and every call of a store."""

    STORES = (dist.Store, dist.PrefixStore, dist.FileStore, dist.TCPStore, dist.HashStore)
    CALLS = (
        "set",
        "get",
        "add",
        "wait",
        "check",
        "compare_set",
        "multi_get",
        "multi_set",
        "append",
        "delete_key",
        "clone",
    )
    OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "barrier")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        for kind in self.STORES:
            for name in self.CALLS:
                if name in vars(kind):
                    setattr(kind, name, self._noting(f"store.{name}", getattr(kind, name)))
        for name in self.OBJECTS:
            setattr(dist, name, self._noting(name, getattr(dist, name)))

    def _noting(self, name: str, call: Any) -> Any:
        def noting(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return call(*args, **kwargs)

        return noting

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(operation).startswith(("c10d", "_c10d")):
            self.calls.append(str(operation))
        return operation(*args, **(kwargs or {}))


def exchanged(folder: str, optimizer: str, **settings: Any) -> dict[str, list[str]]:
    """What was exchanged by the first save, the second one, a load, and inside of it by reading the model and the optimizer."""
    run = Run(optimizer=optimizer, **settings)
    run.step()
    found: dict[str, list[str]] = {"reading": []}
    with Watch() as watch:

        def noted(name: str, action: Any, *args: Any) -> None:
            start = len(watch.calls)
            action(*args)
            found[name] = watch.calls[start:]

        read = sharded.read_all

        def reading(*args: Any, **kwargs: Any) -> None:
            start = len(watch.calls)
            read(*args, **kwargs)
            found["reading"] += watch.calls[start:]

        sharded.read_all = reading
        noted("first", run.accelerator.save_state, f"{folder}/0")
        noted("second", run.accelerator.save_state, f"{folder}/1")
        noted("load", run.accelerator.load_state, f"{folder}/1")
    return found


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_no_collective_and_no_store_in_writing_and_reading(tmp_path, optimizer):
    counts = set()
    for ranks in (2, 4):
        for found in run_ranks(exchanged, ranks, str(tmp_path / str(ranks)), optimizer, fresh=True, timeout=60, **OWN):
            assert found["second"] == []
            assert found["reading"] == []
            counts.add((len(found["first"]), len(found["load"])))
            assert not any(name.startswith("store.") for name in found["first"] + found["load"])
    assert counts == {(1, 3)}, "messages do not grow with the number of processes"


def test_the_count_sees_what_the_other_form_exchanges(tmp_path):
    for found in run_ranks(exchanged, 2, str(tmp_path), "adamw", fresh=True, timeout=60):
        assert any(name.startswith("store.") for name in found["second"])
        assert any("c10d" in name for name in found["second"])
        assert found["reading"]


# -- what is complete ----------------------------------------------------------------------------------------------------


def numbered(project: str, steps: int, **settings: Any) -> list[str]:
    """Save after each step, and say after each which checkpoints there are for the main process."""
    run = Run(**OWN)
    run.accelerator.project_configuration = ProjectConfiguration(project, automatic_checkpoint_naming=True, **settings)
    there = []
    for _ in range(steps):
        run.step()
        run.accelerator.wait_for_everyone()
        run.accelerator.save_state()
        there.append(" ".join(path.name[11:] for path in retention.numbered(retention.folder_of_all(project)).values()))
    return there


def resumed(project: str) -> tuple[int, int, dict[str, Tensor]]:
    run = Run(**OWN)
    run.accelerator.project_configuration = ProjectConfiguration(project, automatic_checkpoint_naming=True)
    run.accelerator.load_state()
    return run.counter.value, run.accelerator.project_configuration.iteration, run.state()


def killed(project: str, victim: int, limit: int) -> None:
    run = Run(**OWN)
    run.accelerator.project_configuration = ProjectConfiguration(project, automatic_checkpoint_naming=True)
    run.accelerator.load_state()
    run.step()
    crash.watch(limit if run.accelerator.process_index == victim else None)
    run.accelerator.save_state()


def changes(project: str) -> int:
    run = Run(**OWN)
    run.accelerator.project_configuration = ProjectConfiguration(project, automatic_checkpoint_naming=True)
    run.accelerator.load_state()
    run.step()
    counter = crash.watch(None)
    run.accelerator.save_state()
    return counter.count


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    "full", [pytest.param(False, id="sample"), pytest.param(True, id="all", marks=pytest.mark.full)]
)
def test_a_killed_process_leaves_what_nobody_takes_for_a_checkpoint(tmp_path, victim, full):
    run_ranks(numbered, 2, str(tmp_path / "run"), 1, timeout=60)
    state = on(2, None, 1)[1]
    count = run_ranks(changes, 2, str(shutil.copytree(tmp_path / "run", tmp_path / "whole")), fresh=True)[victim]
    folder = retention.folder_of_all(tmp_path / "run")
    points = range(1, count + 1) if full else sorted({1, count // 3, 2 * count // 3, count})
    for point in points:
        # How much a process does depends on who comes first; the last points may come after all.
        ends = (
            suppress(RankError) if point > count - 4 else pytest.raises(RankError, match="the process died: signal 9")
        )
        with ends:
            run_ranks(killed, 2, str(tmp_path / "run"), victim, point, fresh=True, timeout=60)
        newest = retention.newest(folder)
        store.verify(newest, checksums=True)
        for reached, following, found in run_ranks(resumed, 2, str(tmp_path / "run")):
            assert reached == retention.number_of(newest) + 1
            if newest.name == "checkpoint_0":
                compare(found, state, EXACT)
            assert following == 1 + max(retention.numbered(folder))
        shutil.rmtree(folder / "checkpoint_1", ignore_errors=True)


def goes_on(project: str, steps: int, **settings: Any) -> None:
    run = Run(**OWN)
    run.accelerator.project_configuration = ProjectConfiguration(project, automatic_checkpoint_naming=True, **settings)
    run.accelerator.load_state()
    for _ in range(steps):
        run.step()
        run.accelerator.save_state()


def test_unfinished_ones_are_not_counted_and_removed_later(tmp_path):
    run_ranks(numbered, 2, str(tmp_path), 3, timeout=60)
    folder = retention.folder_of_all(tmp_path)
    [save] = sidecar.saves(folder / "checkpoint_2")
    (save / "hasten_rank_1.json").unlink()
    assert retention.newest(folder).name == "checkpoint_1"
    run_ranks(goes_on, 2, str(tmp_path), 1, total_limit=2)
    left = [path.name for path in retention.numbered(folder).values() if store.is_complete(path)]
    assert left in (["checkpoint_0", "checkpoint_1", "checkpoint_3"], ["checkpoint_1", "checkpoint_3"])
    run_ranks(goes_on, 2, str(tmp_path), 2, total_limit=2)
    assert "checkpoint_2" not in {path.name for path in folder.iterdir()}
    complete = [path for path in retention.numbered(folder).values() if store.is_complete(path)]
    assert 2 <= len(complete) <= 3
    assert complete[-1].name == "checkpoint_5"


def test_old_ones_are_removed_when_new_ones_are_complete(tmp_path):
    there = run_ranks(numbered, 2, str(tmp_path), 4, total_limit=2, timeout=60)[0]
    assert there[1] == "0 1"
    assert there[2] in ("0 1 2", "1 2")
    assert there[3] in ("1 2 3", "2 3")


def full_once(project: str) -> tuple[str, int]:
    from hasten.weights.stream import Stream

    run = Run(**OWN)
    run.accelerator.project_configuration = ProjectConfiguration(project, automatic_checkpoint_naming=True)
    write_all, said = Stream._write_all, ""

    def fail(self: Stream, view: memoryview) -> None:
        raise OSError(28, "No space left on device")

    for number in range(3):
        run.step()
        Stream._write_all = fail if number == 1 and run.accelerator.process_index else write_all  # type: ignore[method-assign]
        try:
            run.accelerator.save_state()
        except OSError as error:
            said = str(error)
    run.accelerator.load_state()
    return said, run.counter.value


def test_a_run_goes_on_after_an_error_of_one(tmp_path):
    first, second = run_ranks(full_once, 2, str(tmp_path), fresh=True)
    assert first == ("", 3)
    assert second == ("[Errno 28] No space left on device", 3)
    folder = retention.folder_of_all(tmp_path)
    complete = [number for number, path in retention.numbered(folder).items() if store.is_complete(path)]
    assert complete == [0, 2]


def twice(folder: str, fails: bool) -> tuple[list[dict[str, Tensor]], str]:
    run = Run(**OWN)
    run.step()
    run.accelerator.save_state(folder)
    states = [run.state()]
    run.step()
    said = ""
    if fails and run.accelerator.process_index == 1:
        from hasten.weights.stream import Stream

        def fail(self: Stream, view: memoryview) -> None:
            raise OSError(28, "No space left on device")

        Stream._write_all = fail  # type: ignore[method-assign]
    try:
        run.accelerator.save_state(folder)
    except OSError as error:
        said = str(error)
    states.append(run.state())
    dist.barrier()
    run.accelerator.load_state(folder)
    compare(run.state(), states[0 if fails else 1], EXACT)
    return states, said


@pytest.mark.parametrize("fails", [False, True])
def test_over_an_older_one(tmp_path, fails):
    (_, first), (_, second) = run_ranks(twice, 2, str(tmp_path / "ck"), fails, fresh=True)
    assert (first, "No space left" in second) == ("", fails)
    assert len(sidecar.saves(tmp_path / "ck")) == 2 or not fails
    on(2, str(tmp_path / "ck"), 1, **OWN)
    on(2, str(tmp_path / "ck"), 1, **OWN)
    assert len(sidecar.saves(tmp_path / "ck")) <= 2


def test_forms_replace_each_other(tmp_path):
    folder = tmp_path / "ck"
    for steps, settings in enumerate([{}, OWN, {"kind": "FULL_STATE_DICT"}, OWN, {}], start=1):
        state = on(2, str(folder), steps, **settings)[1]
        assert store.is_complete(folder)
        compare(on(2, None, 0, load=str(folder))[1], state, EXACT)
    assert not [path for save in sidecar.saves(folder) for path in save.iterdir()]


def alone(folder: str) -> list[str]:
    import logging

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hasten.checkpoint.per_rank").addHandler(handler)
    run = Run(**OWN)
    for number in range(5):
        if number != 1 or run.accelerator.is_main_process:
            run.accelerator.save_state(f"{folder}/{number}")
    return said


def test_a_process_that_does_not_come_is_told_of(tmp_path):
    said, _ = run_ranks(alone, 2, str(tmp_path))
    assert len(said) == 1
    assert f"{tmp_path}/" in said[0]
    assert "hasten_rank_1.json missing" in said[0] or "no process" in said[0]


def hooks(folder: str) -> dict[str, str]:
    run = Run(**OWN)
    rank = run.accelerator.process_index

    def save(models: list[Any], weights: list[Any], place: str) -> None:
        (Path(place) / "of all.txt").write_text("the same", encoding="utf-8")
        (Path(place) / "sub").mkdir()
        (Path(place) / f"sub/{rank}.txt").write_text(str(rank), encoding="utf-8")

    found: dict[str, str] = {}

    def load(models: list[Any], place: str) -> None:
        for path in sorted(Path(place).rglob("*.txt")):
            found[path.relative_to(place).as_posix()] = path.read_text(encoding="utf-8")

    run.accelerator.register_save_state_pre_hook(save)
    run.accelerator.register_load_state_pre_hook(load)
    run.accelerator.save_state(folder)
    run.accelerator.load_state(folder)
    return found


def test_files_of_hooks_belong_to_it(tmp_path):
    for found in run_ranks(hooks, 2, str(tmp_path / "ck")):
        assert found == {"of all.txt": "the same", "sub/0.txt": "0", "sub/1.txt": "1"}
    store.verify(tmp_path / "ck", checksums=True)
    [save] = sidecar.saves(tmp_path / "ck")
    (save / "sub/1.txt").unlink()
    assert not store.is_complete(tmp_path / "ck")


# -- damage --------------------------------------------------------------------------------------------------------------


def refused(folder: str, **options: Any) -> str:
    run = Run(**OWN)
    with pytest.raises((RuntimeError, ValueError, FileNotFoundError)) as error:
        run.accelerator.load_state(folder, **options)
    return f"{type(error.value).__name__}: {error.value}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    on(2, str(folder / "a"), 1, **OWN)
    on(2, str(folder / "b"), 1, **OWN)
    return folder


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ("missing", "pytorch_model_fsdp_0_rank1.bin is missing"),
        ("truncated", r"optimizer_0_rank1.bin has 10 bytes instead of"),
        ("flipped", "pytorch_model_fsdp_0_rank1.bin has changed: its checksum differs from byte 0 on"),
        ("sidecar missing", "is not complete: hasten_rank_1.json missing: of 2 processes"),
        ("sidecar flipped", "hasten_rank_1.json is damaged"),
        ("sidecar truncated", "hasten_rank_1.json is damaged"),
        ("mixed", "hasten_rank_1.json is of another save (per_rank_"),
        ("shared", "scheduler.bin is missing"),
    ],
)
def test_damage_is_named_on_all_and_what_is_older_stays(tmp_path, saved, damage, text):
    project = tmp_path / "run/checkpoints"
    for number in range(2):
        shutil.copytree(saved / "a", project / f"checkpoint_{number}")
    [save], [other] = sidecar.saves(project / "checkpoint_1"), sidecar.saves(saved / "b")
    own = save / "hasten_rank_1.json"
    if damage == "missing":
        (save / "pytorch_model_fsdp_0_rank1.bin").unlink()
    elif damage == "truncated":
        (save / "optimizer_0_rank1.bin").write_bytes((save / "optimizer_0_rank1.bin").read_bytes()[:10])
    elif damage == "flipped":
        flip(save / "pytorch_model_fsdp_0_rank1.bin")
    elif damage == "sidecar missing":
        own.unlink()
    elif damage == "sidecar flipped":
        content = json.loads(own.read_text(encoding="utf-8"))
        content["body"]["world_size"] = 3
        own.write_text(json.dumps(content), encoding="utf-8")
    elif damage == "sidecar truncated":
        own.write_text(own.read_text(encoding="utf-8")[:100], encoding="utf-8")
    elif damage == "mixed":
        shutil.copy(other / own.name, own)
    else:
        (save / "scheduler.bin").unlink()
    assert store.is_complete(project / "checkpoint_1") == (damage == "flipped")
    for found in run_ranks(refused, 2, str(project / "checkpoint_1"), checksums=damage == "flipped"):
        assert text in found
        assert "checkpoint_1" in found
    newest = retention.newest(project).name
    assert newest == ("checkpoint_1" if damage == "flipped" else "checkpoint_0")
    for found in run_ranks(fallen_back, 2, str(tmp_path / "run")):
        assert found == 1


def fallen_back(project: str) -> int:
    run = Run(**OWN)
    run.accelerator.project_configuration = ProjectConfiguration(project, automatic_checkpoint_naming=True)
    run.accelerator.load_state(fallback=True)
    return run.counter.value


def test_what_else_does_not_fit(tmp_path, saved):
    for ranks in (1, 3):
        for found in run_ranks(refused, ranks, str(saved / "a")):
            assert "was saved by 2 processes on the mesh" in found
            assert f"this is {ranks} process" in found
            assert "hasten merge-weights" in found
    with pytest.raises(AssertionError, match="this is 2 processes without sharding"):
        run_ranks(train, 2, None, 1, load=str(saved / "a"), kind=None)


def test_of_a_single_process_they_load_without_sharding(tmp_path):
    on(1, str(tmp_path / "ck"), 2, **OWN)
    plain, sharded_ = (on(1, None, 2, load=str(tmp_path / "ck"), **kind) for kind in ({"kind": None}, {}))
    compare(plain, sharded_, 1e-6)


# -- in the background ---------------------------------------------------------------------------------------------------


def in_background(folder: str) -> bool:
    run = Run(**OWN)
    run.step()
    saving = run.accelerator.save_state(folder, blocking=False)
    expected = run.state()
    run.step()
    saving.result(30)
    run.accelerator.load_state(folder)
    compare(run.state(), expected, EXACT)
    return saving.done()


def test_in_the_background(tmp_path):
    assert run_ranks(in_background, 2, str(tmp_path / "ck")) == [True, True]
    store.verify(tmp_path / "ck", checksums=True)


def one_by_one(folder: str) -> None:
    from hasten import utils

    run = Run(**OWN)
    plugin = run.accelerator.state.fsdp_plugin
    run.step()
    run.accelerator.save_state(folder)
    expected = run.state()
    run.step()
    dist.barrier()
    utils.load_fsdp_model(plugin, run.accelerator, run.model, folder)
    utils.load_fsdp_optimizer(plugin, run.accelerator, run.optimizer, run.model, folder)
    found = run.state()
    compare(found, expected, EXACT)
    utils.save_fsdp_model(plugin, run.accelerator, run.model, f"{folder}-alone")


def test_functions_for_one_model(tmp_path):
    run_ranks(one_by_one, 2, str(tmp_path / "ck"))
    assert {path.name for path in (tmp_path / "ck-alone").iterdir()} == {
        f"pytorch_model_fsdp_0_rank{rank}.bin" for rank in (0, 1)
    }

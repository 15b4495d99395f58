"""The power goes at any moment of a save: the old checkpoint or the new one loads, and after the save the new one."""

import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hasten.checkpoint import files, retention, sidecar, state, store
from hasten.checkpoint import model as model_files
from hasten.checkpoint.manifest import MANIFEST
from hasten.world.process import World
from tests.checkpoint.objects import make, same, values
from tests.checkpoint.power_cut import Recorder, Sync, Trace, put, states
from tests.ranks import run_ranks

pytest.importorskip("fcntl")

ALONE = World()
OLD, NEW = 1, 2
SIZES = [pytest.param(2, id="sample"), pytest.param(150, id="more", marks=pytest.mark.full)]


# -- what is saved, and what must be there then --------------------------------------------------------------------------


def nothing(root: Path) -> None:
    """No checkpoint was there."""


def old_folder(root: Path) -> None:
    state.save(root / "ck", make(OLD), ALONE, safe_serialization=False)


def old_run(root: Path) -> None:
    for number in (1, 2):
        retention.save_numbered(root, number, None, make(number), ALONE)


def old_weights(root: Path) -> None:
    model_files.save_model(make(OLD).models[0], root / "ck", world=ALONE)


def old_file(root: Path) -> None:
    files.save({"values": torch.full((300,), OLD)}, root / "file", world=ALONE)


def new_file(root: Path) -> None:
    files.save({"values": torch.full((300,), NEW)}, root / "file", world=ALONE)


def new_folder(root: Path) -> None:
    state.save(root / "ck", make(NEW), ALONE)


def new_below(root: Path) -> None:
    state.save(root / "runs" / "ck", make(NEW), ALONE)


def new_of_run(root: Path) -> None:
    retention.save_numbered(root, 3, 2, make(3), ALONE)


def new_weights(root: Path) -> None:
    model_files.save_model(make(NEW).models[0], root / "ck", max_shard_size=60, world=ALONE)


@cache
def expected(value: int) -> dict[str, Any]:
    return values(make(value))


_known: dict[Any, int] = {}


def loaded(folder: Path) -> int:
    """Which checkpoint a folder holds; nothing of it may be wrong. The same files are loaded once."""
    store.resolve(folder)
    key = frozenset((path.name, path.read_bytes()) for path in folder.iterdir() if path.is_file())
    if key not in _known:
        contents = make(5)
        step = int(state.load(folder, contents, ALONE)["step"])
        assert same(values(contents), expected(step))
        _known[key] = step
    return _known[key]


def found_folder(root: Path) -> int | None:
    return loaded(root / "ck") if (root / "ck").exists() else None


def found_below(root: Path) -> int | None:
    return loaded(root / "runs" / "ck") if (root / "runs" / "ck").exists() else None


def found_of_run(root: Path) -> int:
    folder = retention.folder_of_all(root)
    newest = retention.newest(folder)
    complete = list(filter(store.is_complete, retention.numbered(folder).values()))
    assert len(complete) >= 2
    for path in complete:  # whatever is offered is whole
        assert loaded(path) == retention.number_of(path)
    return retention.number_of(newest)


def found_weights(root: Path) -> int:
    folder = root / "ck"
    store.resolve(folder)
    shards = sorted(folder.glob("model*.safetensors"))
    assert (folder / "model.safetensors").exists() == (len(shards) == 1)
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    assert {path.name for path in shards} == names
    tensors: dict[str, Any] = {}
    for path in shards:
        tensors |= load_file(path)
    for value in (OLD, NEW):
        whole = expected(value)["models.0"]
        if all(same(each, whole[name]) for name, each in tensors.items()):
            assert tensors.keys() == whole.keys() - {"head.weight"} or tensors.keys() == whole.keys() - {
                "embedding.weight"
            }
            return value
    raise AssertionError("weights of neither")


def found_file(root: Path) -> int:
    values = files.load(root / "file")["values"]
    assert values.tolist() == [values[0].item()] * 300
    return int(values[0])


Found = Callable[[Path], int | None]
SAVES: dict[str, tuple[Callable[[Path], None], Callable[[Path], None], Found, int | None, int]] = {
    "a new folder": (nothing, new_folder, found_folder, None, NEW),
    "a new folder in a new one": (nothing, new_below, found_below, None, NEW),
    "over an old one": (old_folder, new_folder, found_folder, OLD, NEW),
    "numbered": (old_run, new_of_run, found_of_run, 2, 3),
    "one file": (old_file, new_file, found_file, OLD, NEW),
    "weights": (old_weights, new_weights, found_weights, OLD, NEW),
}


def recorded(name: str, base: Path) -> Trace:
    before, save, *_ = SAVES[name]
    root = base / "recorded"
    root.mkdir()
    before(root)
    recorder = Recorder(root, base / "log")
    recorder.begin()
    with recorder.recording():
        save(root)
    return recorder.trace()


def broken(trace: Trace, found: Found, old: int | None, new: int, base: Path, samples: int) -> tuple[list[str], int]:
    """The first state of the disk from which neither checkpoint loads; and how many states there were."""
    count, reached = 0, set()
    for number, tree in states(trace, samples):
        count += 1
        work = base / "work"
        put(tree, work)
        try:
            value = found(work)
            reached.add(value)
            allowed = {new} if number == len(trace.events) else {old, new}
            assert value in allowed, f"found {value} instead of {allowed}"
        except Exception as error:
            return [f"after {number} of {len(trace.events)}: {type(error).__name__}: {error}", *sorted(tree)], count
        finally:
            shutil.rmtree(work)
    assert reached == {old, new}
    return [], count


# -- two processes -------------------------------------------------------------------------------------------------------

SHARDED = {
    "distributed": {"kind": "SHARDED_STATE_DICT"},
    "whole": {"kind": "FULL_STATE_DICT"},
    "per rank": {"sharded_save": "per_rank"},
}


def save_twice(base: str, settings: dict[str, Any]) -> None:
    """Two processes save, take a step, and save the same folder again, which is recorded."""
    from tests.checkpoint.test_sharded import Run

    root = Path(base, "recorded")
    run = Run(**settings)
    recorder = Recorder(root, Path(base, "log"))
    run.step()
    run.accelerator.save_state(str(root / "ck"))
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        put(tree_of(root), Path(base, "before"))
        recorder.begin()
    run.step()
    run.accelerator.wait_for_everyone()
    with recorder.recording():
        run.accelerator.save_state(str(root / "ck"))
        run.accelerator.wait_for_everyone()


def tree_of(root: Path) -> dict[str, bytes | None]:
    found = sorted(path for path in root.rglob("*") if ".partial-" not in str(path))
    return {path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else None for path in found}


def counting(folder: Path) -> dict[str, bytes | None]:
    """The files of a checkpoint that count, when all of them are whole."""
    place = store.resolve(folder)
    store.verify(place, checksums=True)
    manifest = store.read_manifest(place)
    tree = tree_of(place)
    names = [name for name in tree if not name.startswith(".")] if manifest is None else [*manifest.files, MANIFEST]
    return {name: tree[name] for name in names}


def saved_twice(kind: str, base: Path) -> tuple[Trace, Found]:
    (base / "recorded").mkdir()
    run_ranks(save_twice, 2, str(base), SHARDED[kind], fresh=True, timeout=60)
    whole = {OLD: counting(base / "before" / "ck"), NEW: counting(base / "recorded" / "ck")}
    assert whole[OLD] != whole[NEW]

    def found(root: Path) -> int:
        there = counting(root / "ck")
        return next(value for value, files in whole.items() if files == there)

    return Recorder(base / "recorded", base / "log").trace(), found


@pytest.mark.parametrize("samples", SIZES)
@pytest.mark.parametrize("kind", SHARDED)
def test_two_processes(tmp_path, kind, samples):
    trace, found = saved_twice(kind, tmp_path)
    lines, count = broken(trace, found, OLD, NEW, tmp_path, samples)
    assert not lines, "\n".join(lines)
    assert count > 20, count


# -- one process ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", SIZES)
@pytest.mark.parametrize("name", SAVES)
def test_the_old_one_or_the_new_one_is_there(tmp_path, name, samples):
    trace = recorded(name, tmp_path)
    *_, found, old, new = SAVES[name]
    lines, count = broken(trace, found, old, new, tmp_path, samples)
    assert not lines, "\n".join(lines)
    assert count > 1, count


@pytest.mark.parametrize("name", ["a new folder in a new one", "over an old one", "weights"])
def test_the_next_save_goes_well(tmp_path, name):
    trace = recorded(name, tmp_path)
    _, save, found, _, new = SAVES[name]
    for _, tree in islice(states(trace), 0, None, 7):
        put(tree, tmp_path / "work")
        save(tmp_path / "work")
        assert found(tmp_path / "work") == new
        shutil.rmtree(tmp_path / "work")


# -- one fsync less ------------------------------------------------------------------------------------------------------

# What the old or the new checkpoint does not need: the names in a temporary folder are synced again with the plan; and the last one
# keeps a plan that has been carried out from being carried out again.
NEEDLESS = {"over an old one": ["ck/TEMPORARY", "ck"], "weights": ["ck/TEMPORARY", "ck"]}


@pytest.mark.parametrize("name", SAVES)
def test_without_one_sync_it_breaks(tmp_path, name):
    trace = recorded(name, tmp_path)
    *_, found, old, new = SAVES[name]
    needless = [
        path
        for number, path in trace.syncs().items()
        if not broken(trace.without({number}), found, old, new, tmp_path, samples=1)[0]
    ]
    assert needless == NEEDLESS.get(name, [])


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "per rank" else pytest.mark.full) for kind in SHARDED]
)
def test_two_processes_without_one_kind_of_sync(tmp_path, kind):
    """Several processes sync the same folder; only all of them together are needed."""
    trace, found = saved_twice(kind, tmp_path)
    syncs = trace.syncs()
    for path in dict.fromkeys(syncs.values()):
        less = trace.without({number for number, each in syncs.items() if each == path})
        assert broken(less, found, OLD, NEW, tmp_path, samples=1)[0], path


@pytest.mark.parametrize("numbered", [False, True])
def test_an_earlier_save_goes_when_the_later_one_is_safe(tmp_path, numbered):
    """Sidecars of other processes are seen before they are safe."""
    _, found = saved_twice("per rank", tmp_path)
    root, places = tmp_path / "again", ["ck", "ck"]
    if numbered:
        places = ["checkpoints/checkpoint_0", "checkpoints/checkpoint_1"]
    earlier, later = (sidecar.saves(tmp_path / source / "ck")[0] for source in ("before", "recorded"))
    for save, place in zip((earlier, later), places, strict=True):
        shutil.copytree(save, root / place / save.name)
    last = root / places[1] / later.name / sidecar.file_name(1)
    last.rename(root / "coming")
    recorder = Recorder(root, tmp_path / "log")
    recorder.begin()
    with recorder.recording():
        os.replace(root / "coming", last)
        if numbered:
            retention.prune(root / places[1], 1)
        else:
            sidecar.remove_outdated(root / "ck")
    assert len(list(root.glob("**/per_rank_*"))) == 1, "the earlier one is gone"

    def newest(root: Path) -> int | None:
        if numbered:
            retention.newest(root / "checkpoints").rename(root / "ck")
        return found(root)

    trace = recorder.trace()
    [number] = [number for number, path in trace.syncs().items() if path.endswith("save 2")]
    trace.events.append(Sync(trace.events[number].subject, ""))  # that of the other process
    assert not broken(trace, newest, OLD, NEW, tmp_path, samples=2)[0]
    assert broken(trace.without({number}), newest, OLD, NEW, tmp_path, samples=2)[0]

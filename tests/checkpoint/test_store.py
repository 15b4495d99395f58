import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hasten.checkpoint import meeting, roles, state, store
from hasten.checkpoint.manifest import MANIFEST
from hasten.world import process
from hasten.world.process import World
from tests.checkpoint.objects import Loader, make, same, values
from tests.ranks import run_ranks

ALONE = World()


def world() -> World:
    return process.start(cpu=True)


def names(folder: str | Path) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


# ---- one process ----


def write(folder: Path, text: str = "a", **options: Any) -> None:
    with store.transaction(folder, ALONE, **options) as writing:
        writing.writer.save_text("f.txt", text)
        (writing.temporary / "sub").mkdir()
        (writing.temporary / "sub" / "hook.txt").write_text(text)


def test_everything_written_is_in_the_manifest(tmp_path):
    write(tmp_path / "ck")
    manifest = json.loads((tmp_path / "ck" / MANIFEST).read_text())
    assert list(manifest["files"]) == ["f.txt", "sub/hook.txt"]
    assert manifest["files"]["f.txt"]["size"] == 1
    assert (manifest["world_size"], manifest["ranks"]) == (1, [0])
    assert names(tmp_path) == ["ck"]


def test_a_body_that_raises_leaves_everything_as_it_was(tmp_path):
    write(tmp_path / "ck", "old")
    for folder in ("ck", "new"):
        with pytest.raises(KeyError), store.transaction(tmp_path / folder, ALONE) as writing:  # noqa: PT012
            writing.writer.save_text("f.txt", "new")
            raise KeyError
    assert names(tmp_path) == ["ck"]
    assert (tmp_path / "ck" / "f.txt").read_text() == "old"
    store.verify(tmp_path / "ck", checksums=True)


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "ck").write_text("x")
    for folder in ("ck", "ck/below"):
        with pytest.raises(NotADirectoryError, match="ck is a file, but a folder is needed"):
            write(tmp_path / folder)
    assert (tmp_path / "ck").read_text() == "x"


def test_a_check_ends_the_save_before_anything_is_made(tmp_path):
    def check(folder: Path) -> None:
        raise ValueError(f"not {folder.name}")

    with pytest.raises(ValueError, match="not ck"):
        write(tmp_path / "ck", check=check)
    assert names(tmp_path) == []


def test_actions_after_a_save(tmp_path, caplog):
    seen = []
    with store.transaction(tmp_path / "ck", ALONE) as writing:
        writing.after_commit += [
            lambda folder: seen.append((folder, store.is_complete(folder))),
            lambda folder: os.rmdir(folder),
        ]
    assert seen == [(tmp_path / "ck", True)]
    assert "is saved, but tidying up after it failed" in caplog.text


def test_complete_and_damaged_folders(tmp_path):
    assert not store.is_complete(tmp_path / "ck")
    (tmp_path / "ck").mkdir()
    assert not store.is_complete(tmp_path / "ck")
    (tmp_path / "ck" / "x").write_text("as the reference writes")
    assert store.is_complete(tmp_path / "ck")
    store.verify(tmp_path / "ck")
    write(tmp_path / "ck")
    assert store.is_complete(tmp_path / "ck")
    (tmp_path / "ck" / "f.txt").write_text("longer")
    assert not store.is_complete(tmp_path / "ck")
    with pytest.raises(
        RuntimeError, match=r"f\.txt has 6 bytes instead of 1\. Load another one\. If .* delete .*hasten_manifest"
    ):
        store.verify(tmp_path / "ck")
    (tmp_path / "ck" / "f.txt").write_text("b")
    store.verify(tmp_path / "ck")
    with pytest.raises(RuntimeError, match=r"f\.txt has changed: its checksum differs from byte 0 on"):
        store.verify(tmp_path / "ck", checksums=True)
    (tmp_path / "ck" / "f.txt").unlink()
    with pytest.raises(RuntimeError, match=r"f\.txt is missing"):
        store.verify(tmp_path / "ck")
    (tmp_path / "ck" / MANIFEST).write_text("{")
    assert not store.is_complete(tmp_path / "ck")


def test_resolving_what_does_not_exist(tmp_path):
    with pytest.raises(ValueError, match=r"Tried to find .*ck but folder does not exist"):
        store.resolve(tmp_path / "ck")


# ---- several processes ----


def saved_by(folder: str, ranks: list[int], **options: Any) -> tuple[float, list[str]]:
    here = world()
    random.seed(here.rank)
    start = time.monotonic()
    if here.rank in ranks:
        state.save(folder, make(1), here, **options)
    return time.monotonic() - start, names(folder)


@pytest.mark.parametrize("size", [2, 3])
def test_a_save_is_complete_on_every_rank_when_it_returns(tmp_path, size):
    found = run_ranks(saved_by, size, str(tmp_path / "ck"), list(range(size)))
    expected = {f"random_states_{rank}.pkl" for rank in range(size)} | {MANIFEST, "model.safetensors", "optimizer.bin"}
    for _, files in found:
        assert expected <= set(files)
        assert files == found[0][1]
    assert json.loads((tmp_path / "ck" / MANIFEST).read_text())["ranks"] == list(range(size))
    assert names(tmp_path) == ["ck"]


def saved_with_positions(folder: str, positions: list[int]) -> int:
    here = world()
    state.save(folder, replace(make(1), dataloaders=[Loader(positions[here.rank])]), here)
    contents = replace(make(2), dataloaders=[Loader()])
    state.load(folder, contents, here)
    return contents.dataloaders[0].position


def test_positions_have_a_file_per_rank_only_where_ranks_differ(tmp_path):
    assert run_ranks(saved_with_positions, 3, str(tmp_path / "ck"), [4, 5, 4]) == [4, 5, 4]
    assert [name for name in names(tmp_path / "ck") if "dl_state" in name] == [
        "dl_state_dict.bin",
        "dl_state_dict_rank1.bin",
    ]
    assert run_ranks(saved_with_positions, 2, str(tmp_path / "ck"), [6, 6]) == [6, 6]
    assert [name for name in names(tmp_path / "ck") if "dl_state" in name] == ["dl_state_dict.bin"]


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "PATIENCE", seconds)
        patch.setattr(meeting, "SHORT_PATIENCE", 0.05)
        yield


def saved_by_main_alone(folder: str) -> tuple[list[float], list[str]]:
    here, times = world(), []
    for step in range(2):
        start = time.monotonic()
        if here.is_main:
            with patience(0.3):
                state.save(f"{folder}-{step}", make(1), here)
        times.append(time.monotonic() - start)
    here.barrier()  # goes on as before
    return times, names(f"{folder}-1")


def test_the_main_process_may_save_alone(tmp_path):
    (times, files), (other_times, _) = run_ranks(saved_by_main_alone, 2, str(tmp_path / "ck"))
    assert max(other_times) < 0.1
    assert times[0] >= 0.3
    assert "random_states_0.pkl" in files
    assert "random_states_1.pkl" not in files
    assert json.loads((tmp_path / "ck-1" / MANIFEST).read_text())["ranks"] == [0]


def saved_by_some(folder: str) -> list[str]:
    here = world()
    if here.rank != 1:
        with patience(0.3):
            state.save(folder, make(1), here)
    here.barrier()
    return names(folder)


def test_some_ranks_may_save(tmp_path):
    for files in run_ranks(saved_by_some, 3, str(tmp_path / "ck")):
        assert [name for name in files if "random" in name] == ["random_states_0.pkl", "random_states_2.pkl"]
    assert json.loads((tmp_path / "ck" / MANIFEST).read_text())["ranks"] == [0, 2]


def saved_late(folder: str, own_name: bool) -> list[str]:
    here = world()
    if not here.is_main:
        time.sleep(0.5)
    with patience(0.1):
        state.save(f"{folder}-{here.rank}" if own_name else folder, make(1), here)
    here.barrier()
    return names(f"{folder}-{here.rank}" if own_name else folder)


def test_a_rank_that_comes_late_adds_its_files(tmp_path):
    found = run_ranks(saved_late, 2, str(tmp_path / "ck"), False)
    assert found[0] == found[1]
    assert {"random_states_0.pkl", "random_states_1.pkl"} <= set(found[0])
    assert not [name for name in found[0] if name.startswith(".")]
    store.verify(tmp_path / "ck", checksums=True)


def test_ranks_may_name_their_folders_differently(tmp_path):
    first, second = run_ranks(saved_late, 2, str(tmp_path / "ck"), True)
    assert "model.safetensors" in first
    assert {name for name in second if "rank" not in name} == {"random_states_1.pkl"}


def saved_in_two_ways(folder: str) -> list[list[str]]:
    """The main process saves its best model alone, then all save; the others may come first."""
    here = world()
    if here.is_main:
        time.sleep(0.2)
        state.save(f"{folder}-best", make(1), here)
    state.save(f"{folder}-last", make(2), here)
    return [names(f"{folder}-best"), names(f"{folder}-last")]


def test_saves_of_one_and_of_all_are_told_apart(tmp_path):
    for best, last in run_ranks(saved_in_two_ways, 2, str(tmp_path / "ck")):
        assert "random_states_1.pkl" not in best
        assert "random_states_1.pkl" in last


def failing(folder: str, victim: int, error: type[Exception]) -> tuple[str, str, bool]:
    here = world()
    state.save(folder, make(1), here)

    def hook(models: Any, weights: Any, output: str) -> None:
        if here.rank == victim:
            raise error("no more")

    found = None
    try:
        state.save(folder, make(2), here, hooks=[hook])
    except Exception as raised:
        found = raised
    contents = make(3)
    state.load(folder, contents, here)
    state.save(f"{folder}-after", contents, here)  # everybody is in step again
    return type(found).__name__, str(found), same(values(contents), values(make(1)))


@pytest.mark.parametrize("victim", [0, 1])
def test_one_rank_fails(tmp_path, victim):
    found = run_ranks(failing, 3, str(tmp_path / "ck"), victim, OSError)
    for rank, (kind, text, is_old) in enumerate(found):
        assert is_old
        if rank == victim:
            assert (kind, text) == ("OSError", "no more")
        else:
            assert kind == "RuntimeError"
            assert (
                f"ck was not saved: rank {victim} failed with OSError: no more. What was there before is still there."
                in text
            )
    assert names(tmp_path) == ["ck", "ck-after"]


def not_opened(folder: str) -> str:
    here = world()
    with pytest.raises((NotADirectoryError, RuntimeError)) as found:
        state.save(folder, make(1), here)
    return str(found.value)


def test_a_folder_that_can_not_be_made_is_an_error_on_every_rank(tmp_path):
    (tmp_path / "ck").write_text("x")
    first, second = run_ranks(not_opened, 2, str(tmp_path / "ck"))
    assert "ck is a file, but a folder is needed" in first
    assert "was not saved: rank 0 failed with NotADirectoryError" in second


def on_own_disks(folder: str, local_size: int, save_on_each_node: bool, seen: bool) -> list[str]:
    """Each machine has `local_size` ranks and a folder of its own; a shared disk if `seen`."""
    here = world()
    local = replace(here, local_rank=here.rank % local_size, local_size=local_size)
    machine = 0 if seen else here.rank // local_size
    where = Path(folder, f"machine-{machine}")
    os.makedirs(where, exist_ok=True)
    os.chdir(where)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roles, "_sees", lambda path: path.is_dir() and f"machine-{machine}" in str(path))
        for _ in range(2):  # into a new folder, and over it
            state.save("ck", make(1), local, save_on_each_node=save_on_each_node)
    store.verify("ck", checksums=True)
    assert names(".") == ["ck"]
    return names("ck")


def test_each_machine_writes_to_its_own_disk(tmp_path):
    first, _, third, fourth = run_ranks(on_own_disks, 4, str(tmp_path), 2, True, False)
    assert {"model.safetensors", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl"} <= set(first)
    assert {"model.safetensors", "optimizer.bin", "random_states_2.pkl", "random_states_3.pkl"} <= set(third)
    assert third == fourth
    assert "random_states_2.pkl" not in first


def test_without_save_on_each_node_the_other_machines_have_their_own_states_only(tmp_path):
    first, second = run_ranks(on_own_disks, 2, str(tmp_path), 1, False, False)
    assert "model.safetensors" in first
    assert second == ["dl_state_dict_rank1.bin", MANIFEST, "random_states_1.pkl"]


def test_a_shared_disk_is_written_once(tmp_path):
    first, second = run_ranks(on_own_disks, 2, str(tmp_path), 1, True, True)
    assert first == second
    assert {"random_states_0.pkl", "random_states_1.pkl", "model.safetensors"} <= set(first)


def at_two_sizes(folder: str) -> list[Any]:
    here = world()
    contents = make(3)
    step = state.load(folder, contents, here)
    state.save(f"{folder}-{here.size}", contents, here)
    return [step, same(values(contents), values(make(1)))]


def test_a_checkpoint_loads_at_other_world_sizes(tmp_path):
    run_ranks(saved_by, 2, str(tmp_path / "ck"), [0, 1])
    for size in (1, 3):
        assert run_ranks(at_two_sizes, size, str(tmp_path / "ck")) == [[{"step": 1}, True]] * size


def parts_of_a_world(folder: str) -> list[str]:
    here = world()
    part = here.part([0, 1] if here.rank < 2 else [2, 3])
    state.save(f"{folder}-{here.rank // 2}", make(1), part)
    return names(f"{folder}-{here.rank // 2}")


def test_two_halves_of_a_job_save_at_once(tmp_path):
    for files in run_ranks(parts_of_a_world, 4, str(tmp_path / "ck")):
        assert [name for name in files if "random" in name] == ["random_states_0.pkl", "random_states_1.pkl"]

"""A full disk, folders that may not be changed, and damaged files: what went wrong is told, and nothing older is lost."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hasten.checkpoint import retention, state, store
from hasten.checkpoint.manifest import MANIFEST
from hasten.world.process import World
from tests.checkpoint.objects import flip, make, same, values
from tests.ranks import run_ranks

ALONE = World()
NOBODY = 65534


def loads(folder: Path, value: int) -> bool:
    contents = make(5)
    store.verify(folder, checksums=True)
    state.load(folder, contents, ALONE)
    return same(values(contents), values(make(value)))


# -- a full disk ---------------------------------------------------------------------------------------------------------

SPACE = 160 << 10  # bytes; room for two or three checkpoints


def fill(project: str) -> None:
    """Save on a small disk until it is full, make room, and save again; every checkpoint must be whole all the time."""
    import torch

    torch.set_num_threads(1)
    folder = retention.folder_of_all(project)
    count = 0
    while True:
        try:
            retention.save_numbered(project, count, None, make(count), ALONE)
        except OSError as error:
            assert error.errno == 28, error  # noqa: PT017 - this runs outside of pytest
            assert "No space left on device" in str(error)  # noqa: PT017
            break
        count += 1
        assert count < 20, "the disk is not small"
    assert count >= 2, "the disk is too small"
    assert sorted(os.listdir(folder)) == [f"checkpoint_{number}" for number in range(count)], "something is left"
    assert all(loads(folder / f"checkpoint_{number}", number) for number in range(count))
    try:  # over an old one
        state.save(folder / "checkpoint_1", make(7), ALONE)
    except OSError as error:
        assert error.errno == 28, error  # noqa: PT017
    assert loads(folder / "checkpoint_1", 1)
    shutil.rmtree(folder / "checkpoint_0")
    retention.save_numbered(project, count, None, make(count), ALONE)
    assert loads(retention.newest(folder), count)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a small disk")
def test_a_full_disk_keeps_all_that_was_saved(tmp_path):
    mount = f"mount -t tmpfs -o size={SPACE} none '{tmp_path}'"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("a small disk can't be mounted here")
    program = f"from tests.checkpoint.test_disk_errors import fill; fill({str(tmp_path)!r})"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# -- folders that may not be changed -------------------------------------------------------------------------------------


@pytest.fixture
def locked() -> Iterator[Path]:
    """A folder with a checkpoint that others may read, and not change."""
    folder = Path(tempfile.mkdtemp())
    state.save(folder / "ck", make(1), ALONE)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield folder
    for path in (folder, folder / "ck"):
        path.chmod(0o755)
    shutil.rmtree(folder)


def save_where_one_may_not(folder: str) -> list[str]:
    """Try to save over the checkpoint and beside it; what is told, and whether the old one still loads."""
    if os.geteuid() == 0:  # who may do everything
        make(1)  # imports what may not be readable afterwards
        os.seteuid(NOBODY)
    told = []
    for name in ("ck", "other", "above/other"):
        with pytest.raises(PermissionError) as caught:
            state.save(Path(folder, name), make(2), ALONE)
        told.append(str(caught.value))
    assert loads(Path(folder, "ck"), 1)
    return told


@pytest.mark.skipif(os.name == "nt", reason="Windows has other rights")
def test_permission_is_denied(locked):
    before = sorted(locked.rglob("*"))
    [told] = run_ranks(save_where_one_may_not, 1, str(locked), initialise=False, fresh=True)
    for text, place in zip(told, ("ck/.ck", ".other", "above"), strict=True):
        assert text.startswith(f"[Errno 13] Permission denied: '{locked / place}")
    assert sorted(locked.rglob("*")) == before


# -- damaged files -------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    project = tmp_path_factory.mktemp("saved")
    for number in (1, 2):
        retention.save_numbered(project, number, None, make(number), ALONE)
    return retention.folder_of_all(project)


FILES = [
    "model.safetensors",
    "model_1.safetensors",
    "optimizer.bin",
    "scheduler_1.bin",
    "scaler.pt",
    "dl_state_dict.bin",
    "random_states_0.pkl",
    "custom_checkpoint_0.pkl",
]


def test_the_files_are_those_of_a_checkpoint(saved):
    assert set(FILES) < {path.name for path in (saved / "checkpoint_2").iterdir()}


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named_and_the_one_before_is_newest(tmp_path, saved, name):
    folder = Path(shutil.copytree(saved, tmp_path / "checkpoints"))
    truncate(folder / "checkpoint_2" / name)
    size = (saved / "checkpoint_2" / name).stat().st_size
    with pytest.raises(RuntimeError, match=f"checkpoint_2 is damaged: {name} has {size - 1} bytes instead of {size}"):
        state.load(folder / "checkpoint_2", make(5), ALONE)
    assert retention.newest(folder) == folder / "checkpoint_1"
    assert loads(folder / "checkpoint_1", 1)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_named_and_the_one_before_is_whole(tmp_path, saved, name):
    folder = Path(shutil.copytree(saved, tmp_path / "checkpoints"))
    flip(folder / "checkpoint_2" / name)
    with pytest.raises(RuntimeError, match=f"checkpoint_2 is damaged: {name} has changed: its checksum differs"):
        state.verify(folder / "checkpoint_2", ALONE, checksums=True)
    assert loads(folder / "checkpoint_1", 1)


@pytest.mark.parametrize("damage", [truncate, flip])
def test_a_damaged_manifest(tmp_path, saved, damage):
    """Half of its text must not be taken for a checkpoint of which nothing is known."""
    folder = Path(shutil.copytree(saved, tmp_path / "checkpoints"))
    manifest = folder / "checkpoint_2" / MANIFEST
    if damage is truncate:
        manifest.write_bytes(manifest.read_bytes()[: manifest.stat().st_size // 2])
    else:  # each bit of a part of it: an error, or nothing that matters
        content = manifest.read_bytes()
        for at in range(0, len(content), 97):
            manifest.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            try:
                assert loads(folder / "checkpoint_2", 2)
            except RuntimeError as error:
                assert "damaged" in str(error) or "later version" in str(error)  # noqa: PT017
        return
    with pytest.raises(RuntimeError, match=f"{MANIFEST} is damaged .*Load another checkpoint"):
        state.load(folder / "checkpoint_2", make(5), ALONE)
    assert retention.newest(folder) == folder / "checkpoint_1"

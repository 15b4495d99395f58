from datetime import timedelta
from pathlib import Path

import fsspec
import pytest

from hasten.checkpoint import leftovers, remote
from hasten.checkpoint.manifest import MANIFEST, Manifest
from hasten.checkpoint.remote import RemoteFolder, fetched, is_remote
from hasten.weights.stream import Written

PATIENCE = timedelta(seconds=5)


@pytest.fixture(params=["memory", "file"])
def base(request, tmp_path, monkeypatch):
    monkeypatch.setattr(remote.tempfile, "gettempdir", lambda: str(tmp_path / "spool"))
    (tmp_path / "spool").mkdir()
    fsspec.filesystem("memory").store.clear()
    return f"memory://{tmp_path.name}/run" if request.param == "memory" else f"file://{tmp_path}/there/run"


@pytest.mark.parametrize(
    ("path", "is_url"),
    [("s3://a/b", True), ("memory://a", True), ("/a/b", False), ("a:b", False), ("C:/x", False), (3, False)],
)
def test_what_is_a_url(path, is_url):
    assert is_remote(path) is is_url


def sent(base: str, tmp_path, **contents: str) -> RemoteFolder:
    local = tmp_path / "local"
    for name, text in {"a.bin": "12345", "sub/b.bin": "xy", **contents}.items():
        (local / name).parent.mkdir(parents=True, exist_ok=True)
        (local / name).write_text(text)
    manifest = Manifest({"a.bin": Written(5, (0,)), "sub/b.bin": Written(2, (0,))}, identity="one")
    (local / MANIFEST).write_text(manifest.text())
    folder = RemoteFolder(base) / "checkpoint_0"
    folder.send(local, ["a.bin", "sub/b.bin"])
    return folder


def test_a_folder_is_complete_when_its_manifest_is_there(base, tmp_path):
    folder = sent(base, tmp_path)
    assert folder.name == "checkpoint_0"
    assert str(folder) == f"{base}/checkpoint_0"
    assert folder.files() == {"a.bin": 5, "sub/b.bin": 2}
    assert not folder.is_complete()
    folder.send(tmp_path / "local", [MANIFEST])
    assert folder.is_complete()
    assert folder.manifest().identity == "one"
    assert RemoteFolder(base).children() == ["checkpoint_0"]
    folder.remove(["a.bin", "none"])
    assert folder.problems() == ["a.bin is missing"]
    (tmp_path / "local" / "a.bin").write_text("123")
    folder.send(tmp_path / "local", ["a.bin"])
    assert folder.problems() == ["a.bin has 3 bytes instead of 5"]
    folder.remove_all()
    assert folder.files() == {}
    assert RemoteFolder(base).children() == []
    folder.remove_all()


def test_a_copy_is_there_while_it_is_used(base, tmp_path):
    folder = sent(base, tmp_path)
    folder.send(tmp_path / "local", [MANIFEST])
    with fetched(folder, lambda name: name != "a.bin", PATIENCE) as local:
        assert (local / "sub" / "b.bin").read_text() == "xy"
        assert not (local / "a.bin").exists()
        with fetched(folder, lambda name: True, PATIENCE) as again:
            assert again == local
            assert (local / "a.bin").read_text() == "12345"
    assert not local.exists()


def test_what_is_damaged_or_not_there(base, tmp_path):
    missing = fetched(RemoteFolder(f"{base}/none"), lambda name: True, PATIENCE)
    with pytest.raises(ValueError, match=r"Tried to find .*run/none but folder does not exist"), missing:
        pass
    folder = sent(base, tmp_path)
    folder.send(tmp_path / "local", [MANIFEST])
    folder.remove(["sub/b.bin"])
    damaged = fetched(folder, lambda name: True, PATIENCE)
    with pytest.raises(RuntimeError, match=r"checkpoint_0 is damaged: sub/b\.bin is missing"), damaged:
        pass
    (tmp_path / "local" / MANIFEST).write_text("{")
    folder.send(tmp_path / "local", [MANIFEST])
    assert not folder.is_complete()
    with pytest.raises(RuntimeError, match=rf"{folder.url}.*is damaged"):
        folder.manifest()


def test_a_copy_that_a_killed_process_has_left_is_not_used(base, tmp_path):
    folder = sent(base, tmp_path)  # without a manifest, as somebody else's
    with fetched(folder, lambda name: True, PATIENCE) as local:
        place = local.parent
        kept = {path.name: path.read_bytes() for path in local.iterdir() if path.is_file()}
    local.mkdir()
    (place / f"user-{2**22 + 1}").touch()  # of a process that is no more
    for name, content in kept.items():
        (local / name).write_bytes(content)
    (tmp_path / "local" / "a.bin").write_text("54321")
    folder.send(tmp_path / "local", ["a.bin"])
    with fetched(folder, lambda name: True, PATIENCE) as again:
        assert again == local
        assert (again / "a.bin").read_text() == "54321"
    local.mkdir()
    left = place.parent / "0123" / f".ck.partial-{leftovers._host()}.{2**22 + 1}.01234567"
    left.mkdir(parents=True)
    remote.tidy()
    assert not local.exists()
    assert not left.exists()


@pytest.mark.parametrize("path", ["s3:/bucket/x", "gs:/bucket", "file:/x"])
def test_a_url_that_has_become_a_path_is_refused(path):
    with pytest.raises(ValueError, match=r"a URL that has become a pathlib\.Path"):
        is_remote(Path(path))
    assert not is_remote(Path("/x/s3:/y"))


def test_what_can_not_be_reached():
    with pytest.raises(ValueError, match=r"nosuch://x can not be reached: .*nosuch.*fsspec knows .*s3"):
        RemoteFolder("nosuch://x")


def test_errors_name_the_url(base, tmp_path):
    folder = sent(base, tmp_path)

    def fail() -> None:
        with fetched(folder, lambda name: True, PATIENCE) as local:
            raise RuntimeError(f"{local / 'a.bin'} is damaged")

    with pytest.raises(RuntimeError, match=rf"^{folder.url}/a\.bin is damaged$"):
        fail()

from datetime import timedelta

import fsspec
import pytest

from hasten.checkpoint import remote
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

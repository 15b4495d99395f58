import os
from pathlib import Path

import pytest

from hasten.checkpoint import commit


def finished(place: Path, **files: str) -> Path:
    place.mkdir(parents=True)
    for name, text in files.items():
        path = place / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return place


def content(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_new_folder_is_one_rename(tmp_path):
    commit.put_in_place(finished(tmp_path / ".t", a="1"), tmp_path / "ck", ["a"], ["b"])
    assert content(tmp_path / "ck") == {"a": "1"}
    assert os.listdir(tmp_path) == ["ck"]


@pytest.mark.parametrize("inside", [True, False])
def test_an_existing_folder_gets_the_files(tmp_path, inside):
    target = finished(tmp_path / "ck", a="old", b="old", mine="x", sub__c="old")
    new = finished((target if inside else tmp_path) / ".t", a="new", sub__d="new", deep__e="new")
    commit.put_in_place(new, target, ["a", "sub/d", "deep/e"], ["b", "sub/c", "not there"])
    assert content(target) == {"a": "new", "mine": "x", "sub/d": "new", "deep/e": "new"}
    assert not commit.is_interrupted(target)
    assert not list(target.glob(".*"))


def test_an_empty_folder_of_the_user_is_kept(tmp_path):
    (tmp_path / "ck").mkdir()
    inode = (tmp_path / "ck").stat().st_ino
    commit.put_in_place(finished(tmp_path / "ck" / ".t", a="1"), tmp_path / "ck", ["a"])
    assert content(tmp_path / "ck") == {"a": "1"}
    assert (tmp_path / "ck").stat().st_ino == inode


def test_what_was_interrupted_is_finished(tmp_path, monkeypatch):
    target = finished(tmp_path / "ck", a="old", b="old")
    replace, calls = os.replace, []

    def stops(source, place):
        calls.append(place)
        if len(calls) == 2:
            raise KeyboardInterrupt
        replace(source, place)

    monkeypatch.setattr(os, "replace", stops)
    with pytest.raises(KeyboardInterrupt):
        commit.put_in_place(finished(target / ".t", a="new", b="new"), target, ["a", "b"])
    assert commit.is_interrupted(target)
    assert (target / "a").read_text() == "new"
    assert (target / "b").read_text() == "old"
    for _ in range(2):
        commit.finish(target)
        assert content(target) == {"a": "new", "b": "new"}
    assert not list(target.glob(".*"))


def test_a_move_that_is_refused_says_where_the_files_are(tmp_path):
    target = finished(tmp_path / "ck", x="1")
    (target / "a").mkdir()
    with pytest.raises(RuntimeError, match=r"complete, in .*incoming.*finished when the folder is loaded or saved"):
        commit.put_in_place(finished(target / ".t", a="new"), target, ["a"])
    (target / "a").rmdir()
    commit.finish(target)
    assert content(target) == {"a": "new", "x": "1"}


def test_folders_are_made_down_to_the_last_one(tmp_path):
    commit.make_folder(tmp_path / "a" / "b" / "c")
    commit.make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file is a file, but a folder is needed"):
        commit.make_folder(tmp_path / "file" / "below")


def test_folders_are_synced_where_that_is_possible(tmp_path, monkeypatch):
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    commit.sync_folder(tmp_path)
    assert len(synced) == 1
    monkeypatch.setattr(os, "name", "nt")
    commit.sync_folder(tmp_path)
    assert len(synced) == 1

import json

import pytest

from hasten.checkpoint import manifest
from hasten.checkpoint.manifest import MANIFEST, Manifest
from hasten.weights import stream
from hasten.weights.stream import Written


def test_round_trip(tmp_path):
    saved = Manifest({"a": Written(3, (1, 2)), "b/c": Written(0, ())}, 4, (0, 2))
    (tmp_path / MANIFEST).write_text(saved.text())
    assert Manifest.read(tmp_path) == saved
    assert Manifest({}).identity != saved.identity


def test_none_and_damaged_ones(tmp_path):
    assert Manifest.read(tmp_path) is None
    for text in ("", "[]", '{"version": 1}', '{"version": 1, "files": {"a": 3}}'):
        (tmp_path / MANIFEST).write_text(text)
        with pytest.raises(RuntimeError, match=r"hasten_manifest\.json is damaged"):
            Manifest.read(tmp_path)


def test_a_later_version_says_so(tmp_path):
    content = {**json.loads(Manifest({}).text()), "version": 99}
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(RuntimeError, match="written by a later version of hasten"):
        Manifest.read(tmp_path)


def test_problems_name_the_place(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "BLOCK", 4)
    monkeypatch.setattr(manifest, "BLOCK", 4)
    (tmp_path / "a").write_bytes(b"0123456789")
    workers = stream.Workers()
    known = Manifest({"a": stream.checksum_file(tmp_path / "a", workers)})
    workers.close()
    assert known.problems([tmp_path], checksums=True) == []
    (tmp_path / "a").write_bytes(b"01234x6789")
    assert known.problems([tmp_path]) == []
    assert known.problems([tmp_path], checksums=True) == ["a has changed: its checksum differs from byte 4 on"]


def test_the_first_place_counts(tmp_path):
    for place, size in (("new", 1), ("old", 2)):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a").write_bytes(b"x" * size)
    known = Manifest({"a": Written(1, (0,))})
    assert known.problems([tmp_path / "new", tmp_path / "old"]) == []
    assert known.problems([tmp_path / "old"]) == ["a has 2 bytes instead of 1"]
    assert known.problems([tmp_path]) == ["a is missing"]

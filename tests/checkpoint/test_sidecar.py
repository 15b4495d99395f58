import json
import shutil

import pytest

from hasten.checkpoint import sidecar
from hasten.checkpoint.manifest import MANIFEST, Manifest
from hasten.checkpoint.sidecar import Sidecar, Topology, file_name, save_name
from hasten.weights.stream import Written

RUN = "0123456789abcdef01234567"


def make(folder, number=1, ranks=2, skip=(), **changes):
    save = folder / save_name(RUN, number)
    save.mkdir(parents=True)
    for rank in range(ranks):
        if rank in skip:
            continue
        name = f"optimizer_0_rank{rank}.bin"
        (save / name).write_bytes(b"12345")
        said = Sidecar(save.name, rank, ranks, Topology("dp_shard 2", str(rank)), {name: Written(5, (0xCBF53A1C,))})
        said = Sidecar(**{**vars(said), **changes}) if rank == 0 else said
        (save / file_name(rank)).write_text(said.text(), encoding="utf-8")
    return save


def test_what_is_written_is_read(tmp_path):
    save = make(tmp_path, replaces="abc")
    found = Sidecar.read(save, 0)
    assert (found.save, found.rank, found.world_size, found.replaces) == (save.name, 0, 2, "abc")
    assert found.topology == Topology("dp_shard 2", "0")
    assert found.files == {"optimizer_0_rank0.bin": Written(5, (0xCBF53A1C,))}
    assert sidecar.problems(save, checksums=True) == []


def test_the_latest_finished_one_counts(tmp_path):
    first = make(tmp_path)
    assert sidecar.current(tmp_path) == sidecar.current(first) == first
    half = make(tmp_path, 2, skip=[1])
    assert sidecar.saves(tmp_path) == [half, first]
    assert sidecar.current(tmp_path) == first
    third = make(tmp_path, 3)
    assert sidecar.current(tmp_path) == third
    with pytest.raises(RuntimeError, match=r"not complete: hasten_rank_1\.json missing: of 2 processes"):
        sidecar.current(half)
    sidecar.remove_outdated(tmp_path)
    assert sidecar.saves(tmp_path) == [third]


def test_only_unfinished_ones(tmp_path):
    assert sidecar.current(tmp_path) is None
    save = make(tmp_path, ranks=6, skip=[1, 2, 3, 4])
    with pytest.raises(RuntimeError, match=r"hasten_rank_3\.json and 1 others missing"):
        sidecar.current(tmp_path)
    for rank in (0, 5):
        (save / file_name(rank)).unlink()
    with pytest.raises(RuntimeError, match="no process had finished its part"):
        sidecar.current(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert sidecar.current(tmp_path) is None
    sidecar.remove_outdated(tmp_path)
    assert save.exists()


def test_beside_a_manifest_the_later_one_counts(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("a.bin", "sub/b.bin", "of the user"):
        (tmp_path / name).touch()
    manifest = Manifest({"a.bin": Written(0, ()), "sub/b.bin": Written(0, ())})
    (tmp_path / MANIFEST).write_text(manifest.text(), encoding="utf-8")
    save = make(tmp_path)  # which has seen no manifest
    assert sidecar.current(tmp_path) is None
    sidecar.remove_outdated(tmp_path)
    assert (tmp_path / MANIFEST).exists()
    shutil.rmtree(save)
    save = make(tmp_path, replaces=manifest.identity)
    assert sidecar.current(tmp_path) == save
    sidecar.remove_outdated(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {save.name, "of the user"}
    assert sidecar.current(tmp_path) == save


def test_what_differs_is_named(tmp_path):
    for number, (changes, text) in enumerate(
        [
            ({"save": save_name(RUN, 99)}, "hasten_rank_0.json is of another save"),
            ({"rank": 1}, "hasten_rank_0.json is of another save"),
            (
                {"topology": Topology("dp_shard 3", "0")},
                "hasten_rank_1.json speaks of 2 processes on the mesh dp_shard 2",
            ),
            ({"world_size": 3}, "hasten_rank_2.json missing"),
            ({"files": {"optimizer_0_rank0.bin": Written(6, (0,))}}, "has 5 bytes instead of 6"),
        ],
        start=1,
    ):
        [line] = sidecar.problems(make(tmp_path, number, **changes))
        assert text in line


def test_one_process_looks_at_its_own_and_at_the_main_one(tmp_path):
    save = make(tmp_path, ranks=3)
    (save / "optimizer_0_rank1.bin").write_bytes(b"12")
    sidecar.verify(save, 2, False, lambda name: True)
    for rank in (1, None):
        with pytest.raises(RuntimeError, match=r"optimizer_0_rank1\.bin has 2 bytes instead of 5"):
            sidecar.verify(save, rank, False, lambda name: True)
    (save / "optimizer_0_rank2.bin").write_bytes(b"12346")
    sidecar.verify(save, 2, False, lambda name: True)
    with pytest.raises(RuntimeError, match=r"optimizer_0_rank2\.bin has changed"):
        sidecar.verify(save, 2, True, lambda name: True)


def test_a_damaged_or_later_sidecar(tmp_path):
    save = make(tmp_path)
    path = save / file_name(0)
    text = path.read_text(encoding="utf-8")
    for content in (text[:-5], text.replace('"rank": 0', '"rank": 1'), "[]", "{}"):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(RuntimeError, match=r"hasten_rank_0\.json is damaged"):
            Sidecar.read(save, 0)
    body = {**json.loads(text)["body"], "version": 2}
    path.write_text(json.dumps({"crc32": sidecar._sum(body), "body": body}), encoding="utf-8")
    with pytest.raises(RuntimeError, match="a later version of hasten"):
        Sidecar.read(save, 0)
    with pytest.raises(FileNotFoundError):
        Sidecar.read(save, 7)


def test_who_may_load(tmp_path):
    save = make(tmp_path)
    sidecar.check_fits(save, 1, 2, Topology("dp_shard 2", "1"))
    for rank, size, topology, text in (
        (2, 3, Topology("dp_shard 3", "2"), "this is 3 processes on the mesh dp_shard 3 .this one at 2."),
        (1, 2, Topology("dp_shard 2", "0"), "this is 2 processes"),
        (0, 2, Topology(), "this is 2 processes without sharding"),
    ):
        with pytest.raises(ValueError, match=f"by 2 processes on the mesh dp_shard 2 .*{text}.*hasten merge-weights"):
            sidecar.check_fits(save, rank, size, topology)

import os
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hasten.weights import stream
from hasten.weights.stream import Stream, Workers, Written, checksum_file


@pytest.fixture
def workers():
    workers = Workers()
    yield workers
    workers.close()


def write(path, workers, pieces, holding=None) -> Written:
    with Stream(path, workers, holding) as file:
        for piece in pieces:
            file.write(piece)
    return file.written.result()


def expected(content: bytes, block: int) -> Written:
    return Written(len(content), tuple(zlib.crc32(content[i : i + block]) for i in range(0, len(content), block)))


@pytest.mark.parametrize("sizes", [[], [0], [1, 2, 3], [100_000], [70_000, 5, 70_000, 5], [3, 200_000, 0, 1]])
def test_bytes_and_checksums(tmp_path, workers, monkeypatch, sizes):
    monkeypatch.setattr(stream, "BLOCK", 30_000)
    pieces = [bytes((size + i) % 251 for i in range(size)) for size in sizes]
    written = write(tmp_path / "f", workers, pieces)
    content = b"".join(pieces)
    assert (tmp_path / "f").read_bytes() == content
    assert written == expected(content, 30_000)
    assert checksum_file(tmp_path / "f", workers) == written


def test_tensors_that_are_held_are_checksummed_in_place_and_others_copied(tmp_path, workers):
    held = torch.arange(50_000)
    with Stream(tmp_path / "f", workers, {"a": [held]}) as file:
        gone = bytearray(b"x" * 100_000)
        file.write(gone)
        gone[:] = b"y" * 100_000
        file.write(memoryview(held.numpy()).cast("B"))
        assert [type(part) for part in file._parts] == [bytes, memoryview]
    content = (tmp_path / "f").read_bytes()
    assert content == b"x" * 100_000 + held.numpy().tobytes()
    assert file.written.result() == expected(content, stream.BLOCK)


def test_an_object_that_contains_itself_can_be_held(tmp_path, workers):
    item: dict = {"tensor": torch.zeros(3)}
    item["self"] = [item]
    assert write(tmp_path / "f", workers, [b"a"], item) == expected(b"a", stream.BLOCK)


def test_an_error_in_the_body_closes_the_file(tmp_path, workers):
    file = Stream(tmp_path / "f", workers)
    with pytest.raises(TypeError), file:
        file.write(b"a" * 100_000 + 3)
    assert file._file.closed
    assert not hasattr(file, "written")


def test_a_sync_that_fails_is_reported(tmp_path, workers, monkeypatch):
    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        write(tmp_path / "f", workers, [b"a"])


def test_long_files_are_synced_while_they_are_written(tmp_path, workers, monkeypatch):
    monkeypatch.setattr(stream, "BLOCK", 100_000)
    order, sync = [], os.fsync
    monkeypatch.setattr("os.fsync", lambda descriptor: (order.append("sync"), sync(descriptor)))
    with Stream(tmp_path / "f", workers) as file:
        for _ in range(stream.SYNC_EVERY):
            file.write(b"x" * 100_000)
        file._syncs[0].result()
        order.append("written")
    assert file.written.result().size == stream.SYNC_EVERY * 100_000
    assert order == ["sync", "written", "sync"]


def test_an_early_sync_that_fails_is_reported(tmp_path, workers, monkeypatch):
    monkeypatch.setattr(stream, "BLOCK", 100_000)
    sync, calls = os.fsync, []

    def fails_once(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(5, "Input/output error")
        sync(descriptor)

    monkeypatch.setattr("os.fsync", fails_once)
    with pytest.raises(OSError, match="Input/output"):
        write(tmp_path / "f", workers, [b"x" * 100_000] * stream.SYNC_EVERY)


def test_a_fast_writer_waits_for_the_checksums(tmp_path, workers, monkeypatch):
    monkeypatch.setattr(stream, "BLOCK", 100_000)
    monkeypatch.setattr(stream, "AHEAD", 2)
    monkeypatch.setattr(workers, "sums", ThreadPoolExecutor(1))
    gate = threading.Event()
    workers.sums.submit(gate.wait)
    opener = threading.Timer(0.05, gate.set)
    with Stream(tmp_path / "f", workers) as file:
        file.write(b"x" * 200_000)
        opener.start()
        file.write(b"x" * 100_000)
        assert gate.is_set()
    opener.join()
    assert file.written.result() == expected(b"x" * 300_000, 100_000)


def test_the_log_hears_of_what_takes_long(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(stream, "BLOCK", 8)
    monkeypatch.setattr(stream, "_TELL_S", 5.0)
    now = iter([0.0, 1.0, 6.0, 7.0, 12.0])
    monkeypatch.setattr(stream.time, "monotonic", lambda: next(now))
    workers = Workers()
    try:
        with caplog.at_level("INFO", logger="hasten.weights.stream"):
            write(tmp_path / "a", workers, [bytes(32)])
    finally:
        workers.close()
    assert [record.getMessage() for record in caplog.records] == [
        "0.0 GB written in 6 s, now a.",
        "0.0 GB written in 12 s, now a.",
    ]

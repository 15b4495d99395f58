import pytest
import torch

from hasten.weights import reads
from hasten.weights.reads import Reads


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize("threads", [1, 3])
def test_pieces_of_files_come_into_memory(tmp_path, monkeypatch, piece, threads):
    monkeypatch.setattr(reads, "_PIECE", piece)
    monkeypatch.setattr(reads, "_THREADS", threads)
    contents = {name: torch.randint(0, 255, (64,), dtype=torch.uint8) for name in "ab"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content.numpy().tobytes())
    targets = [
        (name, start, torch.zeros(length, dtype=torch.uint8))
        for name, start, length in [("a", 0, 10), ("b", 60, 4), ("a", 10, 54), ("b", 5, 0), ("b", 0, 33)]
    ]
    collected = Reads()
    for name, start, target in targets:
        collected.add(tmp_path / name, start, target)
    collected.run()
    collected.run()  # nothing is left
    for name, start, target in targets:
        assert torch.equal(target, contents[name][start : start + len(target)])


def test_a_file_that_ends_too_early(tmp_path):
    (tmp_path / "a").write_bytes(b"1234")
    collected = Reads()
    collected.add(tmp_path / "a", 2, torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match=r"a ends too early: it is damaged"):
        collected.run()
    collected.add(tmp_path / "none", 2, torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(FileNotFoundError):
        collected.run()

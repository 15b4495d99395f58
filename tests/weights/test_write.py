import errno

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from hasten.weights.dtypes import CODES, DTYPES
from hasten.weights.stream import Stream
from hasten.weights.write import FolderWriter, in_file_order


def every_dtype() -> dict[str, torch.Tensor]:
    numbers = torch.arange(-4, 5)
    return {
        code: numbers.to(dtype) if not dtype.is_complex else numbers.to(dtype) * 1j for code, dtype in DTYPES.items()
    }


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def test_the_format_is_what_its_own_library_reads(tmp_path):
    tensors = {
        **every_dtype(),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        'größe "x"': torch.zeros(1),
        "large": torch.arange(100_000),
        "gradient": torch.zeros(2, requires_grad=True),
    }
    with FolderWriter(tmp_path) as writer:
        writer.save_safetensors("a.safetensors", tensors)
    read = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(bytes_of(read[name]), bytes_of(tensor))
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_bytes_are_those_of_the_library(tmp_path):
    tensors = {"b": torch.arange(3.0), "a": torch.arange(5.0)}
    with FolderWriter(tmp_path) as writer:
        writer.save_safetensors("ours", tensors, {"format": "pt"})
    safetensors.torch.save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_tensors_start_at_multiples_of_their_size(tmp_path):
    with FolderWriter(tmp_path) as writer:
        writer.save_safetensors(
            "f", {"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(3), "c": torch.ones(3).double()}
        )
    from hasten.weights.safe_file import SafeFile

    with SafeFile(tmp_path / "f") as file:
        assert all(entry.start % entry.dtype.itemsize == 0 for entry in file.entries.values())


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (torch.zeros(2, device="meta"), "meta device"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (3, "is a int"),
    ],
)
def test_what_safetensors_can_not_hold_is_named(tmp_path, value, why):
    with pytest.raises(TypeError, match=f"'bad'.*{why}"), FolderWriter(tmp_path) as writer:
        writer.save_safetensors("f", {"bad": value})


def test_every_code_has_one_type():
    assert len(CODES) == len(DTYPES)


def test_torch_files_round_trip_and_are_listed(tmp_path):
    item = {"a": torch.randn(50_000), "b": [torch.ones(2).half(), 3, "x"], "shared": None}
    item["shared"] = item["a"][:5]
    with FolderWriter(tmp_path) as writer:
        writer.save_torch("f.bin", item)
        writer.save_text("f.json", "{}")
    read = torch.load(tmp_path / "f.bin")
    assert torch.equal(read["a"], item["a"])
    assert read["b"][1:] == [3, "x"]
    assert read["shared"].data_ptr() == read["a"].data_ptr()
    assert writer.written["f.bin"].size == (tmp_path / "f.bin").stat().st_size
    assert writer.written["f.json"].size == 2
    assert torch.serialization.get_crc32_options() is True


def test_files_of_others_are_adopted(tmp_path):
    (tmp_path / "mine").write_bytes(b"abc")
    with FolderWriter(tmp_path) as writer:
        writer.adopt("mine")
    assert writer.written["mine"].size == 3


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_full_disk_is_reported_as_such(tmp_path, monkeypatch, after):
    write_all, calls = Stream._write_all, []

    def full(self: Stream, view: memoryview) -> None:
        calls.append(view)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_all(self, view)

    monkeypatch.setattr(Stream, "_write_all", full)
    with pytest.raises(OSError, match="No space left"), FolderWriter(tmp_path) as writer:
        writer.save_torch("f.bin", {str(i): torch.randn(50_000) for i in range(4)})


def test_what_can_not_be_pickled_is_reported_as_such(tmp_path):
    with pytest.raises(AttributeError, match="lambda"), FolderWriter(tmp_path) as writer:
        writer.save_torch("f.bin", {"f": lambda: 1})


def test_values_may_be_given_one_after_the_other(tmp_path):
    tensors = {
        "a": torch.arange(3.0),
        "b": torch.arange(2.0, dtype=torch.float64),
        "c": torch.ones(2, 2, dtype=torch.int8),
    }
    forms = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    asked: list[str] = []

    def read(name: str) -> torch.Tensor:
        asked.append(name)
        return tensors[name]

    with FolderWriter(tmp_path) as writer:
        writer.save_safetensors("x.safetensors", forms, read=read)
        writer.save_safetensors("y.safetensors", tensors)
    assert asked == in_file_order(forms) == ["b", "a", "c"]
    assert (tmp_path / "x.safetensors").read_bytes() == (tmp_path / "y.safetensors").read_bytes()

import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from hasten.cli.main import main

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint as the reference lays it out, written by torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is one process
        dcp.save({"model": TENSORS}, checkpoint_id=tmp_path / "ck" / "pytorch_model_fsdp_0", no_dist=True)
    return tmp_path / "ck"


@pytest.mark.parametrize("flag", ["--unsafe_serialization", "--unsafe-serialization", None])
def test_a_file_is_written(checkpoint: Path, tmp_path: Path, flag: str | None) -> None:
    out = tmp_path / "out"
    assert main(["merge-weights", str(checkpoint / "pytorch_model_fsdp_0"), str(out), *([flag] if flag else [])]) == 0
    found = torch.load(out / "pytorch_model.bin") if flag else load_file(out / "model.safetensors")
    torch.testing.assert_close(found, TENSORS, rtol=0, atol=0)
    assert (checkpoint / "pytorch_model_fsdp_0").is_dir()


def test_into_the_current_folder_and_without_the_shards(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["merge-weights", "--remove_checkpoint_dir", str(checkpoint / "pytorch_model_fsdp_0")]) == 0
    assert load_file("model.safetensors").keys() == TENSORS.keys()
    assert not (checkpoint / "pytorch_model_fsdp_0").exists()


def test_errors_are_one_line(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge-weights", str(checkpoint)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"hasten merge-weights: {checkpoint} is no folder of shards itself, but holds ")
    assert error.count("\n") == 1
    shutil.rmtree(checkpoint)
    assert main(["merge-weights", str(checkpoint)]) == 1
    assert capsys.readouterr().err == f"hasten merge-weights: There is no folder {checkpoint}.\n"


def test_help_does_not_import_torch() -> None:
    code = "import sys\nfrom hasten.cli.main import main\ntry: main(['merge-weights', '--help'])\n"
    code += "except SystemExit: print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "False"

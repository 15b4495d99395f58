"""Which checkpoint is loaded."""

from pathlib import Path

import pytest
import torch

from hasten import Accelerator, ProjectConfiguration
from tests.ranks import RankError, run_ranks


def prepared(folder: Path) -> tuple[Accelerator, torch.nn.Linear]:
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    return accelerator, accelerator.prepare(torch.nn.Linear(2, 2))


def save(folder: Path, *values: float) -> list[Path]:
    accelerator, model = prepared(folder)
    found = []
    for value in values:
        with torch.no_grad():
            accelerator.unwrap_model(model).weight.fill_(value)
        found.append(accelerator.save_state())
    return found


def flip(checkpoint: Path) -> None:
    """Change a byte in the middle of the weights; the size stays."""
    path = checkpoint / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("given", [None, "latest"])
def test_the_newest(tmp_path: Path, given: str | None) -> None:
    save(tmp_path, 1.0, 2.0)
    accelerator, model = prepared(tmp_path)
    accelerator.load_state(given)
    assert model.weight.unique().tolist() == [2.0]
    assert accelerator.project_configuration.iteration == 2


def test_a_folder_may_be_called_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1.0, 2.0)[0].rename(tmp_path / "latest")
    monkeypatch.chdir(tmp_path)
    accelerator, model = prepared(tmp_path)
    accelerator.load_state("latest")
    assert model.weight.unique().tolist() == [1.0]


def test_changed_bytes_are_found_before_anything_is_loaded(tmp_path: Path) -> None:
    flip(save(tmp_path, 1.0, 2.0)[1])
    accelerator, model = prepared(tmp_path)
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"checkpoint_1 is damaged: model.safetensors has changed"):
        accelerator.load_state(checksums=True)
    assert torch.equal(model.weight, before)
    accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_0", checksums=True)
    assert model.weight.unique().tolist() == [1.0]


def test_falling_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = save(tmp_path, 1.0, 2.0, 3.0)
    for checkpoint in checkpoints[1:]:
        flip(checkpoint)
    accelerator, model = prepared(tmp_path)
    accelerator.load_state(fallback=True)
    assert model.weight.unique().tolist() == [1.0]
    assert [record.getMessage().endswith("Taking the one before.") for record in caplog.records] == [True, True]
    assert accelerator.project_configuration.iteration == 3  # the next one runs into none of them
    flip(checkpoints[0])
    with pytest.raises(ValueError, match="There is no complete checkpoint"):
        accelerator.load_state("latest", fallback=True)
    with pytest.raises(ValueError, match="which one is before it"):
        accelerator.load_state(checkpoints[0], fallback=True)


def on_ranks(folder: str) -> float:
    accelerator, model = prepared(Path(folder))
    with torch.no_grad():
        for value in (1.0, 2.0):
            accelerator.unwrap_model(model).weight.fill_(value)
            newest = accelerator.save_state()
    if accelerator.is_main_process:
        own = newest / "random_states_1.pkl"  # which rank 1 alone reads
        own.write_bytes(own.read_bytes()[:-1] + b"x")
    accelerator.wait_for_everyone()
    accelerator.load_state(fallback=True)
    return accelerator.unwrap_model(model).weight.unique().item()


def test_what_is_damaged_for_one_rank_is_damaged_for_all(tmp_path: Path) -> None:
    assert run_ranks(on_ranks, 2, str(tmp_path)) == [1.0, 1.0]


def refused(folder: str) -> None:
    accelerator, _ = prepared(Path(folder))
    newest = accelerator.save_state()
    if accelerator.is_main_process:
        flip(newest)
    accelerator.wait_for_everyone()
    accelerator.load_state(checksums=True)


def test_the_same_error_on_every_rank(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(refused, 2, str(tmp_path))
    assert all("model.safetensors has changed" in text for text in caught.value.tracebacks.values())
    assert len(caught.value.tracebacks) == 2


def test_calls_that_would_save_in_the_wrong_place(tmp_path):
    one = Accelerator(cpu=True)
    with pytest.raises(TypeError, match=r"save_state\(\) has no option 'bloking' \(did you mean 'blocking'\?\)"):
        one.save_state(tmp_path, bloking=False)
    with pytest.raises(ValueError, match="an empty name would be the current folder"):
        one.save_state("")
    with pytest.raises(ValueError, match=r"become a pathlib\.Path"):
        one.save_state(Path("s3://bucket/x"))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="which is a file: pass the folder"):
        one.load_state(tmp_path / "file")

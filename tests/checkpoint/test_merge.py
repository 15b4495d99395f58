import pytest
import safetensors.torch
import torch
from torch import Tensor

from hasten.utils import merge_fsdp_weights
from tests.checkpoint.test_sharded import on
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "ck"
    state = on(2, str(folder), 1)[1]
    return folder, {name: each for name, each in state.items() if ":" not in name and name != "rate"}


@pytest.mark.parametrize("safe", [True, False])
def test_one_file_of_whole_tensors(tmp_path, saved, safe):
    folder, expected = saved
    merge_fsdp_weights(str(folder / "pytorch_model_fsdp_0"), str(tmp_path / "out"), safe)
    if safe:
        found = safetensors.torch.load_file(tmp_path / "out/model.safetensors")
        assert expected.keys() - found.keys() == {"head.weight"}
    else:
        found = torch.load(tmp_path / "out/pytorch_model.bin")
        assert found.keys() == expected.keys()
        assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "model.safetensors" if safe else "pytorch_model.bin"
    }
    torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=0, atol=0)


def test_one_tensor_at_a_time(tmp_path, saved, monkeypatch):
    from hasten.checkpoint import merge

    alive: list[int] = []
    empty = torch.empty

    def counted(*args, **kwargs) -> Tensor:
        tensor = empty(*args, **kwargs)
        alive.append(tensor.numel())
        return tensor

    monkeypatch.setattr(merge.torch, "empty", counted)
    merge_fsdp_weights(str(saved[0] / "pytorch_model_fsdp_0"), str(tmp_path))
    assert max(alive) == max(each.numel() for each in saved[1].values())


def test_the_folder_of_shards_may_go(tmp_path, saved):
    import shutil

    copy = shutil.copytree(saved[0], tmp_path / "copy")
    merge_fsdp_weights(copy / "pytorch_model_fsdp_0", tmp_path / "out", remove_checkpoint_dir=True)
    assert not (copy / "pytorch_model_fsdp_0").exists()
    assert (copy / "optimizer_0").exists()


def test_errors_say_which_folder_is_meant(tmp_path, saved):
    folder, _ = saved
    with pytest.raises(FileNotFoundError, match=r"but holds .*pytorch_model_fsdp_0: give that"):
        merge_fsdp_weights(str(folder), str(tmp_path))
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        merge_fsdp_weights(str(folder / "nothing"), str(tmp_path))
    with pytest.raises(FileNotFoundError, match="inside a checkpoint"):
        merge_fsdp_weights(str(tmp_path), str(tmp_path))
    with pytest.raises(ValueError, match="folder of a model"):
        merge_fsdp_weights(str(folder / "optimizer_0"), str(tmp_path))


def merged(folder: str, output: str) -> bool:
    from pathlib import Path

    merge_fsdp_weights(folder, output)
    return Path(output, "model.safetensors").exists()


def test_the_main_process_merges_and_the_others_wait(tmp_path, saved):
    assert run_ranks(merged, 2, str(saved[0] / "pytorch_model_fsdp_0"), str(tmp_path)) == [True, True]

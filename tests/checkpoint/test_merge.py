import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from hasten.checkpoint import sidecar
from hasten.checkpoint.own_file import pack
from hasten.cli import merge_weights
from hasten.utils import merge_fsdp_weights
from tests.checkpoint.test_sharded import compare, hybrid, on
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
    merge_fsdp_weights(folder, output)
    return Path(output, "model.safetensors").exists()


def test_the_main_process_merges_and_the_others_wait(tmp_path, saved):
    assert run_ranks(merged, 2, str(saved[0] / "pytorch_model_fsdp_0"), str(tmp_path)) == [True, True]


# -- files of single processes -------------------------------------------------------------------------------------------


def expected_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each for name, each in state.items() if ":" not in name and name != "rate"}


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_files_of_single_processes(tmp_path, ranks, safe):
    arguments = str(tmp_path / "ck"), 1
    if ranks == 4:
        state = run_ranks(hybrid, 4, *arguments, sharded_save="per_rank", timeout=60)[0][1]
    else:
        state = on(ranks, *arguments, sharded_save="per_rank")[1]
    given = [str(tmp_path / "ck"), str(tmp_path / "out")]
    assert merge_weights.main(given if safe else [*given, "--unsafe_serialization"]) == 0
    [path] = (tmp_path / "out").iterdir()
    found = safetensors.torch.load_file(path) if safe else torch.load(path)
    expected = expected_of(state)
    assert expected.keys() - found.keys() == ({"head.weight"} if safe else set())
    compare(found, {name: expected[name] for name in found}, 0.0)
    [save] = sidecar.saves(tmp_path / "ck")
    merge_fsdp_weights(str(save / "pytorch_model_fsdp_0"), str(tmp_path / "again"), safe, remove_checkpoint_dir=True)
    assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    assert not list(save.glob("pytorch_model*"))


def big(folder: Path, ranks: int, tensors: int, rows: int) -> int:
    """What two processes write of a model with large matrices, divided by rows and by columns; bytes of one."""
    from hasten.checkpoint import own_file
    from hasten.weights.write import FolderWriter

    for rank in range(ranks):
        state, shards = {}, {}
        for number in range(tensors):
            whole = torch.full((rows, rows), float(number))
            state[f"w{number}"] = whole.chunk(ranks, number % 2)[rank].contiguous()
            start = [0, 0]
            start[number % 2] = rank * rows // ranks
            shards[(f"w{number}",)] = ((rows, rows), tuple(start), (f"Shard(dim={number % 2})",))
        with FolderWriter(folder) as writer:
            packed = pack(state)
            assert packed.keys() == {own_file._STATE, own_file._SHARDS}
            writer.save_torch(f"pytorch_model_fsdp_0_rank{rank}.bin", {**packed, own_file._SHARDS: shards})
    return rows * rows * 4


# Not `ru_maxrss`, which begins with what the parent had.
PEAK = """
import sys
from hasten.checkpoint.merge import merge_fsdp_weights

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))

merge_fsdp_weights(sys.argv[1], sys.argv[2])
before = peak()
merge_fsdp_weights(sys.argv[3], sys.argv[4])
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the peak that Linux tells")
@pytest.mark.parametrize("tensors", [3, 12])
def test_memory_is_bounded_by_the_largest_tensor(tmp_path, tensors):
    for name, count, rows in (("small", 2, 64), ("large", tensors, 2048)):
        (tmp_path / name).mkdir()
        size = big(tmp_path / name, 2, count, rows)
    paths = [str(tmp_path / name) for name in ("small", "out", "large", "out2")]
    done = subprocess.run([sys.executable, "-c", PEAK, *paths], capture_output=True, text=True, check=True, timeout=120)
    # Columns come through a copy of one part; what is not checksummed yet is less than a block of 16 MiB, twice while it grows.
    assert size / 2 < int(done.stdout) < 2 * size + (64 << 20)
    found = safetensors.torch.load_file(tmp_path / "out2/model.safetensors")
    assert [(float(each.min()), float(each.max())) for _, each in sorted(found.items())] == [
        (float(name[1:]), float(name[1:])) for name in sorted(found)
    ]


def test_damage_is_told_before_anything_is_written(tmp_path, capsys):
    folder = tmp_path / "ck"
    on(2, str(folder), 1, sharded_save="per_rank")
    [save] = sidecar.saves(folder)
    weights = save / "pytorch_model_fsdp_0_rank1.bin"
    content = weights.read_bytes()
    for damage, text in (
        (lambda: weights.write_bytes(content[:-8]), f"{weights.name} has {len(content) - 8} bytes instead of"),
        (weights.unlink, f"{weights.name} is missing"),
        ((save / "hasten_rank_1.json").unlink, "hasten_rank_1.json missing"),
    ):
        damage()
        assert merge_weights.main([str(folder), str(tmp_path / "out")]) == 1
        assert text in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_several_models_and_files_without_sidecars(tmp_path, capsys):
    on(2, str(tmp_path / "ck"), 1, sharded_save="per_rank")
    [save] = sidecar.saves(tmp_path / "ck")
    flat = tmp_path / "flat"
    flat.mkdir()
    for rank in range(2):
        for index in range(2):
            shutil.copy(
                save / f"pytorch_model_fsdp_0_rank{rank}.bin", flat / f"pytorch_model_fsdp_{index}_rank{rank}.bin"
            )
    assert merge_weights.main([str(flat), str(tmp_path / "out")]) == 1
    assert "holds 2 models: give one of" in capsys.readouterr().err
    assert merge_weights.main([str(flat / "pytorch_model_fsdp_1"), str(tmp_path / "out")]) == 0
    assert merge_weights.main([str(flat / "pytorch_model_fsdp_2"), str(tmp_path / "out")]) == 1
    assert "has no model number 2, but 0, 1" in capsys.readouterr().err
    (flat / "pytorch_model_fsdp_1_rank0.bin").unlink()
    assert merge_weights.main([str(flat / "pytorch_model_fsdp_1"), str(tmp_path / "out")]) == 1
    assert "pytorch_model_fsdp_1_rank0.bin is missing" in capsys.readouterr().err
    (flat / "pytorch_model_fsdp_0_rank1.bin").unlink()
    (flat / "pytorch_model_fsdp_1_rank1.bin").unlink()
    assert merge_weights.main([str(flat / "pytorch_model_fsdp_0"), str(tmp_path / "out")]) == 1
    assert "some are of another save" in capsys.readouterr().err

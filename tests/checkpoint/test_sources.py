import pytest
import safetensors.torch
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hasten.checkpoint import dcp, sources
from hasten.checkpoint.sources import MODEL, OPTIMIZER, find, look
from hasten.weights.write import FolderWriter
from hasten.world import process
from tests.ranks import run_ranks

WHOLE = {"a": torch.arange(10.0).reshape(5, 2), "b": torch.tensor(3)}


def test_where_a_state_is_found(tmp_path):
    assert find(tmp_path, MODEL, 0) is None
    names = ["model.safetensors", "pytorch_model_1.bin", "pytorch_model_fsdp_2.safetensors", "pytorch_model_fsdp_3.bin"]
    for index, name in enumerate(names):
        (tmp_path / name).touch()
        assert find(tmp_path, MODEL, index) == ("file", tmp_path / name)
    (tmp_path / "optimizer_1").mkdir()
    assert find(tmp_path, OPTIMIZER, 1) is None
    (tmp_path / "optimizer_1/.metadata").touch()
    assert find(tmp_path, OPTIMIZER, 1) == ("folder", tmp_path / "optimizer_1")
    assert find(tmp_path / "optimizer_1", OPTIMIZER, 0) == ("folder", tmp_path / "optimizer_1")
    (tmp_path / "optimizer_4_rank0.bin").touch()
    assert find(tmp_path, OPTIMIZER, 4) == ("ranks", tmp_path / "optimizer_4_rank0.bin")
    (tmp_path / "pytorch_model_fsdp_rank0.bin").touch()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(NotImplementedError, match="LOCAL_STATE_DICT"):
        find(tmp_path, MODEL, 0)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"optimizer_1\.bin and no folder optimizer_1"):
        look(tmp_path, [(OPTIMIZER, 1)], None)[0].open(None, {})


@pytest.mark.parametrize("flat", [True, False])
def test_folders_with_and_without_a_key_above(tmp_path, flat):
    state = {f"model.{name}": each for name, each in WHOLE.items()} if flat else {"model": WHOLE}
    with FolderWriter(tmp_path) as writer:
        dcp.write(writer, "pytorch_model_fsdp_0", state, {}, None)
    source = look(tmp_path, [(MODEL, 0)], None)[0].open(None, {})
    assert set(source.skeleton) == {"a", "b"}
    target = torch.zeros(5, 2)
    source.fill({("a",): target})
    assert torch.equal(target, WHOLE["a"])


def sent(folder: str) -> tuple[list[bool], int]:
    """Read a file that the main process alone sees."""
    from pathlib import Path

    import torch.distributed as dist

    world = process.start(cpu=True)
    place = Path(folder) if world.is_main else Path("/nowhere")
    source = look(place, [(MODEL, 0)], world)[0].open(world, {})
    target = distribute_tensor(torch.zeros(5, 2), init_device_mesh("cpu", (world.size,)), [Shard(0)])
    plain = torch.zeros((), dtype=torch.int64)
    largest = 0
    broadcast = dist.broadcast

    def counted(tensor, *args, **kwargs):
        nonlocal largest
        largest = max(largest, tensor.numel())
        return broadcast(tensor, *args, **kwargs)

    dist.broadcast = counted
    source.fill({("a",): target, ("b",): plain})
    dist.broadcast = broadcast
    return [torch.equal(target.full_tensor(), WHOLE["a"]), plain.item() == 3], largest


@pytest.mark.parametrize("safe", [True, False])
def test_the_main_process_sends_tensor_by_tensor(tmp_path, safe):
    if safe:
        safetensors.torch.save_file(WHOLE, tmp_path / "pytorch_model_fsdp.safetensors")
    else:
        torch.save(WHOLE, tmp_path / "pytorch_model_fsdp.bin")
    for same, largest in run_ranks(sent, 3, str(tmp_path)):
        assert all(same)
        assert largest == 10


def broken(folder: str) -> str:
    from pathlib import Path

    world = process.start(cpu=True)
    source = look(Path(folder), [(MODEL, 0)], world)[0].open(world, {})
    if world.is_main:
        Path(folder, "model.safetensors").write_bytes(b"x")
    with pytest.raises(RuntimeError) as error:
        source.fill({("a",): torch.zeros(5, 2)})
    return str(error.value)


def test_what_the_main_process_can_not_read_is_an_error_of_all(tmp_path):
    safetensors.torch.save_file(WHOLE, tmp_path / "model.safetensors")
    main, other = run_ranks(broken, 2, str(tmp_path))
    assert "not a readable safetensors file" in main
    assert "rank 0 failed with RuntimeError" in other


def test_names_of_files():
    assert sources.folder_name(MODEL, 2) == "pytorch_model_fsdp_2"
    assert sources.rank_name(OPTIMIZER, 0, 3) == "optimizer_0_rank3.bin"

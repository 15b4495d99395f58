"""Files that several ranks write together hold what the main process alone would have written."""

import filecmp
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten.checkpoint import manifest, meeting, shares, state, store
from hasten.checkpoint.shares import UNIT, divided
from hasten.checkpoint.state import Contents
from hasten.weights import image, stream
from hasten.weights.stream import BLOCK
from hasten.world import process
from hasten.world.process import World
from tests.checkpoint.objects import make, same
from tests.checkpoint.power_cut import Recorder, put
from tests.checkpoint.test_power_cut import broken, counting, tree_of
from tests.ranks import RankError, run_ranks

ALONE = World()
SMALL_UNIT = 1 << 16
FILES = {"model.safetensors", "optimizer.bin", "pytorch_model.bin"}


# ---- cutting ----


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    "sizes", [[BLOCK], [5 * BLOCK + 123, 17], [3 * BLOCK - 1, 8 * UNIT, 9 * BLOCK + 1], [UNIT] * 5, [40 * BLOCK]]
)
def test_segments_cover_everything_once(sizes, ranks):
    files = {str(number): size for number, size in enumerate(sizes)}
    segments = divided(files, ranks)
    for name, size in files.items():
        own = [each for each in segments if each.name == name]
        assert [each.start for each in own] == [0, *(each.stop for each in own[:-1])]
        assert own[-1].stop == size
        assert all(each.start // BLOCK == (each.stop - 1) // BLOCK for each in own)
        assert all(each.start % UNIT == 0 for each in own)
    assert [each.rank for each in segments] == sorted(each.rank for each in segments)
    share = Counter[int]()
    for each in segments:
        share[each.rank] += each.stop - each.start
    assert max(share) < ranks
    assert max(share.values()) <= sum(sizes) / ranks + UNIT


def test_no_rank_writes_much_more_than_its_share():
    sizes = {"model.safetensors": 134_218_760, "optimizer.bin": 268_443_000}
    for ranks in (2, 3, 4):
        for rank in range(ranks):
            mine = sum(each.stop - each.start for each in divided(sizes, ranks) if each.rank == rank)
            assert mine <= 1.02 * sum(sizes.values()) / ranks


# ---- saving ----


class Net(nn.Module):
    """Large and small tensors of odd sizes and two types, tied weights, a buffer that differs, and one without values."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(701, 333)
        self.norm = nn.BatchNorm1d(333)
        self.low = nn.Linear(333, 517, dtype=torch.bfloat16)
        self.conv = nn.Conv2d(64, 64, 5).to(memory_format=torch.channels_last)
        self.head = nn.Linear(333, 701, bias=False)
        self.head.weight = self.embedding.weight
        self.norm.running_mean.fill_(rank)  # type: ignore[union-attr, operator]
        self.register_buffer("none", torch.empty(0))


def contents_of(kind: str, rank: int, value: int = 1) -> Contents:
    torch.manual_seed(value)
    model = Net(rank)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if kind != "new":
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return Contents([model], [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)], step=value)


def small_units(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shares, "UNIT", SMALL_UNIT)
    patch.setattr(shares, "LEAST", SMALL_UNIT)


class Watch:
    """Bytes that this rank writes into shared files."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        write = shares._write_all

        def watched(file: Any, view: memoryview) -> None:
            self.bytes += len(view)
            write(file, view)

        patch.setattr(shares, "_write_all", watched)


def saved(
    folder: str, kind: str, ranks: list[int], blocking: bool = True, safe: bool = True, odd_one: int = -1
) -> tuple[int, list[int]]:
    """How many bytes of shared files this rank has written in a first and a second save, which differ in their values."""
    here = process.start(cpu=True)
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        small_units(patch)
        for value in (1, 2):
            watch = Watch(patch)
            contents = contents_of(kind, here.rank, 7 if here.rank == odd_one else value)
            if here.rank in ranks:
                found = state.save(folder, contents, here, blocking=blocking, safe_serialization=safe)
                if not blocking:
                    with torch.no_grad():  # training goes on
                        for tensor in tensors(contents):
                            tensor.fill_(9)
                    found.result(20)  # type: ignore[union-attr]
            counts.append(watch.bytes)
            here.barrier()
    return sum(os.path.getsize(os.path.join(folder, name)) for name in FILES & set(os.listdir(folder))), counts


def tensors(contents: Contents) -> list[Tensor]:
    found = [*contents.models[0].state_dict().values()]
    for each in contents.optimizers[0].state.values():
        found += [value for value in each.values() if isinstance(value, Tensor)]
    return found


def alone(folder: Path, kind: str, safe: bool = True) -> Path:
    """What the main process alone writes."""
    state.save(folder, contents_of(kind, 0, 2), ALONE, safe_serialization=safe)
    return folder


def check(folder: Path, expected: Path) -> None:
    """The same files, to the bit, with the same checksums."""
    store.verify(folder, checksums=True)
    names = FILES & set(os.listdir(expected))
    assert len(names) == 2
    for name in names:
        assert filecmp.cmp(folder / name, expected / name, shallow=False), name
    listed, wanted = (json.loads((each / "hasten_manifest.json").read_text())["files"] for each in (folder, expected))
    assert {name: listed[name] for name in names} == {name: wanted[name] for name in names}
    assert not [name for name in os.listdir(folder) if name.startswith(".")]


@pytest.mark.parametrize("kind", ["adamw", "momentum", "new"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_files_are_those_that_the_main_process_alone_writes(tmp_path, size, kind):
    found = run_ranks(saved, size, str(tmp_path / "ck"), kind, list(range(size)))
    check(tmp_path / "ck", alone(tmp_path / "alone", kind))
    for total, counts in found:
        assert all(total / size - 2 * SMALL_UNIT < count < total / size + 2 * SMALL_UNIT for count in counts)


def small_blocks(patch: pytest.MonkeyPatch) -> None:
    for module in (stream, shares, manifest):
        patch.setattr(module, "BLOCK", 3 * SMALL_UNIT)


def in_small_blocks(folder: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch)
        return saved(folder, "adamw", [0, 1, 2])[0]


def test_files_of_many_blocks(tmp_path, monkeypatch):
    small_blocks(monkeypatch)
    [size, *_] = run_ranks(in_small_blocks, 3, str(tmp_path / "ck"))
    assert size > 60 * SMALL_UNIT
    check(tmp_path / "ck", alone(tmp_path / "alone", "adamw"))


@pytest.mark.parametrize(("blocking", "safe"), [(False, True), (False, False), (True, False)])
def test_in_the_background_and_without_safetensors(tmp_path, blocking, safe):
    found = run_ranks(saved, 3, str(tmp_path / "ck"), "adamw", [0, 1, 2], blocking=blocking, safe=safe)
    check(tmp_path / "ck", alone(tmp_path / "alone", "adamw", safe))
    assert all(count < total / 3 + 2 * SMALL_UNIT for total, counts in found for count in counts)


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("ranks", [[0], [0, 2]])
def test_absent_ranks(tmp_path, ranks, blocking):
    found = run_ranks(with_less_patience, 3, str(tmp_path / "ck"), ranks, blocking)
    check(tmp_path / "ck", alone(tmp_path / "alone", "adamw"))
    total = found[0][0]
    for rank, (_, counts) in enumerate(found):
        # Where nobody else comes, the main process writes as if it were the only one.
        share = 0 if rank not in ranks or ranks == [0] else total * (2 if rank == 0 else 1) / 3
        assert all(abs(count - share) < 3 * SMALL_UNIT for count in counts)


def with_less_patience(folder: str, ranks: list[int], blocking: bool) -> tuple[int, list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in (("PATIENCE", 0.2), ("SHORT_PATIENCE", 0.1), ("LONG_PATIENCE", 0.3)):
            patch.setattr(meeting, name, seconds)
        return saved(folder, "adamw", ranks, blocking)


def test_a_rank_with_other_values_changes_nothing(tmp_path):
    found = run_ranks(saved, 3, str(tmp_path / "ck"), "adamw", [0, 1, 2], odd_one=1)
    check(tmp_path / "ck", alone(tmp_path / "alone", "adamw"))
    total, counts = found[0]
    # Of rank 1's share the main process finds the bytes that differ, in blocks; with half of all it shares no more.
    assert counts[0] > total / 2
    assert found[2][1][0] < total / 2


def trained_apart(folder: str) -> list[int]:
    here = process.start(cpu=True)
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        small_units(patch)
        for value in (1, 2):
            watch = Watch(patch)
            state.save(folder, contents_of("adamw", here.rank, value + 10 * here.rank), here)
            counts.append(watch.bytes)
            here.barrier()
    return counts


def test_ranks_that_train_apart_share_once_and_never_again(tmp_path, monkeypatch):
    first, second = run_ranks(trained_apart, 2, str(tmp_path / "ck"))
    size = sum((tmp_path / "ck" / name).stat().st_size for name in ("model.safetensors", "optimizer.bin"))
    assert first == [size, 0]
    assert 0 < second[0] < 0.6 * size
    assert second[1] == 0
    assert filecmp.cmp(alone(tmp_path / "alone", "adamw") / "optimizer.bin", tmp_path / "ck" / "optimizer.bin", False)


def other_optimizer(folder: str) -> int:
    """Rank 1 has no state in its optimizer, so that its file would look different."""
    here = process.start(cpu=True)
    with pytest.MonkeyPatch.context() as patch:
        small_units(patch)
        watch = Watch(patch)
        contents = contents_of("adamw", here.rank, 2)
        if here.rank == 1:
            contents.optimizers[0].state.clear()
        state.save(folder, contents, here)
    here.barrier()
    return watch.bytes


def test_a_rank_with_other_tensors_takes_no_share(tmp_path):
    _, second = run_ranks(other_optimizer, 2, str(tmp_path / "ck"))
    assert second == 0
    folder, expected = tmp_path / "ck", alone(tmp_path / "alone", "adamw")
    store.verify(folder, checksums=True)
    assert filecmp.cmp(folder / "optimizer.bin", expected / "optimizer.bin", False)
    assert filecmp.cmp(folder / "model.safetensors", expected / "model.safetensors", False)


class Refusing(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        if process.start(cpu=True).rank == 1:
            raise RuntimeError("only the main process has it")
        return super().state_dict()


def with_refusing(folder: str) -> int:
    here = process.start(cpu=True)
    with pytest.MonkeyPatch.context() as patch:
        small_units(patch)
        watch = Watch(patch)
        model = nn.Linear(500, 400)
        state.save(folder, Contents([model], [Refusing(model.parameters(), lr=0.1)]), here)
    return watch.bytes


def test_an_optimizer_that_has_its_state_on_the_main_process_only(tmp_path):
    first, second = run_ranks(with_refusing, 2, str(tmp_path / "ck"))
    assert first > 0
    assert second > 0, "the model is shared all the same"
    store.verify(tmp_path / "ck", checksums=True)


def late(folder: str, when: float) -> list[str]:
    here = process.start(cpu=True)
    with pytest.MonkeyPatch.context() as patch:
        small_units(patch)
        patch.setattr(meeting, "PATIENCE", 0.5)
        patch.setattr(meeting, "SHORT_PATIENCE", 0.1)
        if here.rank == 2:
            time.sleep(when)
        state.save(folder, contents_of("adamw", here.rank, 2), here)
    here.barrier()
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("when", [0.3, 2.0])
def test_a_late_rank(tmp_path, when):
    files = run_ranks(late, 3, str(tmp_path / "ck"), when)
    check(tmp_path / "ck", alone(tmp_path / "alone", "adamw"))
    assert files[0] == files[2]
    assert "random_states_2.pkl" in files[0]


def on_other_disks(folder: str) -> list[str]:
    from dataclasses import replace

    from hasten.checkpoint import roles

    here = process.start(cpu=True)
    machine = here.rank // 2
    local = replace(here, local_rank=here.rank % 2, local_size=2)
    where = Path(folder, f"machine-{machine}")
    where.mkdir(exist_ok=True)
    os.chdir(where)
    with pytest.MonkeyPatch.context() as patch:
        small_units(patch)
        patch.setattr(roles, "_sees", lambda path: path.is_dir() and f"machine-{machine}" in str(path))
        state.save("ck", contents_of("adamw", here.rank, 2), local, save_on_each_node=True)
    store.verify("ck", checksums=True)
    return sorted(os.listdir("ck"))


def test_each_machine_has_all_on_its_own_disk(tmp_path):
    run_ranks(on_other_disks, 4, str(tmp_path))
    expected = alone(tmp_path / "alone", "adamw")
    for machine in (0, 1):
        folder = tmp_path / f"machine-{machine}" / "ck"
        assert filecmp.cmp(folder / "optimizer.bin", expected / "optimizer.bin", False)
    check(tmp_path / "machine-0" / "ck", expected)


def hooked(folder: str) -> None:
    """A hook takes the model over, on the main process alone."""
    here = process.start(cpu=True)

    def hook(models: Any, weights: list[Any], output: str) -> None:
        if here.is_main:
            weights.clear()

    with pytest.MonkeyPatch.context() as patch:
        small_units(patch)
        state.save(folder, contents_of("adamw", here.rank, 2), here, hooks=[hook])


def test_a_hook_on_the_main_process(tmp_path):
    run_ranks(hooked, 2, str(tmp_path / "ck"))
    store.verify(tmp_path / "ck", checksums=True)
    assert "model.safetensors" not in os.listdir(tmp_path / "ck")
    expected = alone(tmp_path / "alone", "adamw")
    assert filecmp.cmp(tmp_path / "ck" / "optimizer.bin", expected / "optimizer.bin", False)


def killed(folder: str, victim: int, after: int, blocking: bool) -> None:
    """Rank `victim` is killed when it has written that many pieces of its share."""
    here = process.start(cpu=True)
    small_units(pytest.MonkeyPatch())
    write, count = shares._write_all, Counter[str]()

    def writing(file: Any, view: memoryview) -> None:
        count["pieces"] += 1
        if count["pieces"] > after:
            write(file, view[: len(view) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write(file, view)

    if here.rank == victim:
        shares._write_all = writing
    found = state.save(folder, contents_of("adamw", here.rank, 2), here, blocking=blocking)
    if not blocking:
        found.result(20)  # type: ignore[union-attr]


@pytest.mark.parametrize(("victim", "after", "blocking"), [(1, 0, True), (1, 5, True), (0, 3, True), (1, 3, False)])
def test_one_rank_is_killed_in_the_middle_of_its_share(tmp_path, victim, after, blocking):
    folder = tmp_path / "ck"
    state.save(folder, contents_of("adamw", 0, 1), ALONE)
    with pytest.raises(RankError, match="the process died: signal 9"):
        run_ranks(killed, 2, str(folder), victim, after, blocking, fresh=True)
    store.verify(folder, checksums=True)
    found = contents_of("new", 0, 5)
    assert state.load(folder, found, ALONE) == {"step": 1}
    assert same(
        found.optimizers[0].state_dict()["state"], contents_of("adamw", 0, 1).optimizers[0].state_dict()["state"]
    )
    state.save(folder, contents_of("adamw", 0, 2), ALONE)
    check(folder, alone(tmp_path / "alone", "adamw"))
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def full_disk(folder: str, victim: int) -> str:
    here = process.start(cpu=True)
    state.save(folder, contents_of("new", 0, 1), here)

    def full(file: Any, view: memoryview) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        small_units(patch)
        if here.rank == victim:
            patch.setattr(shares, "_write_all", full)
        try:
            state.save(folder, contents_of("adamw", here.rank, 2), here)
        except (OSError, RuntimeError) as error:
            found = f"{type(error).__name__}: {error}"
    here.barrier()
    return found


@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk(tmp_path, victim):
    found = run_ranks(full_disk, 2, str(tmp_path / "ck"), victim)
    assert found[victim] == "OSError: [Errno 28] No space left on device"
    assert f"rank {victim} failed with OSError" in found[1 - victim]
    assert state.load(tmp_path / "ck", contents_of("new", 0, 5), ALONE) == {"step": 1}
    assert os.listdir(tmp_path) == ["ck"]


def changed_meanwhile(folder: str) -> str:
    """Another thread changes a tensor that is being saved."""
    here = process.start(cpu=True)
    with pytest.MonkeyPatch.context() as patch:
        small_units(patch)
        contents = contents_of("adamw", here.rank, 2)
        complete = shares.MainShare.complete

        def changing(self: Any, reports: Any) -> Any:
            with torch.no_grad():
                for tensor in tensors(contents):
                    tensor.fill_(9)
            for report in reports.values():
                report["shares"] = []
            return complete(self, reports)

        patch.setattr(shares.MainShare, "complete", changing)
        try:
            state.save(folder, contents, here)
        except RuntimeError as error:
            return str(error)
    return ""


def test_tensors_that_change_while_they_are_saved(tmp_path):
    for text in run_ranks(changed_meanwhile, 2, str(tmp_path / "ck")):
        assert "tensors have changed while they were saved" in text
    assert os.listdir(tmp_path) == []


def save_twice(base: str) -> int:
    """Two ranks save, and save the same folder again, which is recorded."""
    here = process.start(cpu=True)
    root = Path(base, "recorded")
    recorder = Recorder(root, Path(base, "log"))
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in (
            (shares, "UNIT", 512),
            (shares, "LEAST", 1),
            (shares, "LARGE", 64),
            (image, "LARGE", 64),
        ):
            patch.setattr(module, name, value)
        state.save(root / "ck", make(1), here)
        here.barrier()
        if here.is_main:
            put(tree_of(root), Path(base, "before"))
            recorder.begin()
        here.barrier()
        watch = Watch(patch)
        with recorder.recording():
            state.save(root / "ck", make(2), here)
            here.barrier()
    return watch.bytes


def test_the_power_goes(tmp_path):
    (tmp_path / "recorded").mkdir()
    assert min(run_ranks(save_twice, 2, str(tmp_path), fresh=True, timeout=60)) > 512
    whole = {1: counting(tmp_path / "before" / "ck"), 2: counting(tmp_path / "recorded" / "ck")}
    assert whole[1] != whole[2]

    def found(root: Path) -> int:
        there = counting(root / "ck")
        return next(value for value, files in whole.items() if files == there)

    trace = Recorder(tmp_path / "recorded", tmp_path / "log").trace()
    lines, count = broken(trace, found, 1, 2, tmp_path, 2)
    assert not lines, "\n".join(lines)
    assert count > 20, count
    # A file is synced by each rank that writes to it: without all of these syncs it breaks.
    syncs = trace.syncs()
    for name in ("model.safetensors", "optimizer.bin"):
        numbers = {number for number, path in syncs.items() if path.endswith(f"TEMPORARY/{name}")}
        assert numbers
        assert broken(trace.without(numbers), found, 1, 2, tmp_path, 1)[0]

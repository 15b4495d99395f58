"""Saves that go on while training does: what they write is what was there when they began."""

import dataclasses
import os
import pickle
import subprocess
import sys
import threading
from collections import ChainMap, OrderedDict
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hasten import Accelerator, FullyShardedDataParallelPlugin, ProjectConfiguration
from hasten.checkpoint import state
from hasten.checkpoint.background import Saving
from hasten.checkpoint.staging import Staging
from tests.parallel.test_units import Language
from tests.ranks import run_ranks

TOKENS = torch.arange(12).view(4, 3) % 10


def built(form: str) -> tuple[Accelerator, Any, Any]:
    plugin = None
    if form != "whole":
        kind = "FULL_STATE_DICT" if form == "full" else "SHARDED_STATE_DICT"
        plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"], state_dict_type=kind)
    one = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = Language(tied=True)
    model, optimizer = one.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    return one, model, optimizer


def step(one: Accelerator, model: Any, optimizer: Any) -> float:
    torch.rand(1)
    loss = model((TOKENS + one.process_index) % 10).square().mean()
    one.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@contextmanager
def held() -> Any:
    """Writing begins when the event is set."""
    event, original = threading.Event(), state._write

    def write(*args: Any) -> None:
        assert event.wait(60)
        original(*args)

    state._write = write
    try:
        yield event
    finally:
        event.set()
        state._write = original


def resumed(form: str, folder: str) -> tuple[list[float], list[float], float, float]:
    one, model, optimizer = built(form)
    options = {"use_dcp": False} if form == "ranks" else {}
    step(one, model, optimizer)
    with held() as event:
        saving = one.save_state(folder, blocking=False, **options)
        assert not saving.done()
        first = [step(one, model, optimizer) for _ in range(3)]
        draw = float(torch.rand(1))
        assert not saving.done()
        event.set()
        assert saving.result(60) == Path(folder)
    assert saving.done()
    one.load_state(folder)
    again = [step(one, model, optimizer) for _ in range(3)]
    return first, again, draw, float(torch.rand(1))


@pytest.mark.parametrize(
    ("form", "ranks"), [("whole", 2), ("sharded", 2), ("sharded", 3), ("full", 2), ("ranks", 2), ("whole", 3)]
)
def test_what_is_written_is_what_was_there(form: str, ranks: int, tmp_path: Path) -> None:
    for first, again, draw, later in run_ranks(resumed, ranks, form, str(tmp_path / "ck"), timeout=120):
        assert first == again
        assert draw == later


def test_one_process(tmp_path: Path) -> None:
    first, again, draw, later = resumed("whole", str(tmp_path / "ck"))
    assert (first, draw) == (again, later)


def same_files(form: str, folder: str) -> bool:
    one, model, optimizer = built(form)
    options = {"use_dcp": False} if form == "ranks" else {}
    step(one, model, optimizer)
    one.save_state(f"{folder}/a", **options)
    one.save_state(f"{folder}/b", blocking=False, **options).result(60)
    one.wait_for_everyone()
    names = [
        path.relative_to(f"{folder}/a")
        for path in Path(f"{folder}/a").rglob("*")
        if path.suffix in (".bin", ".safetensors")
    ]
    return bool(names) and all(
        (Path(folder) / "a" / name).read_bytes() == (Path(folder) / "b" / name).read_bytes() for name in names
    )


@pytest.mark.parametrize("form", ["whole", "full"])
def test_the_files_are_those_of_a_save_that_blocks(form: str, tmp_path: Path) -> None:
    assert run_ranks(same_files, 2, form, str(tmp_path)) == [True, True]


def failing(folder: str) -> dict[str, str]:
    one, model, optimizer = built("whole")
    found = {}

    def refuse(*_: Any) -> None:
        assert event.wait(60)  # until the others have joined
        raise OSError(28, "No space left on device")

    def save(name: str) -> Saving:
        event.clear()
        saving = one.save_state(f"{folder}/{name}", blocking=False)
        one.wait_for_everyone()
        event.set()
        return saving

    event = threading.Event()

    original, state._write = state._write, refuse if one.is_main_process else state._write
    try:
        saving = save("a")
        for call in ("result", "result again"):
            with pytest.raises((OSError, RuntimeError)) as caught:
                saving.result(60)
            found[call] = str(caught.value)
        step(one, model, optimizer)
        save("b")  # whoever was told is not told again
        with pytest.raises((OSError, RuntimeError)) as caught:
            one.save_state(f"{folder}/c")
        found["next"] = str(caught.value)
        save("d")
        with pytest.raises((OSError, RuntimeError)) as caught:
            one.load_state(f"{folder}/a")
        found["load"] = str(caught.value)
    finally:
        state._write = original
    one.save_state(f"{folder}/e", blocking=False).result(60)
    found["left"] = " ".join(sorted(os.listdir(folder)))
    return found


@pytest.mark.filterwarnings("ignore")
def test_a_failure_is_told_once_by_whoever_asks_first(tmp_path: Path) -> None:
    first, second = run_ranks(failing, 2, str(tmp_path))
    for call in ("result", "result again", "next", "load"):
        assert first[call] == "[Errno 28] No space left on device"
        assert "was not saved: rank 0 failed with OSError: [Errno 28] No space left on device" in second[call]
    assert first["left"] == "e"


def test_numbers_and_the_limit(tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    one = Accelerator(cpu=True, project_config=project)
    model = one.prepare(nn.Linear(2, 2))
    paths = [one.save_state(blocking=False).path for _ in range(4)]  # each waits for the one before
    assert one.save_state() == tmp_path / "checkpoints" / "checkpoint_4"
    assert [path.name for path in paths] == [f"checkpoint_{number}" for number in range(4)]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_3", "checkpoint_4"]
    assert model is not None


SCRIPT = """
import sys, torch, hasten
from hasten.checkpoint import state
one = hasten.Accelerator(cpu=True)
model = one.prepare(torch.nn.Linear(300, 300))
original = state._write
def slow(*args):
    import time
    time.sleep(1)
    if sys.argv[2] == "fails":
        raise OSError("the disk is full")
    original(*args)
state._write = slow
saving = one.save_state(sys.argv[1], blocking=False)
if sys.argv[2] == "dies":
    import os
    os._exit(3)
if sys.argv[2] == "ends":
    one.end_training()
print("left")
"""


@pytest.mark.parametrize("way", ["exits", "ends", "dies", "fails"])
def test_the_end_of_the_process(way: str, tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    done = subprocess.run([sys.executable, "-c", SCRIPT, folder, way], capture_output=True, text=True, timeout=100)
    assert folder.exists() == (way in ("exits", "ends"))
    assert ("left" in done.stdout) == (way != "dies")
    assert ("failed: the disk is full" in done.stderr) == (way == "fails")
    if way in ("exits", "ends"):
        one = Accelerator(cpu=True)
        one.prepare(nn.Linear(300, 300))
        one.load_state(folder)


def test_waiting_has_a_limit() -> None:
    event = threading.Event()
    saving = Saving(Path("x"), lambda: event.wait(60))
    assert repr(saving) == "Saving('x', under way)"
    with pytest.raises(TimeoutError, match=r"x has not been saved within 0\.01 s; the save goes on"):
        saving.result(0.01)
    event.set()
    assert saving.result(60) == Path("x")
    assert repr(saving) == "Saving('x', done)"


def test_an_accelerator_is_copied_while_a_save_is_under_way(tmp_path: Path) -> None:
    one = Accelerator(cpu=True)
    one.prepare(nn.Linear(2, 2))
    with held():
        saving = one.save_state(tmp_path / "ck", blocking=False)
        other = pickle.loads(pickle.dumps(one))
    assert other._session.saving is None
    assert saving.result(60) == tmp_path / "ck"


# ---- copies ----


def test_copies_share_what_the_originals_share() -> None:
    base = torch.arange(12.0).view(3, 4)
    part, turned = base[1], base.t()
    original = {"a": [base, (part, 1)], "b": {"turned": turned, "same": base}, "c": None}
    copied = Staging().copied(original)
    base.zero_()
    assert copied["a"][0] is copied["b"]["same"]
    assert torch.equal(copied["a"][0], torch.arange(12.0).view(3, 4))
    assert torch.equal(copied["b"]["turned"], copied["a"][0].t())
    copied["a"][0].fill_(7)
    assert bool((copied["a"][1][0] == 7).all())
    assert copied["c"] is None


class Chosen(dict[str, Any]):
    """A dictionary of another class."""


@dataclasses.dataclass
class Stats:
    loss: Any


def odd_states() -> dict[str, Any]:
    shared, loop = [1, torch.ones(2)], []
    loop.append(loop)
    weight = nn.Parameter(torch.ones(2))
    loss = (weight * 2).sum()
    ordered = OrderedDict(a=torch.ones(2))
    ordered._metadata = OrderedDict(version=3)  # type: ignore[attr-defined]
    return {
        "parameter": weight,
        "trained": torch.ones(2, requires_grad=True),
        "class": Chosen(a=1),
        "same list": {"a": shared, "b": shared},
        "loop": loop,
        "not a leaf": Stats(loss),
        "meta": torch.empty(2, device="meta"),
        "sparse": torch.ones(2, 2).to_sparse(),
        "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "empty": torch.empty(0),
        "number": torch.tensor(3),
        "ordered": ordered,
        "chain": ChainMap({"a": 1}, {"b": 2}),
        "set": {1, 2},
        "tuple": (1, (2.0, "x")),
    }


class Holder:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


KINDS = "parameter,trained,class,same list,loop,not a leaf,meta,sparse,conjugate,quantized,empty,number,ordered,chain,set,tuple"


@pytest.mark.filterwarnings("ignore")  # of torch, on quantized tensors
@pytest.mark.parametrize("kind", KINDS.split(","))
def test_what_the_user_registers_is_saved_as_by_a_save_that_blocks(kind: str, tmp_path: Path) -> None:
    contents = []
    for blocking in (True, False):
        one = Accelerator(cpu=True)
        one.register_for_checkpointing(Holder(odd_states()[kind]))
        folder = tmp_path / str(blocking)
        saved = one.save_state(folder, blocking=blocking)
        if not blocking:
            saved.result(60)
        contents.append((folder / "custom_checkpoint_0.pkl").read_bytes())
    assert contents[0] == contents[1]
    state = torch.load(folder / "custom_checkpoint_0.pkl", weights_only=False)
    if kind == "same list":
        assert state["a"] is state["b"]

"""Copies on a stream of their own: in the right order, of the right batches, and only where there are streams."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hasten import Accelerator, DataLoaderConfiguration
from hasten.data.loader import prepare_data_loader
from hasten.data.side_stream import SideStream, has_streams
from tests.data.scenarios import Numbers
from tests.data.test_dispatch import dispatched
from tests.ranks import run_ranks

NPU = "npu:0"
Pair = namedtuple("Pair", "first second")


@dataclass
class Record:
    number: torch.Tensor
    text: str


class Encoding(UserDict):  # type: ignore[type-arg]
    """As transformers' BatchEncoding: a mapping that moves itself, in place."""

    def to(self, device: Any, non_blocking: bool = False) -> "Encoding":
        self.data = {key: value.to(device, non_blocking=non_blocking) for key, value in self.data.items()}
        return self


class Opaque:
    """Nobody sees its tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def to(self, device: Any) -> "Opaque":
        return Opaque(self.tensor.to(device))


def nested(samples: list[int]) -> Any:
    numbers = torch.tensor(samples)
    return {"x": numbers, "pair": Pair(Record(numbers * 2, "text"), [Encoding(y=numbers * 3), None])}


def log_of_streams() -> tuple[list[str], Any]:
    """Install a simulated accelerator whose streams note what happens on them; returns their log."""
    from tests.simulated_device import install

    install("npu")
    log: list[str] = []

    class Current:
        def wait_event(self, event: Any) -> None:
            log.append(f"loop waits for {event}")

    class Side:
        copies = 0

        def __init__(self, device: Any) -> None:
            assert str(device) == NPU
            log.append("stream")

        def __enter__(self) -> None:
            log.append("copy")

        def __exit__(self, *_: Any) -> None:
            pass

        def record_event(self) -> str:
            Side.copies += 1
            return f"copy {Side.copies}"

        def wait_stream(self, stream: Any) -> None:
            log.append(f"copies wait for {type(stream).__name__}")

    current = Current()
    torch.Stream = Side  # type: ignore[misc,assignment]
    torch.accelerator.current_stream = lambda device=None: current  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda self, stream: log.append(  # type: ignore[method-assign,assignment]
        f"{'loop' if stream is current else 'side'} keeps {self.tolist()}"
    )
    return log, current


def moved(collate: Any, move_ahead: bool = True, size: int = 6) -> Any:
    loader = DataLoader(Numbers(size), batch_size=2, collate_fn=collate)
    return prepare_data_loader(loader, torch.device(NPU), put_on_device=True, move_ahead=move_ahead)


def in_order() -> list[str]:
    log, _ = log_of_streams()
    for batch in moved(torch.tensor):
        log.append(f"body {batch.tolist()} on {batch.device}")
    return log


def test_a_copy_is_started_before_the_body_and_waited_for_after_it() -> None:
    (log,) = run_ranks(in_order, 1, fresh=True)
    assert log == [
        "stream",
        "copy",
        "copy",
        "loop waits for copy 1",
        "loop keeps [0, 1]",
        "body [0, 1] on npu:0",
        "copy",
        "loop waits for copy 2",
        "loop keeps [2, 3]",
        "body [2, 3] on npu:0",
        "loop waits for copy 3",
        "loop keeps [4, 5]",
        "body [4, 5] on npu:0",
    ]


def of_every_kind() -> dict[str, Any]:
    log, _ = log_of_streams()
    found: dict[str, Any] = {}
    for name, collate in (("nested", nested), ("opaque", lambda samples: (Opaque(torch.tensor(samples)), 1))):
        log.clear()
        (batch,) = moved(collate, size=2)
        places = (
            [batch["x"], batch["pair"].first.number, batch["pair"].second[0]["y"]]
            if name == "nested"
            else [batch[0].tensor]
        )
        kinds = [type(batch["pair"].first), type(batch["pair"].second[0])] if name == "nested" else []
        found[name] = ([str(each.device) for each in places], [kind.__name__ for kind in kinds], list(log))
    log.clear()
    list(moved(lambda samples: torch.tensor(samples).to(NPU), size=2))
    found["there"] = list(log)
    log.clear()
    list(moved(torch.tensor, move_ahead=False))
    found["off"] = list(log)
    log.clear()
    side = SideStream(torch.device(NPU))
    mixed = side.start({"there": torch.tensor([1]).to(NPU), "here": torch.tensor([2])})
    side.hand_out(mixed)
    found["mixed"] = list(log)
    return found


def test_every_tensor_that_is_moved_is_kept_and_what_hides_tensors_is_not_copied_ahead() -> None:
    (found,) = run_ranks(of_every_kind, 1, fresh=True)
    kept = [f"loop keeps {values}" for values in ([0, 1], [0, 2], [0, 3])]
    assert found["nested"] == (
        ["npu:0"] * 3,
        ["Record", "Encoding"],
        ["stream", "copy", "loop waits for copy 1", *kept],
    )
    assert found["opaque"] == (["npu:0"], [], ["stream"])
    assert found["there"] == ["stream"]
    assert found["off"] == []
    assert found["mixed"] == [
        "stream",
        "copies wait for Current",
        "copy",
        "side keeps [1]",
        "loop waits for copy 2",
        "loop keeps [1]",
        "loop keeps [2]",
    ]


def on_simulated_streams() -> list[Any]:
    """With the streams that torch itself gives a backend."""
    from tests.simulated_device import install

    memory = install("npu")[0]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]
    peaks, seen = [], []
    for ahead in (False, True):
        memory.reset_peak()
        for batch in moved(lambda samples: {"x": torch.tensor(samples), "s": "text"}, move_ahead=ahead):
            seen.append((str(batch["x"].device), batch["x"].tolist(), batch["s"]))
        del batch
        peaks.append(memory.peak)
    return [seen, peaks]


def test_the_same_batches_arrive_with_no_more_memory() -> None:
    ((seen, peaks),) = run_ranks(on_simulated_streams, 1, fresh=True)
    wanted = [("npu:0", [first, first + 1], "text") for first in (0, 2, 4)]
    assert seen == wanted * 2
    assert peaks[0] == peaks[1] > 0


def test_without_streams_nothing_changes() -> None:
    assert not has_streams(torch.device("cpu"))
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(move_ahead=True))
    loader = accelerator.prepare(DataLoader(Numbers(5), batch_size=2))
    assert loader.move_ahead
    assert accelerator.skip_first_batches(loader, 1).move_ahead
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


def dispatched_ahead() -> list[Any]:
    loader = dispatched(DataLoader(Numbers(6), batch_size=2), move_ahead=True)
    return [batch.tolist() for batch in loader]


def test_dispatched_batches() -> None:
    assert run_ranks(dispatched_ahead, 2) == [[[0, 1], [4]], [[2, 3], [5]]]


@pytest.mark.gpu
def test_on_an_accelerator() -> None:
    device = torch.device(torch.accelerator.current_accelerator(), 0)  # type: ignore[arg-type]
    data = torch.utils.data.TensorDataset(torch.arange(40_000.0).view(40, 1000))

    def sums(**settings: Any) -> list[float]:
        loader = DataLoader(data, batch_size=4, pin_memory=True)
        work = torch.eye(1000, device=device)
        found = []
        for (batch,) in prepare_data_loader(loader, device, put_on_device=True, **settings):
            for _ in range(20):  # the device is behind the host, so that a copy that nobody waited for would be seen
                work = work @ torch.eye(1000, device=device)
            found.append((batch @ work).sum())
            del batch  # its memory may be used for a copy that is ahead
        return [each.item() for each in found]

    assert sums(move_ahead=True) == sums()

import _thread
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hasten.data import read_ahead
from hasten.data.read_ahead import ReadAhead

LIMIT = 20.0


class Source:
    """Numbers; notes what is read and where, and waits before one of them until it is let go."""

    def __init__(self, size: int = 5, stops_before: int | None = None, error: BaseException | None = None) -> None:
        self.size = size
        self.stops_before = stops_before
        self.error = error
        self.read: list[int] = []
        self.threads: set[str] = set()
        self.waits, self.goes_on = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[int]:
        for number in range(self.size):
            if number == self.stops_before:
                self.waits.set()
                assert self.goes_on.wait(LIMIT)
            self.threads.add(threading.current_thread().name)
            self.read.append(number)
            yield number
        if self.error is not None:
            raise self.error


def is_reading() -> bool:
    return any(thread.name == "hasten-read-ahead" for thread in threading.enumerate())


def test_everything_is_read_in_order_in_another_thread():
    source, seen = Source(), []
    for number in ReadAhead(iter(source)):
        assert len(source.read) <= len(seen) + 2  # this one, and one ahead
        seen.append(number)
    assert seen == source.read == [0, 1, 2, 3, 4]
    assert source.threads == {"hasten-read-ahead"}
    assert not is_reading()


def test_the_next_item_is_read_while_this_one_is_used():
    source = Source(stops_before=2)
    reader = ReadAhead(iter(source))
    assert next(reader) == 0
    assert next(reader) == 1
    assert source.waits.wait(LIMIT)  # nobody has asked for item 2
    source.goes_on.set()
    assert list(reader) == [2, 3, 4]


def test_errors_come_in_the_place_of_the_item():
    reader = ReadAhead(iter(Source(2, error=KeyError("page 3"))))
    assert [next(reader), next(reader)] == [0, 1]
    with pytest.raises(KeyError, match="page 3"):
        next(reader)
    assert list(reader) == []
    assert not is_reading()


def test_closing_waits_for_the_item_that_is_being_read_and_reads_no_more():
    source = Source(stops_before=1)
    reader = ReadAhead(iter(source))
    assert next(reader) == 0
    assert source.waits.wait(LIMIT)
    threading.Timer(0.05, source.goes_on.set).start()
    reader.close()
    reader.close()
    assert source.read == [0, 1]
    assert not is_reading()
    assert list(reader) == []


@pytest.mark.parametrize("inference", [False, True])
def test_torch_has_the_modes_of_the_loop(inference: bool):
    def modes() -> Iterator[Any]:
        while True:
            yield torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    reader = ReadAhead(modes())
    assert next(reader) == (True, False)
    with torch.inference_mode(inference), torch.no_grad():
        next(reader)
        assert next(reader) == (False, inference)
    reader.close()


def test_a_reader_that_takes_too_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(read_ahead, "_GLANCE_S", 0.01)
    source = Source(stops_before=0)
    reader = ReadAhead(iter(source), limit_s=0.02)
    with pytest.raises(TimeoutError, match=r"longer than 0\.02 s.*`timeout`"):
        next(reader)
    reader.close()  # does not wait once more
    source.goes_on.set()
    reader._thread.join(LIMIT)


def test_a_reader_that_does_not_come_to_an_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(read_ahead, "_GLANCE_S", 0.01)
    source = Source(stops_before=0)
    reader = ReadAhead(iter(source), limit_s=0.02)
    with pytest.warns(UserWarning, match="still being read"):
        reader.close()
    source.goes_on.set()
    reader._thread.join(LIMIT)
    assert source.read == [0]


@pytest.mark.usefixtures("hears_signals")
def test_ctrl_c_while_waiting_is_raised_at_once():
    goes_on = threading.Event()

    def interrupted() -> Iterator[int]:
        _thread.interrupt_main()
        assert goes_on.wait(LIMIT)
        yield 0

    reader = ReadAhead(interrupted())
    with pytest.raises(KeyboardInterrupt):
        next(reader)
    reader.close()
    goes_on.set()
    reader._thread.join(LIMIT)
    assert not is_reading()


SCRIPT = """
import threading
from hasten.data import read_ahead
read_ahead._AT_EXIT_S = 0.1
def hangs():
    yield 0
    threading.Event().wait()
reader = read_ahead.ReadAhead(hangs())
print(next(reader))
"""


def test_a_process_ends_although_its_reader_hangs():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")

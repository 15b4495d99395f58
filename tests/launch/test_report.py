import signal

from hasten.launch.report import KEPT_BYTES, SHOWN_LINES, Failure, Tail, describe, in_words, last_traceback, shell_code

CHAIN = """some output
Traceback (most recent call last):
  File "a.py", line 1, in <module>
ValueError: handled long ago
more output
Traceback (most recent call last):
  File "a.py", line 4, in <module>
ZeroDivisionError: division by zero

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "a.py", line 5, in <module>
RuntimeError: boom
"""


def test_codes_in_words():
    assert in_words(3) == "exit code 3"
    assert in_words(-signal.SIGSEGV) == "signal SIGSEGV"
    assert in_words(-9).startswith("signal SIGKILL (perhaps")
    assert in_words(-250) == "signal 250"
    assert [shell_code(code) for code in (0, 3, -9, -15)] == [0, 3, 137, 143]


def test_the_last_traceback_has_its_chain_and_nothing_before():
    shown = last_traceback(CHAIN)
    assert shown[0] == "Traceback (most recent call last):"
    assert shown[2] == "ZeroDivisionError: division by zero"
    assert shown[-1] == "RuntimeError: boom"
    assert "handled" not in "\n".join(shown)


def test_a_traceback_with_a_prefix_is_found():
    shown = last_traceback(
        "progress 10%\rprogress 20%\r\n[rank1]: Traceback (most recent call last):\n[rank1]: KeyError: 1\n"
    )
    assert shown == ["[rank1]: Traceback (most recent call last):", "[rank1]: KeyError: 1"]


def test_a_crash_is_found():
    text = CHAIN + "Fatal Python error: Segmentation fault\n\nCurrent thread (most recent call first):\n  File 'b.py'\n"
    assert last_traceback(text)[0] == "Fatal Python error: Segmentation fault"


def test_without_a_traceback_the_last_lines():
    assert last_traceback("a\n\nb\n") == ["a", "b"]
    assert last_traceback("".join(f"{i}\n" for i in range(100)))[-1] == "99"
    assert last_traceback("") == []


def test_a_long_traceback_keeps_its_ends():
    text = "Traceback (most recent call last):\n" + "".join(f"  {i}\n" for i in range(500)) + "RecursionError\n"
    shown = last_traceback(text)
    assert len(shown) == SHOWN_LINES
    assert shown[0].startswith("Traceback")
    assert "..." in shown
    assert shown[-1] == "RecursionError"


def test_a_tail_keeps_the_end_and_notes_a_traceback_over_a_seam():
    tail = Tail()
    tail.feed(b"x" * 2 * KEPT_BYTES)
    assert len(tail.text()) == KEPT_BYTES
    assert tail.traced_at is None
    tail.feed(b"\nTraceback (most rec")
    assert tail.traced_at is None
    tail.feed(b"ent call last):\nKeyError\n")
    assert tail.traced_at is not None
    assert tail.text().endswith("KeyError\n")


def test_the_report():
    first = Failure(1, 77, 3, CHAIN)
    text = describe(first, [Failure(0, 76, -6, "")], 4)
    assert text.startswith("hasten: rank 1 of 4 failed with exit code 3 (on ")
    assert "pid 77); the job was stopped." in text
    assert "rank 0 (signal SIGABRT)" in text
    assert text.endswith("  RuntimeError: boom")
    assert "wrote nothing to stderr" in describe(Failure(0, 1, 1, ""), [], 2)
    assert describe(Failure(None, 1, 1, None), [], 1).startswith("hasten: the process failed with exit code 1")


def test_bytes_that_are_no_text_do_not_hide_the_rest():
    tail = Tail()
    tail.feed(b"\xff\xfe ok\n")
    assert last_traceback(tail.text())[0].endswith("ok")

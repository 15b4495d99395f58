import os
import socket
import time

from hasten.checkpoint import leftovers

DEAD = 2**22 + 1  # larger than any process number


def make(place, name, age=0.0):
    (place / name).mkdir(parents=True)
    (place / name / "file").write_text("x")
    then = time.time() - age
    for path in (place / name / "file", place / name):
        os.utime(path, (then, then))
    return place / name


def name(target="ck", host=None, pid=DEAD):
    host = leftovers._host() if host is None else host
    return f".{target}.partial-{host}.{pid}.0123abcd"


def test_names_say_who_writes(tmp_path):
    found = leftovers._NAME.fullmatch(leftovers.temporary_name(tmp_path / "my.ck"))
    assert found["target"] == "my.ck"
    assert found["pid"] == str(os.getpid())
    assert leftovers.temporary_name(tmp_path) != leftovers.temporary_name(tmp_path)
    assert len(leftovers.temporary_name(tmp_path / ("x" * 250))) < 250


def test_host_names_do_not_confuse(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node-1.example.org")
    assert leftovers._host() == "node-1-example-org"


def test_what_a_dead_process_left_is_removed(tmp_path):
    target = tmp_path / "ck"
    left = [make(tmp_path, name()), make(target, name()), make(tmp_path, name("other"))]
    leftovers.remove_leftovers(target)
    assert not any(path.exists() for path in left)
    assert target.exists()


def test_what_somebody_may_be_writing_stays(tmp_path):
    target = tmp_path / "ck"
    kept = [
        make(tmp_path, name(pid=os.getpid())),
        make(tmp_path, name(pid=os.getppid())),
        make(tmp_path, name(host="elsewhere")),
        make(tmp_path, name("other", host="elsewhere"), age=1e6),
        make(tmp_path, ".ck.partial-mine"),
        make(tmp_path, "ck.partial-x.1.0123abcd"),
    ]
    leftovers.remove_leftovers(target)
    assert all(path.exists() for path in kept)


def test_what_nobody_has_touched_for_long_is_removed(tmp_path):
    target = tmp_path / "ck"
    left = [make(tmp_path, name(host="elsewhere"), age=4000), make(tmp_path, name(pid=os.getppid()), age=4000)]
    leftovers.remove_leftovers(target)
    assert not any(path.exists() for path in left)


def test_a_parent_that_can_not_be_listed_is_no_error(tmp_path):
    leftovers.remove_leftovers(tmp_path / "not" / "there")

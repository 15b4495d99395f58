import json
from pathlib import Path
from typing import Any

import pytest

from hasten.cli import selfcheck
from hasten.cli.selfcheck import BEGUN, CHECKS, FAILED, OK, SKIPPED, Job, diary, expect, read_diary, state_of
from tests.ranks import run_ranks


def run_all(folder: str, shared: str | None) -> dict[str, tuple[str, str]]:
    """State and text of every check on this rank."""
    with Job(Path(folder), None if shared is None else Path(shared)) as job:
        for check in CHECKS:
            selfcheck._run(job, check)
    entries = read_diary(Path(folder), job.place.rank)
    return {entry["check"]: (entry["state"], entry["text"]) for entry in entries if "text" in entry}


def run_inexactly(folder: str) -> str:
    selfcheck._TOLERANCES, kept = {"no": -1.0}, selfcheck._TOLERANCES
    try:
        with Job(Path(folder), None) as job:
            assert selfcheck._run(job, CHECKS[3]) == FAILED
    finally:
        selfcheck._TOLERANCES = kept
    return str(read_diary(Path(folder), job.place.rank)[-1]["text"])


def test_every_check_on_two_ranks(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    for states in run_ranks(run_all, 2, str(tmp_path), str(shared)):
        assert states == {
            "processes": (OK, "2 met, gloo"),
            "collectives": (OK, "gather, reduce, broadcast, pad, objects"),
            "data": (OK, "19 samples, each once per epoch"),
            "training (DDP)": (OK, "as a plain loop, to 1e-05"),
            "training (FSDP)": (OK, "as a plain loop, to 1e-05"),
            "checkpoint": (OK, "saved, loaded, and gone on alike"),
        }
    assert list(shared.iterdir()) == []


def test_weights_that_differ_fail(tmp_path: Path) -> None:
    for text in run_ranks(run_inexactly, 2, str(tmp_path)):
        assert text.startswith("AssertionError: the weights differ by ")
        assert text.endswith("at most -1 is expected")


def test_without_a_shared_folder_checkpoints_are_skipped(tmp_path: Path) -> None:
    states = run_ranks(run_all, 2, str(tmp_path), None)[0]
    assert states["checkpoint"] == (
        SKIPPED,
        "several machines: name a folder that all of them see with --shared_folder",
    )


@pytest.mark.parametrize(("other", "come"), [(OK, True), (FAILED, True), (BEGUN, False), (None, False)])
def test_a_rank_that_failed_waits_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str | None, come: bool
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(selfcheck, "OTHERS_LIMIT", 0.3)
    with Job(tmp_path, None) as job:
        job.note(check="data", state=FAILED)
        if other is not None:
            diary(tmp_path, 1).write_text(json.dumps({"check": "data", "state": other}) + "\n")
        assert job.others_come("data") is come


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    entries: list[dict[str, Any]] = [{"check": "a", "state": BEGUN}, {"check": "a", "state": OK}]
    diary(tmp_path, 0).write_text("\n".join(map(json.dumps, entries)) + '\n{"check": "b", "st')
    assert read_diary(tmp_path, 0) == entries
    assert state_of(entries, "a") == OK
    assert state_of(entries, "b") is None
    assert read_diary(tmp_path, 1) == []


def test_what_was_expected_is_told() -> None:
    expect("sum", 3, 3)
    with pytest.raises(AssertionError, match="sum: got 4, the right answer is 3"):
        expect("sum", 4, 3)

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from hasten.cli.main import main
from hasten.cli.to_fsdp2 import convert_config_to_fsdp2, load_config
from hasten.settings import files

OLD = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: no
num_machines: 1:4
note: 'no'
my_key: [1, x]
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_offload_params: yes
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
  fsdp_activation_checkpointing_offload: false
  fsdp_weird: 007
"""
NEW = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: no
num_machines: 1:4
note: 'no'
my_key:
- 1
- x
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: yes
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_activation_checkpointing_offload: false
  fsdp_weird: 007
  fsdp_version: 2
"""


def convert(**section: Any) -> dict[str, Any]:
    return convert_config_to_fsdp2({"a": 1, "fsdp_config": section})["fsdp_config"]


def test_a_file_keeps_everything_but_the_words_of_version_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(OLD)
    assert main(["to-fsdp2", "--config_file", str(old), "--output-file", str(new)]) == 0
    assert new.read_text() == NEW
    assert old.read_text() == OLD
    out, err = capsys.readouterr()
    assert out == f"hasten to-fsdp2: {new} is written\n"
    for key in ("backward_prefetch", "sync_module_states", "use_orig_params"):
        assert f"fsdp_{key} has no meaning in version 2 and is left out." in err
    assert "fsdp_forward_prefetch has no counterpart of its form in version 2 and is left out." in err


def test_hasten_launch_reads_the_converted_file(tmp_path: Path) -> None:
    old = tmp_path / "old.yaml"
    old.write_text(
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n  fsdp_use_orig_params: true\n"
    )
    assert main(["to-fsdp2", "--config_file", str(old), "--overwrite"]) == 0
    values = files.load(str(old)).values
    assert values["fsdp_version"] == 2
    assert values["fsdp_reshard_after_forward"] is False
    assert "fsdp_use_orig_params" not in values


def test_json(tmp_path: Path) -> None:
    config = {"distributed_type": "FSDP", "x": [1, None], "fsdp_config": {"fsdp_sharding_strategy": 2, "fsdp_k": "no"}}
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(config))
    assert main(["to-fsdp2", "--config_file", str(old), "--output_file", str(new)]) == 0
    section = {"fsdp_reshard_after_forward": False, "fsdp_k": "no", "fsdp_version": 2}
    assert json.loads(new.read_text()) == {**config, "fsdp_config": section}
    as_yaml = tmp_path / "new.yaml"
    assert main(["to-fsdp2", "--config_file", str(old), "--output_file", str(as_yaml)]) == 0
    assert yaml.safe_load(as_yaml.read_text()) == {**config, "fsdp_config": section}
    old_yaml = tmp_path / "old.yaml"
    old_yaml.write_text(OLD)
    assert main(["to-fsdp2", "--config_file", str(old_yaml), "--output_file", str(new), "--overwrite"]) == 0
    found = json.loads(new.read_text())
    assert found["mixed_precision"] == "no"
    assert found["num_machines"] == "1:4"
    assert found["fsdp_config"]["fsdp_activation_checkpointing_offload"] is False
    assert found["my_key"] == [1, "x"]


@pytest.mark.parametrize(
    ("strategy", "reshards"),
    [("FULL_SHARD", True), ("SHARD_GRAD_OP", False), ("NO_SHARD", False), ("HYBRID_SHARD", True),
     ("HYBRID_SHARD_ZERO2", False), ("hybrid_shard", True), (1, True), ("2", False), (4, True), (5, False)],
)  # fmt: skip
@pytest.mark.parametrize("key", ["fsdp_sharding_strategy", "sharding_strategy", "fsdp_reshard_after_forward"])
def test_strategies_become_truth_values(
    strategy: Any, reshards: bool, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(**{key: strategy}) == {"fsdp_reshard_after_forward": reshards, "fsdp_version": 2}
    lost = "version 2 has no word for it here" in capsys.readouterr().err
    assert lost == (str(strategy).upper() in ("NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "4", "5"))


def test_a_state_dict_type_that_version_2_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(fsdp_state_dict_type="LOCAL_STATE_DICT")["fsdp_state_dict_type"] == "SHARDED_STATE_DICT"
    assert "does not exist in version 2" in capsys.readouterr().err


def test_empty_values_stay_empty(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("a:\nb: ~\nfsdp_config:\n  fsdp_sharding_strategy:\n  fsdp_min_num_params: null\n")
    assert main(["to-fsdp2", "--config_file", str(path), "--overwrite"]) == 0
    section = "  fsdp_reshard_after_forward:\n  fsdp_min_num_params: null\n  fsdp_version: 2\n"
    assert path.read_text() == f"a:\nb: ~\nfsdp_config:\n{section}"


@pytest.mark.parametrize(
    "config",
    [
        {"a": 1},
        {"fsdp_config": {}},
        {"fsdp_config": None},
        {"fsdp_config": {"fsdp_version": 2, "fsdp_use_orig_params": True}},
    ],
)
def test_what_needs_no_conversion_stays(config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert convert_config_to_fsdp2(config) == config
    assert "nothing" in capsys.readouterr().err


def test_the_given_dictionary_stays_as_it_is() -> None:
    config = {"fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_version": 1}}
    assert convert_config_to_fsdp2(config) == {"fsdp_config": {"fsdp_reshard_after_forward": True, "fsdp_version": 2}}
    assert config["fsdp_config"]["fsdp_version"] == 1


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"fsdp_sharding_strategy": "FULL_SHART"}, "did you mean 'FULL_SHARD'"),
        ({"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": False}, "two keys set fsdp_reshard"),
    ],
)
def test_what_cannot_be_converted(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert(**section)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (OLD, [], "Give --output_file PATH, or --overwrite to replace"),
        (OLD, ["--output_file", "there.yaml"], "there.yaml exists already"),
        ("", ["--overwrite"], "is empty"),
        ("a: [", ["--overwrite"], "is not valid"),
        ("- 1", ["--overwrite"], "must hold keys and values"),
        ("fsdp_config: {fsdp_sharding_strategy: foo}", ["--overwrite"], "must be one of FULL_SHARD"),
        (OLD, ["--output_file", "missing/x.yaml"], "No such file"),
        (None, ["--overwrite"], "does not exist"),
    ],
)
def test_an_error_is_told_and_leaves_the_old_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str | None,
    options: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("there.yaml").write_text("mine")
    if text is not None:
        Path("c.yaml").write_text(text)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert main(["to-fsdp2", "--config_file", "c.yaml", *options]) == 1
    assert message in capsys.readouterr().err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_a_failure_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "old.yaml"
    old.write_text(OLD)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["to-fsdp2", "--config_file", str(old), "--overwrite"]) == 1
    assert old.read_text() == OLD
    assert os.listdir(tmp_path) == ["old.yaml"]


@pytest.mark.skipif(os.name != "posix", reason="file modes and links are POSIX's")
def test_links_and_modes_stay(tmp_path: Path) -> None:
    old, link = tmp_path / "old.yaml", tmp_path / "link.yaml"
    old.write_text(OLD)
    old.chmod(0o600)
    link.symlink_to(old)
    assert main(["to-fsdp2", "--config_file", str(link), "--overwrite"]) == 0
    assert link.is_symlink()
    assert old.read_text() == NEW
    assert stat.S_IMODE(old.stat().st_mode) == 0o600


def test_loading(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("a: no\nb: 'no'\nc: {d: 1:4}\n")
    assert load_config(str(path)) == {"a": "no", "b": "no", "c": {"d": "1:4"}}

import subprocess
import sys
from pathlib import Path

import pytest

import hasten
from hasten.launch.tree import MARK
from hasten.settings import schema
from hasten.settings.enums import DynamoBackend, PrecisionType
from hasten.settings.schema import BY_NAME, ELASTIC, LAUNCHER, TABLE, WORKER
from hasten.settings.unbuilt import flag_area, key_areas
from hasten.settings.values import convert, write


def test_nothing_is_declared_twice():
    for attribute in ("name", "env"):
        declared = [getattr(row, attribute) for row in TABLE if getattr(row, attribute)]
        assert len(declared) == len(set(declared)), attribute
    flags = [flag for row in TABLE for flag in row.flags]
    assert len(flags) == len(set(flags))
    keys = [key for row in TABLE for key in (row.key, *row.old_keys) if key]
    assert len(keys) == len(set(keys))


def test_every_row_is_complete():
    for row in TABLE:
        assert row.help, row.name
        assert not row.help.endswith("."), row.name
        assert row.flags or row.env, row.name
        assert row.applies in (WORKER, LAUNCHER, ELASTIC)
        assert bool(row.choices) == (row.kind == "choice") or row.kind == "amount", row.name
        assert {choice for _, choice in row.old_values} <= set(row.choices), row.name
        assert not row.needs or BY_NAME[row.needs].kind == "bool", row.name
        assert all(other in BY_NAME for other in row.excludes)
        assert all(flag.startswith("--") or len(flag) == 2 for flag in row.flags)
        assert not row.always or row.default is not None


def test_a_default_is_a_legal_value():
    for row in TABLE:
        if row.default not in (None, ()):
            assert convert(row, write(row, row.default)) == row.default, row.name


def test_a_setting_of_the_workers_can_reach_them():
    assert all(row.env for row in TABLE if row.applies == WORKER)


def test_what_is_built_is_not_listed_as_unbuilt():
    for row in TABLE:
        assert not any(flag_area(flag) for flag in row.flags), row.name
        assert row.key.partition(".")[0] not in key_areas()


def test_choices_come_from_the_enums():
    assert BY_NAME["mixed_precision"].choices == tuple(PrecisionType.list())
    assert BY_NAME["dynamo_backend"].choices == tuple(DynamoBackend.list())
    assert "NEURON" in BY_NAME["dynamo_backend"].choices


def test_the_core_of_the_environment_contract_is_there():
    # sections "core" and "dynamo" of the reference's environment variables
    core = "USE_CPU TORCH_DEVICE MIXED_PRECISION GRADIENT_ACCUMULATION_STEPS DEBUG_MODE BYPASS_DEVICE_MAP "
    core += "DYNAMO_BACKEND DYNAMO_MODE DYNAMO_USE_FULLGRAPH DYNAMO_USE_DYNAMIC DYNAMO_USE_REGIONAL_COMPILATION"
    expected = {f"ACCELERATE_{name}" for name in core.split()} | {"FORK_LAUNCHED"}
    assert expected <= {row.env for row in TABLE}


def test_every_row_has_a_reader():
    package = Path(hasten.__file__).parent
    sources = "".join(
        path.read_text(encoding="utf-8") for path in package.rglob("*.py") if path != Path(schema.__file__)
    )
    unread = {row.name for row in TABLE if f'"{row.name}"' not in sources}
    # Read through the name of its variable; parts of a setting that is refused as a whole until it is built; and fields of the
    # plugin, which reads its rows by one rule (tests/settings/test_sharding.py).
    read_by_the_plugin = {row.name for row in TABLE if row.needs == "use_fsdp"}
    assert unread - read_by_the_plugin == {
        "launch_id",
        *(row.name for row in TABLE if row.name.startswith("dynamo_") and row.name != "dynamo_backend"),
    }


def test_the_mark_of_a_launch_is_a_row():
    assert BY_NAME["launch_id"].env == MARK


@pytest.mark.parametrize("module", ["hasten.settings.environment", "hasten.settings.export", "hasten.settings.resolve"])
def test_the_settings_import_nothing_heavy(module):
    code = f"import sys; import {module}; print(*(set(sys.modules) & set(sys.argv[1:])))"
    heavy = ["torch", "numpy", "yaml", "argparse", "dataclasses", "inspect", "subprocess", "socket", "json", "difflib"]
    found = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []

import importlib
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hasten import Accelerator, shadow
from hasten.collectives import gather as gather_module
from hasten.shadow.modules import AliasFinder, AliasModule
from hasten.shadow.table import MODULES, ROOT, VERSION

FAKE = "raise SystemExit('the other accelerate was imported')\n"
COMPAT = Path(__file__).parents[2] / "compat" / "src" / "accelerate" / "__init__.py"


@pytest.fixture
def installed() -> Iterator[Any]:
    shadow.install()
    try:
        yield importlib.import_module(ROOT)
    finally:
        shadow.uninstall()


# ---- the table ----


@pytest.mark.parametrize("module", MODULES)
def test_every_name_resolves(installed: Any, module: str):
    alias = importlib.import_module(module)
    assert isinstance(alias, AliasModule)
    for name, home in MODULES[module].items():
        home_module, _, attribute = home.partition(":")
        value = getattr(alias, name)
        assert value is getattr(importlib.import_module(home_module), attribute or name)
        assert name in dir(alias)
    assert set(alias.__all__) == {name for name in MODULES[module] if not name.startswith("_")}


def test_the_root_says_which_release_it_understands(installed: Any):
    assert installed.__version__ == VERSION
    assert VERSION.startswith("1.15.0")
    assert installed.Accelerator is Accelerator


def test_submodules_are_attributes_and_can_be_imported_in_every_form(installed: Any):
    import accelerate.utils.operations as operations  # type: ignore[import-not-found]
    from accelerate.state import PartialState  # type: ignore[import-not-found]

    assert installed.utils.operations is operations
    assert installed.state.PartialState is PartialState
    names: dict[str, Any] = {}
    exec("from accelerate.utils import *", names)
    assert names["set_seed"] is installed.utils.set_seed


def test_unknown_names_say_whose_fault_it_may_be(installed: Any):
    with pytest.raises(
        AttributeError,
        match=r"module 'accelerate' \(by hasten\) has no attribute 'missing'. If Hugging Face accelerate 1.15.0",
    ):
        installed.missing  # noqa: B018
    with pytest.raises(ImportError, match="missing"):
        exec("from accelerate.utils import missing", {})
    with pytest.raises(ModuleNotFoundError, match=r"accelerate\.missing"):
        importlib.import_module("accelerate.missing")


# ---- replacing functions at run time ----


def test_a_replacement_is_seen_by_every_alias_and_by_hasten_itself(installed: Any, monkeypatch: pytest.MonkeyPatch):
    def replaced(tensor: Any, **_: Any) -> str:
        return "replaced"

    original = gather_module.gather
    monkeypatch.setattr(installed.utils.operations, "gather", replaced)
    assert installed.utils.gather is installed.utils.operations.gather is gather_module.gather is replaced
    assert Accelerator(cpu=True).gather(torch.ones(1)) == "replaced"
    monkeypatch.undo()
    assert installed.utils.gather is gather_module.gather is original


def test_mocks_come_and_go(installed: Any):
    original = gather_module.gather
    for target in ("accelerate.utils.gather", "accelerate.utils.operations.gather"):
        with mock.patch(target, return_value=3):
            assert gather_module.gather() == 3  # type: ignore[call-arg]
            with mock.patch("accelerate.utils.gather", return_value=4):
                assert installed.utils.operations.gather() == 4
            assert installed.utils.operations.gather() == 3
        assert gather_module.gather is installed.utils.gather is original


def test_what_was_not_replaced_cannot_be_deleted(installed: Any):
    with pytest.raises(
        AttributeError, match=r"accelerate.utils.gather belongs to hasten and cannot be deleted, only replaced"
    ):
        del installed.utils.gather


def test_new_names_stay_on_the_alias(installed: Any):
    installed.mine = 3
    assert installed.mine == 3
    del installed.mine
    assert not hasattr(installed, "mine")


def test_objects_pickle_by_their_home(installed: Any):
    plugin = installed.utils.GradientAccumulationPlugin(num_steps=3)
    assert b"accelerate." not in pickle.dumps(plugin)
    assert pickle.loads(pickle.dumps(plugin)) == plugin


# ---- installing ----


def test_installing_twice_is_installing_once_and_uninstalling_undoes_it():
    shadow.install()
    shadow.install()
    assert sum(isinstance(finder, AliasFinder) for finder in sys.meta_path) == 1
    importlib.import_module("accelerate.utils")
    shadow.uninstall()
    shadow.uninstall()
    assert not any(name.partition(".")[0] == ROOT for name in sys.modules)
    assert not any(isinstance(finder, AliasFinder) for finder in sys.meta_path)


def test_it_is_too_late_when_the_other_one_is_there(monkeypatch: pytest.MonkeyPatch):
    other = type(sys)(ROOT)
    other.__file__ = "/elsewhere/accelerate/__init__.py"
    monkeypatch.setitem(sys.modules, ROOT, other)
    with pytest.raises(
        RuntimeError,
        match=r"accelerate was already imported from /elsewhere/accelerate/__init__.py; call hasten.shadow.install",
    ):
        shadow.install()
    assert not any(isinstance(finder, AliasFinder) for finder in sys.meta_path)


# ---- scripts ----

SCRIPT = """
import sys
import accelerate, helper
from accelerate.utils import set_seed
print(accelerate.Accelerator.__module__, __name__, sys.argv[0] == __file__ or sys.argv[0], sys.argv[1:], helper.VALUE)
"""


def run(folder: Path, *arguments: str, file: str = "script.py") -> subprocess.CompletedProcess[str]:
    """Run in a folder in which another package `accelerate` lies, and on whose path it is first."""
    (folder / "accelerate").mkdir(parents=True, exist_ok=True)
    (folder / "accelerate" / "__init__.py").write_text(FAKE)
    (folder / file).write_text(SCRIPT)
    (folder / "helper.py").write_text("VALUE = 7\n")
    command = [sys.executable, "-W", "error", "-m", "hasten.shadow", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_a_script_meets_hasten_although_another_accelerate_is_on_its_path(tmp_path: Path):
    done = run(tmp_path, "script.py", "--its", "own")
    assert (done.stdout, done.stderr, done.returncode) == (
        "hasten.accelerator __main__ True ['--its', 'own'] 7\n",
        "",
        0,
    )


def test_a_script_elsewhere_finds_its_own_helpers(tmp_path: Path):
    there = tmp_path / "there"
    there.mkdir()
    (there / "helper.py").write_text("VALUE = 8\n")
    (there / "script.py").write_text(SCRIPT)
    done = run(tmp_path, "there/script.py")
    assert done.stdout.endswith("[] 8\n"), done.stderr


def test_a_module_too(tmp_path: Path):
    done = run(tmp_path, "-m", "script", "x")
    assert (done.stdout, done.returncode) == ("hasten.accelerator __main__ True ['x'] 7\n", 0), done.stderr


def test_the_exit_code_is_the_scripts(tmp_path: Path):
    done = run(tmp_path, "failing.py")
    assert done.returncode == 2
    (tmp_path / "failing.py").write_text("import sys; sys.exit(5)")
    assert run(tmp_path, "failing.py").returncode == 5


@pytest.mark.parametrize(("arguments", "code"), [((), 2), (("-m",), 2), (("--help",), 0)])
def test_usage(tmp_path: Path, arguments: tuple[str, ...], code: int):
    done = run(tmp_path, *arguments)
    assert done.returncode == code
    assert "usage: python -m hasten.shadow script.py [arguments ...]" in done.stdout


def test_a_script_that_is_not_there_is_named(tmp_path: Path):
    done = run(tmp_path, "absent.py")
    assert done.returncode == 2
    assert f"there is no script 'absent.py' in {tmp_path.resolve()}" in done.stderr


USE = """
import accelerate, accelerate.utils
from accelerate.state import PartialState
from hasten.shadow.table import VERSION
assert accelerate.__version__ == VERSION
assert accelerate.__file__.endswith("__init__.py") and len(accelerate.__path__) == 1
import sys
sys.modules["accelerate"] is accelerate or sys.exit("not the alias")
print(accelerate.Accelerator(cpu=True).device, accelerate.utils.set_seed.__module__)
"""


def test_the_drop_in_package_becomes_the_alias(tmp_path: Path):
    package = tmp_path / "accelerate"
    package.mkdir()
    (package / "__init__.py").write_text(COMPAT.read_text())
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", USE], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("cpu hasten.world.rng\n", "")

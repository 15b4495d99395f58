import logging
import pickle
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import safetensors.torch
import torch

from hasten.checkpoint import state
from hasten.checkpoint.manifest import MANIFEST
from hasten.checkpoint.state import Contents, load, save
from hasten.world.process import World
from tests.checkpoint.objects import Counter, Loader, Tied, make, same, values
from tests.world.test_rng import draws

ALONE = World()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("safe", [True, False])
def test_everything_comes_back_to_the_bit(tmp_path, safe):
    contents = make(4)
    assert save(tmp_path / "ck", contents, ALONE, safe_serialization=safe) == tmp_path / "ck"
    expected, next_draws = values(contents), draws()
    restored = make(5)
    assert not same(values(restored), expected)
    assert load(tmp_path / "ck", restored, ALONE) == {"step": 4}
    assert draws() == next_draws
    assert same(values(restored), expected)
    assert restored.models[0].head.weight is restored.models[0].embedding.weight


def test_the_file_names_are_those_of_the_reference(tmp_path):
    save(tmp_path / "ck", make(1), ALONE)
    shared = {
        "optimizer.bin",
        "optimizer_1.bin",
        "scheduler.bin",
        "scheduler_1.bin",
        "scaler.pt",
        "random_states_0.pkl",
    }
    own = {MANIFEST, "dl_state_dict.bin"}
    custom = {"custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl"}
    assert names(tmp_path / "ck") == shared | own | custom | {"model.safetensors", "model_1.safetensors"}
    save(tmp_path / "ck", make(1), ALONE, safe_serialization=False)
    assert names(tmp_path / "ck") == shared | own | custom | {"pytorch_model.bin", "pytorch_model_1.bin"}


def test_a_new_optimizer_gets_its_state(tmp_path):
    save(tmp_path / "ck", make(1), ALONE)
    fresh = make(2)
    for optimizer in fresh.optimizers:
        optimizer.state.clear()
    load(tmp_path / "ck", fresh, ALONE)
    assert same(values(fresh), values(make(1)))


def test_restored_state_keeps_its_memory(tmp_path):
    contents = make(1)
    save(tmp_path / "ck", contents, ALONE)
    before = [entry["exp_avg"].data_ptr() for entry in contents.optimizers[0].state.values()]
    load(tmp_path / "ck", contents, ALONE)
    assert [entry["exp_avg"].data_ptr() for entry in contents.optimizers[0].state.values()] == before


def test_saving_again_leaves_nothing_of_the_old_checkpoint_but_keeps_other_files(tmp_path):
    folder = tmp_path / "ck"
    save(folder, make(1), ALONE, safe_serialization=False)
    (folder / "logs").mkdir()
    (folder / "logs" / "run.txt").write_text("mine")
    (folder / "random_states_7.pkl").write_text("of a rank that is no more")
    smaller = replace(make(2), custom=[], models=make(2).models[:1])
    save(folder, smaller, ALONE)
    assert (folder / "logs" / "run.txt").read_text() == "mine"
    assert not {"pytorch_model.bin", "custom_checkpoint_0.pkl", "random_states_7.pkl", "model_1.safetensors"} & names(
        folder
    )
    load(folder, smaller, ALONE)


def test_a_folder_without_manifest_loads_and_is_replaced(tmp_path):
    folder = tmp_path / "ck"
    save(folder, make(1), ALONE, safe_serialization=False)
    (folder / MANIFEST).unlink()
    contents = make(2)
    load(folder, contents, ALONE)
    assert same(values(contents), values(make(1)))
    save(folder, make(3), ALONE)
    assert "pytorch_model.bin" not in names(folder)


def test_the_current_folder_can_be_saved_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("x")
    for value in (1, 2):
        save(".", make(value), ALONE)
    contents = make(3)
    load(".", contents, ALONE)
    assert same(values(contents), values(make(2)))
    assert Path("mine").exists()
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_folders_above_are_made_and_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert save("~/a/b/ck", Contents(), ALONE) == tmp_path / "a/b/ck"
    assert load("~/a/b/ck", Contents(), ALONE) == {"step": 0}


def test_hooks_may_write_and_take_over(tmp_path):
    contents, seen = make(1), []

    def saving(models, weights, folder):
        assert isinstance(folder, str)
        seen.append((len(models), sorted(weights[1])))
        Path(folder, "part").mkdir()
        Path(folder, "part", "own.txt").write_text("mine")
        weights.clear()

    def loading(models, folder):
        seen.append(Path(folder, "part", "own.txt").read_text())
        models.clear()

    save(tmp_path / "ck", contents, ALONE, hooks=[saving])
    assert "model.safetensors" not in names(tmp_path / "ck")
    load(tmp_path / "ck", contents, ALONE, hooks=[loading])
    assert seen == [(2, ["bias", "weight"]), "mine"]
    assert len(contents.models) == 2


def test_the_state_of_a_model_may_come_from_elsewhere(tmp_path):
    save(tmp_path / "ck", Contents([torch.nn.Linear(2, 2)]), ALONE, model_state=lambda model: {"x": torch.ones(1)})
    assert list(safetensors.torch.load_file(tmp_path / "ck" / "model.safetensors")) == ["x"]


def test_arguments_for_loading_models(tmp_path):
    save(tmp_path / "ck", Contents([torch.nn.Linear(2, 2)]), ALONE)
    bigger = torch.nn.Linear(2, 2)
    bigger.register_buffer("more", torch.zeros(1))
    with pytest.raises(RuntimeError, match="not in the file: more"):
        load(tmp_path / "ck", Contents([bigger]), ALONE)
    load(tmp_path / "ck", Contents([bigger]), ALONE, strict=False)
    with pytest.raises(TypeError, match="foo"):
        load(tmp_path / "ck", Contents([torch.nn.Linear(2, 2)]), ALONE, foo=1)


@pytest.mark.parametrize("location", [None, "cpu", "on_device"])
def test_map_locations(tmp_path, location):
    save(tmp_path / "ck", make(1), ALONE)
    contents = make(2)
    load(tmp_path / "ck", contents, ALONE, map_location=location)
    assert same(values(contents), values(make(1)))


def test_an_unknown_map_location(tmp_path):
    save(tmp_path / "ck", Contents(), ALONE)
    with pytest.raises(TypeError, match="choose one of `None`, `'cpu'`, or `'on_device'`; it was 'gpu'"):
        load(tmp_path / "ck", Contents(), ALONE, map_location="gpu")


def test_an_optimizer_with_other_types_in_its_state(tmp_path):
    import enum

    global Mode  # it must be found by pickle

    class Mode(enum.Enum):
        SLOW = 1

    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"mode": Mode.SLOW, "scale": numpy.float64(2.5)}
    save(tmp_path / "ck", Contents(optimizers=[optimizer]), ALONE)
    again = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(pickle.UnpicklingError, match=r"optimizer\.bin holds objects of .*Mode.*'weights_only': False"):
        load(tmp_path / "ck", Contents(optimizers=[again]), ALONE)
    load(tmp_path / "ck", Contents(optimizers=[again]), ALONE, load_kwargs={"weights_only": False})
    assert next(iter(again.state.values())) == {"mode": Mode.SLOW, "scale": 2.5}


def test_numpy_scalars_in_an_optimizer_are_plain_data(tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=numpy.float64(0.25))
    save(tmp_path / "ck", Contents(optimizers=[optimizer]), ALONE)
    load(tmp_path / "ck", Contents(optimizers=[optimizer]), ALONE)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"Tried to find .*nope but folder does not exist"):
        load(tmp_path / "nope", Contents(), ALONE)
    save(tmp_path / "ck", Contents([Tied()]), ALONE)
    with pytest.raises(
        FileNotFoundError, match=r"There is no model_1\.safetensors nor pytorch_model_1\.bin .*Linear.*same order"
    ):
        load(tmp_path / "ck", Contents([Tied(), torch.nn.Linear(1, 1)]), ALONE)
    contents = make(1)
    with pytest.raises(FileNotFoundError, match=r"There is no optimizer\.bin.*AdamW"):
        load(tmp_path / "ck", Contents([Tied()], contents.optimizers), ALONE)
    with pytest.raises(FileNotFoundError, match=r"There is no scheduler\.bin.*StepLR"):
        load(tmp_path / "ck", Contents(schedulers=contents.schedulers), ALONE)
    with pytest.raises(FileNotFoundError, match=r"There is no scaler\.pt.*GradScaler"):
        load(tmp_path / "ck", Contents(scaler=contents.scaler), ALONE)


def test_the_number_of_custom_objects_must_agree(tmp_path):
    save(tmp_path / "ck", Contents(custom=[Counter(1)]), ALONE)
    model = torch.nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(RuntimeError, match=r"(?s)does not match.*Found checkpoints: 1.*Registered objects: 2"):
        load(tmp_path / "ck", Contents([model], custom=[Counter(), Counter()]), ALONE)
    assert torch.equal(model.weight, before)


def test_damage_is_found_before_anything_is_loaded(tmp_path):
    contents = make(1)
    save(tmp_path / "ck", contents, ALONE)
    (tmp_path / "ck" / "optimizer_1.bin").write_bytes(b"short")
    changed = make(2)
    with pytest.raises(
        RuntimeError, match=r"ck is damaged: optimizer_1\.bin has 5 bytes instead of \d+\. Load another one"
    ):
        load(tmp_path / "ck", changed, ALONE)
    assert same(values(changed), values(make(2)))


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    from hasten.weights.stream import Stream

    save(tmp_path / "ck", make(1), ALONE)
    before = names(tmp_path / "ck")

    def full(self, view):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Stream, "_write_all", full)
        with pytest.raises(OSError, match="No space left on device"):
            save(tmp_path / "ck", make(2), ALONE)
        with pytest.raises(OSError, match="No space left on device"):
            save(tmp_path / "new", make(2), ALONE)
    assert names(tmp_path) == {"ck"}
    assert names(tmp_path / "ck") == before
    contents = make(3)
    load(tmp_path / "ck", contents, ALONE)
    assert same(values(contents), values(make(1)))


def test_an_error_in_a_state_dict_keeps_the_old_checkpoint(tmp_path):
    save(tmp_path / "ck", make(1), ALONE)

    class Broken(Counter):
        def state_dict(self):
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        save(tmp_path / "ck", replace(make(2), custom=[Broken()]), ALONE)
    contents = make(3)
    load(tmp_path / "ck", contents, ALONE)
    assert same(values(contents), values(make(1)))


def test_a_model_state_that_safetensors_can_not_hold(tmp_path):
    with pytest.raises(TypeError, match=r"'extra' \(int\)"):
        save(tmp_path / "ck", Contents([Tied()]), ALONE, model_state=lambda model: {"extra": 3})
    assert names(tmp_path) == set()


def test_the_pair_without_a_transaction(tmp_path):
    contents = make(1)
    arguments = (contents.optimizers, contents.schedulers, contents.dataloaders)
    weights = [model.state_dict() for model in contents.models]
    folder = state.save_accelerator_state(str(tmp_path), weights, *arguments, 0, 7, contents.scaler)
    for index, item in enumerate(contents.custom):
        state.save_custom_state(item, tmp_path, index)
    assert folder == tmp_path
    expected = draws()
    restored = make(2)
    arguments = (restored.optimizers, restored.schedulers, restored.dataloaders)
    found = state.load_accelerator_state(str(tmp_path), restored.models, *arguments, 0, restored.scaler)
    assert found == {"step": 7}
    assert draws() == expected
    for index, item in enumerate(restored.custom):
        state.load_custom_state(item, tmp_path, index)
    assert same(values(restored), values(contents))
    with pytest.raises(TypeError, match="Unsupported optimizer map location"):
        state.load_accelerator_state(str(tmp_path), [], [], [], [], 0, map_location="x")


def test_loader_positions_that_are_not_there_are_told(tmp_path, caplog):
    save(tmp_path / "ck", Contents(dataloaders=[Loader(1)]), ALONE)
    loaders = [Loader(), Loader(), object()]
    with caplog.at_level(logging.WARNING):
        load(tmp_path / "ck", Contents(dataloaders=loaders), ALONE)
    assert loaders[0].position == 1
    assert "holds no position of data loader 1: its epoch, its order" in caplog.text


def test_names_of_state_files():
    for name in (
        "model.safetensors",
        "pytorch_model_3.bin",
        "optimizer_12.bin",
        "dl_state_dict_1_rank3.bin",
        "random_states_0.pkl",
    ):
        assert state.is_state_file(name)
    for name in (
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "trainer_state.json",
        "my_optimizer.bin",
    ):
        assert not state.is_state_file(name)


def test_what_is_not_loaded_is_told(tmp_path, caplog):
    contents = make(1)
    save(tmp_path / "ck", contents, ALONE)
    fewer = replace(contents, optimizers=contents.optimizers[:1], schedulers=[])
    with caplog.at_level(logging.WARNING):
        load(tmp_path / "ck", fewer, ALONE)
    assert "optimizer_1.bin is not loaded: there are only 1 such objects now." in caplog.text
    assert "scheduler" not in caplog.text


def test_an_optimizer_that_does_not_fit_is_named(tmp_path):
    world = World()
    model = torch.nn.Linear(2, 2)
    state.save(tmp_path / "ck", Contents([model], [torch.optim.SGD(model.parameters(), 0.1)]), world)
    other = torch.optim.SGD([model.weight], 0.1)
    with pytest.raises(ValueError, match=r"optimizer\.bin does not fit optimizer number 0, a SGD: .*same order"):
        state.load(tmp_path / "ck", Contents([model], [other]), world)

import logging

import pytest

from hasten.checkpoint import positions
from hasten.checkpoint.manifest import MANIFEST
from hasten.weights.write import FolderWriter
from tests.checkpoint.objects import Loader


def write(folder, loaders, rank=0):
    with FolderWriter(folder) as writer:
        positions.write(writer, positions.states(loaders), rank)


def test_names():
    assert [positions.file_name(0), positions.file_name(2), positions.file_name(0, 3), positions.file_name(1, 2)] == [
        "dl_state_dict.bin",
        "dl_state_dict_2.bin",
        "dl_state_dict_rank3.bin",
        "dl_state_dict_1_rank2.bin",
    ]


def test_ranks_that_agree_share_a_file(tmp_path):
    write(tmp_path, [Loader(1), Loader(2)])
    write(tmp_path, [Loader(1), Loader(3)], rank=1)
    write(tmp_path, [Loader(4), Loader(2)], rank=2)
    positions.drop_repeated(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "dl_state_dict.bin",
        "dl_state_dict_1.bin",
        "dl_state_dict_1_rank1.bin",
        "dl_state_dict_rank2.bin",
    ]
    for rank, expected in enumerate([[1, 2], [1, 3], [4, 2], [1, 2]]):
        loaders = [Loader(), Loader()]
        positions.read(tmp_path, loaders, rank)
        assert [loader.position for loader in loaders] == expected


def test_a_state_of_another_kind_of_loader(tmp_path, caplog):
    class Foreign:
        def state_dict(self):
            return {"_snapshot": 1}

    write(tmp_path, [Foreign()])
    with caplog.at_level(logging.WARNING):
        positions.read(tmp_path, [Loader()], 0)  # a checkpoint of the reference
    assert "holds no position of data loader 0" in caplog.text
    (tmp_path / MANIFEST).write_text("")
    with pytest.raises(ValueError, match="not a state of this loader"):
        positions.read(tmp_path, [Loader()], 0)


def test_loaders_without_state(tmp_path):
    write(tmp_path, [object()])
    assert list(tmp_path.iterdir()) == []
    positions.read(tmp_path, [object()], 0)

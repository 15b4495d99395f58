import pytest

from hasten.settings.project import ProjectConfiguration


def test_logs_lie_in_the_project_unless_told_otherwise():
    assert ProjectConfiguration().logging_dir is None
    assert ProjectConfiguration("here").logging_dir == "here"
    assert ProjectConfiguration("here", "there").logging_dir == "there"


def test_set_directories_keeps_a_chosen_folder_of_logs():
    config = ProjectConfiguration(logging_dir="there")
    config.set_directories("here")
    assert (config.project_dir, config.logging_dir) == ("here", "there")
    config = ProjectConfiguration()
    config.set_directories("here")
    assert (config.project_dir, config.logging_dir) == ("here", "here")


def test_everything_else_is_off_and_arguments_have_the_order_of_the_reference():
    config = ProjectConfiguration()
    assert (config.automatic_checkpoint_naming, config.total_limit, config.iteration) == (False, None, 0)
    assert not config.save_on_each_node
    config = ProjectConfiguration("a", "b", True, 2, 7, True)
    assert (config.automatic_checkpoint_naming, config.total_limit, config.iteration) == (True, 2, 7)
    assert config.save_on_each_node


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_keeps_at_least_one_checkpoint(limit: int):
    with pytest.raises(ValueError, match=rf"total_limit={limit}\): at least one checkpoint must be kept. Use None"):
        ProjectConfiguration(total_limit=limit)

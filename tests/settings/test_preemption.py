import os
import signal

import pytest

from hasten.settings.preemption import PREEMPTED, signal_names
from hasten.settings.project import ProjectConfiguration


def test_the_exit_code_is_that_of_a_temporary_failure():
    assert getattr(os, "EX_TEMPFAIL", 75) == PREEMPTED == 75


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("SIGTERM", ("SIGTERM",)),
        (["SIGTERM", "SIGUSR1", "SIGTERM"], ("SIGTERM", "SIGUSR1")),
        (signal.SIGTERM, ("SIGTERM",)),
        ((signal.SIGTERM, "SIGBREAK"), ("SIGTERM", "SIGBREAK")),
    ],
)
def test_signals_by_name(given, names):
    assert signal_names(given) == names
    assert ProjectConfiguration(save_on_signal=given).save_on_signal == names


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("SIGKILL", "SIGKILL ends a process at once, no program can handle it"),
        (("SIGTERM", "TERM"), "'TERM' is not the name of a signal, such as 'SIGTERM' or 'SIGUSR1'"),
        (15, "'15' is not the name of a signal"),
    ],
)
def test_what_is_no_signal_that_a_program_can_wait_for(given, said):
    with pytest.raises(ValueError, match=said):
        ProjectConfiguration(save_on_signal=given)


def test_none_by_default_and_by_keyword_only():
    assert ProjectConfiguration().save_on_signal == ()
    with pytest.raises(TypeError):
        ProjectConfiguration("run", None, False, None, 0, False, "SIGTERM")  # type: ignore[misc]

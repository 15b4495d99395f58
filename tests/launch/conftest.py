from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.jobs import Jobs


@pytest.fixture
def jobs(tmp_path: Path, hears_signals: None) -> Iterator[Jobs]:
    started = Jobs(tmp_path)
    yield started
    started.end_all()

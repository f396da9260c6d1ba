"""A folder of a run that looks like a real one."""

from __future__ import annotations

import pytest
from fake_run import write_fake_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "seed7"
    return folder, write_fake_run(folder)

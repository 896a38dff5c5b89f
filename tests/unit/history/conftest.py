"""A good history, of which tests damage a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scripts.fault_search.history import good_history
from scripts.fault_search.made_history import MadeRun


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[MadeRun, Path]:
    """A run, and the folder of its history; nothing changes either."""
    folder = tmp_path_factory.mktemp("good")
    return good_history(folder), folder


@pytest.fixture
def good_run(made_once: tuple[MadeRun, Path], tmp_path: Path) -> MadeRun:
    """The run of the history that is in the test's folder."""
    run, folder = made_once
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return run

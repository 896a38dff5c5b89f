"""Fixtures of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.tools.cli.commands import Commands


@pytest.fixture
def p2pavg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    """Return the command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return Commands(monkeypatch, capsys)

"""No peer of these tests comes late, so the start does not wait, unless a test changes that."""

from __future__ import annotations

import pytest

from p2pavg.optim.coordination import attendance


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attendance, "SETTLE_START_SECONDS", 0.0)

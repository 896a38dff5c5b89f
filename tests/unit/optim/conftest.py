"""No peer of these tests comes late: nothing is to be waited for at the start, unless a test says so."""

from __future__ import annotations

import pytest

from p2pavg.optim import attendance


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attendance, "SETTLE_SECONDS", 0.0)

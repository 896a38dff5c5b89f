"""Patience for the tests of lanes: on a busy machine, a dial on loopback may take seconds."""

import pytest


@pytest.fixture(autouse=True)
def patient_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a dial of a lane take a minute. A test of what happens after the usual time sets it itself."""
    monkeypatch.setattr("p2pavg.net.lanes.pool.LANE_DIAL_SECONDS", 60.0)

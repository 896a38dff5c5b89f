"""Punches through two routers with the kernel's own address translation. They need root and iptables."""

import pytest

from tests.integration.punch.routers import obstacle, punches, two_homes


@pytest.fixture(autouse=True, scope="module")
def _namespaces() -> None:
    if reason := obstacle():
        pytest.skip(reason)


def test_punches_between_routers_that_keep_ports_succeed() -> None:
    with two_homes(symmetric=False) as homes:
        tally = punches(homes, 10)
    assert tally.successes == 10, tally.reports


def test_a_punch_between_symmetric_routers_ends_with_a_reason_at_both_peers() -> None:
    """Their ports cannot be predicted. A peer that knows its router refuses before; here neither does."""
    with two_homes(symmetric=True) as homes:
        ((asker, other),) = punches(homes, 1, seconds=0.5).reports
    assert asker["tries"] == 3
    assert "try 3: no connection" in asker["error"]
    assert "the peer reported: no connection" in asker["error"]
    assert other == {"tries": 3, "made": False}

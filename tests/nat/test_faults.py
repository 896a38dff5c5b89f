"""Faults in the middle of rounds of peers behind home routers. ``scripts/bench nat`` measures what they cost."""

from __future__ import annotations

import pytest

from tests.nat.lab import Kind
from tests.nat.trials import FaultOutcome, idle, move, relay_killed

pytestmark = pytest.mark.processes


def check(found: FaultOutcome) -> None:
    """Assert that no result was wrong, and that all members averaged together again."""
    assert found.wrong == []
    assert found.repaired is not None, f"{found.reasons}\n{found.log}"


def test_a_peer_changes_its_network() -> None:
    check(move((Kind.PUBLIC, Kind.CONE, Kind.CONE), rounds=4))


def test_a_relay_is_killed() -> None:
    check(relay_killed(rounds=4, elements=50_000))


def test_a_router_that_forgets_idle_connections_costs_no_round() -> None:
    assert idle(pauses=1, pause=25.0) == []

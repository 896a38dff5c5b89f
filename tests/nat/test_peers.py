"""Peers behind home routers find each other and average. ``scripts/bench nat --matrix`` tries all kinds of routers."""

from __future__ import annotations

import pytest

from tests.nat.lab import Kind
from tests.nat.trials import PairOutcome, pair

pytestmark = pytest.mark.processes


def check(found: PairOutcome) -> None:
    """Assert that two peers met as they should."""
    assert not found.problems, f"{found.problems}\n{found.reasons}\n{found.log}"


@pytest.mark.parametrize(
    ("first", "second"), [(Kind.PUBLIC, Kind.CONE), (Kind.CONE, Kind.CONE), (Kind.SYMMETRIC, Kind.SYMMETRIC)]
)
def test_two_peers_average(first: Kind, second: Kind) -> None:
    check(pair(first, second))


def test_a_peer_asks_its_router_for_a_port(port_mapping: None) -> None:
    check(pair(Kind.UPNP, Kind.SYMMETRIC))


def test_peers_of_one_router_meet_directly() -> None:
    check(pair(Kind.CONE, Kind.CONE, same_router=True))

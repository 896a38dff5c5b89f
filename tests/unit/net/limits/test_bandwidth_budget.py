"""The measurements that strangers may cause, on a clock that the test moves."""

from __future__ import annotations

from p2pavg.net.limits.rate import (
    COST_BYTES,
    MAX_AT_ONCE,
    PEER_BURST_BYTES,
    PEER_BYTES,
    PREFIX_BURST_BYTES,
    TOTAL_BURST_BYTES,
    TOTAL_BYTES,
    BandwidthBudget,
)

NOW = 500.0


def granted(budget: BandwidthBudget, now: float, askers: list[tuple[str, str]]) -> int:
    """Return the number of measurements that are granted, one after the other."""
    count = 0
    for peer_id, prefix in askers:
        if budget.begin(now, peer_id, prefix):
            budget.end()
            count += 1
    return count


def test_one_peer() -> None:
    budget = BandwidthBudget()
    asker = [("peer", "net")] * 20
    assert granted(budget, NOW, asker) == PEER_BURST_BYTES // COST_BYTES == 2
    assert granted(budget, NOW + COST_BYTES / PEER_BYTES - 1.0, asker) == 0
    assert granted(budget, NOW + COST_BYTES / PEER_BYTES, asker) == 1


def test_identities_of_one_network() -> None:
    budget = BandwidthBudget()
    askers = [(f"peer{number}", "net") for number in range(100)]
    assert granted(budget, NOW, askers) == PREFIX_BURST_BYTES // COST_BYTES == 8


def test_all_networks_together() -> None:
    budget = BandwidthBudget()
    most = TOTAL_BURST_BYTES // COST_BYTES
    askers = [(f"peer{number}", f"net{number}") for number in range(3000)]
    assert granted(budget, NOW, askers) == most == 16
    later = [(f"later{number}", f"later{number}") for number in range(3000)]
    assert granted(budget, NOW + 80.0, later) == int(80.0 * TOTAL_BYTES / COST_BYTES) == 10


def test_a_refused_measurement_costs_nothing() -> None:
    budget = BandwidthBudget()
    assert granted(budget, NOW, [("greedy", "net")] * 1000) == 2
    assert granted(budget, NOW, [(f"peer{number}", "net") for number in range(20)]) == 6


def test_measurements_at_once() -> None:
    budget = BandwidthBudget()
    begun = [budget.begin(NOW, f"peer{number}", f"net{number}") for number in range(MAX_AT_ONCE + 1)]
    assert begun == [True] * MAX_AT_ONCE + [False]
    budget.end()
    assert budget.begin(NOW, "another", "net")

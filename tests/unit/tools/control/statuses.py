"""A daemon's status for tests."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from p2pavg.tools.control.messages import DaemonStatus

STATUS = DaemonStatus(
    version="0.1.0",
    pid=4711,
    peer_id="12D3KooWpeer",
    addresses=("/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWpeer",),
    reachability="public",
    reach_kind="public",
    run_id="lab",
    roles=("auxiliary",),
    leaving=False,
    uptime=3725.0,
    peers=3,
    run_peers=2,
    rounds=17,
    failed_rounds=1,
    round_peers=("12D3KooWone", "12D3KooWtwo"),
    elements=2**40,
    bytes_sent=123_456_789,
    bytes_received=987,
    certificate_expires=1_900_000_000.0,
    training="",
    refusal="",
)


def status(**changes: Any) -> DaemonStatus:
    """Return a status with some fields changed."""
    return replace(STATUS, **changes)

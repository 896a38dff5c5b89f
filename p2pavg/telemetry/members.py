"""The peers of a run as one of them sees them. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass

from p2pavg.telemetry.status import Activity, PeerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPeer:
    """One peer of the run, by its own words. Only ``peer_id`` and ``last_seen`` are more than a claim of that peer."""

    peer_id: str
    name: str
    """Its :attr:`p2pavg.AveragingConfig.name`; empty if it has none."""
    version: str
    """Version of p2pavg."""
    role: str
    """``contributor`` or ``auxiliary``."""
    epoch: int
    """Number of updates that its parameters have taken; 0 if it trains nothing."""
    samples_per_second: float
    waiting: bool
    """True if it has computed enough, and waits for the others."""
    behind: bool
    """True if it fetches the run's state or last updates."""
    reachability: str
    """One word: ``public``, ``mapped``, ``announced``, ``punchable``, ``relayed`` or ``unknown``."""
    last_seen: float
    """Wall clock of this peer when the last word came, seconds since 1970."""
    is_self: bool = False
    """True for the peer that was asked."""


def run_peer(peer_id: str, status: PeerStatus, last_seen: float, *, is_self: bool = False) -> RunPeer:
    """Return the entry of one peer."""
    return RunPeer(
        peer_id=peer_id,
        name=status.name,
        version=status.software,
        role=status.role,
        epoch=status.epoch,
        samples_per_second=status.samples_per_second,
        waiting=status.activity is Activity.WAITING,
        behind=status.activity is Activity.FOLLOWING,
        reachability=status.reach,
        last_seen=last_seen,
        is_self=is_self,
    )

"""An averager without a network, whose events a test emits."""

from __future__ import annotations

import p2pavg
from p2pavg.net.nat.reach.reachability import Kind, Reachability
from p2pavg.telemetry.events import Direction, Progressed, RoundEnded, RoundKind, StateMoved, UpdateTaken, Way
from p2pavg.telemetry.hub import Events, OnEvent, Subscription
from p2pavg.telemetry.status import RunPeer

PEERS = tuple(f"12D3KooWpeer{number:06}" for number in range(5))


class FakeAverager:
    """The part of an averager that metrics read."""

    def __init__(self, run_id: str = "lab") -> None:
        self.config = p2pavg.AveragingConfig(run_id=run_id)
        self.peer_id = PEERS[0]
        self.excluded: set[str] = {PEERS[4]}
        self.reachability = Reachability(kind=Kind.MAPPED, sentence="mapped")
        self.events = Events()
        self.run = [member(peer_id, waiting=index == 1) for index, peer_id in enumerate(PEERS[:3])]

    def subscribe(self, callback: OnEvent) -> Subscription:
        return self.events.subscribe(callback)

    def members(self) -> tuple[RunPeer, ...]:
        return tuple(self.run)


def member(peer_id: str, *, waiting: bool = False) -> RunPeer:
    return RunPeer(
        peer_id=peer_id,
        name="",
        version="1",
        role="contributor",
        epoch=3,
        samples_per_second=10.0,
        waiting=waiting,
        behind=False,
        reachability="public",
        last_seen=0.0,
    )


def ended(result: RoundKind = RoundKind.SUCCESS, **changes: object) -> RoundEnded:
    """Return the end of a round of five members that took 2 s, 0.75 s of it in the exchange."""
    given: dict[str, object] = {
        "time": 100.0,
        "run_id": "lab",
        "result": result,
        "duration": 2.0,
        "exchange_duration": 0.75,
        "agreement_duration": 0.25,
        "group_id": "0a1b2c3d" * 8,
        "members": PEERS,
        "contributors": PEERS[:4],
        "sent": {Way.LANE: 1000, Way.RELAYED: 10},
        "received": {Way.LANE: 2000},
        "samples": 64.0,
        "own_samples": 16.0,
        **changes,
    }
    return RoundEnded(**given)  # type: ignore[arg-type]


def updated(**changes: object) -> UpdateTaken:
    given: dict[str, object] = {
        "time": 100.0,
        "run_id": "lab",
        "epoch": 7,
        "lineage": b"l" * 32,
        "group_id": "0a1b2c3d" * 8,
        "peers": PEERS[:4],
        "samples": 64.0,
        "metrics": {"loss": 2.5},
        "grad_norm": 1.5,
        "learning_rates": (0.1, 0.01),
        **changes,
    }
    return UpdateTaken(**given)  # type: ignore[arg-type]


def progressed(**changes: object) -> Progressed:
    """Return the word of a peer that computes at update 3."""
    given: dict[str, object] = {
        "time": 1.0,
        "run_id": "lab",
        "epoch": 3,
        "lineage": bytes(32),
        "samples": 4.0,
        "samples_per_second": 5.0,
        "waiting": False,
        "follows": False,
        **changes,
    }
    return Progressed(**given)  # type: ignore[arg-type]


def moved(direction: Direction, done: int, total: int, *, time: float = 1.0) -> StateMoved:
    """Return the progress of a transfer with one peer."""
    return StateMoved(
        time=time, run_id="lab", direction=direction, done=done, total=total, bytes_per_second=3.0, peers=1
    )

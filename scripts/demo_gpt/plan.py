"""Rules of the launcher: its next actions, decided from the progress of the run alone."""

from dataclasses import dataclass

from .progress import Progress, Run, State

MOST_STARTS = 4
"""The times that a peer is started: one that something kills again and again is not started for ever."""


@dataclass(frozen=True)
class Start:
    """Start a peer, which joins through these addresses; without any, it begins the network."""

    peer: int
    bootstrap: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kill:
    peer: int


def next_actions(run: Run) -> list[Start | Kill]:
    """Return what is due: peers to start, for the first time or again, and the peer to kill."""
    settings = run.settings
    actions: list[Start | Kill] = []
    addresses = tuple(peer.address for peer in run.peers if peer.address and peer.state is not State.FAILED)
    # One peer begins the network. The others wait for its address: two that began one each would never meet.
    begins = not addresses and not any(peer.state is State.STARTING for peer in run.peers)
    for index, peer in enumerate(run.peers):
        if _is_to_start(run, index, peer) and (addresses or begins):
            actions.append(Start(index, addresses))
            begins = False
    victim = settings.killed_peer
    if victim is not None and _is_to_be_killed(run, run.peers[victim]):
        actions.append(Kill(victim))
    return actions


def is_over(run: Run) -> bool:
    """Return whether no peer trains any more, nor will: the late one joins a run that has begun."""
    late = run.settings.late_peer
    return all(
        peer.ended for index, peer in enumerate(run.peers) if index != late or peer.state is not State.PLANNED
    )


def fail_if_killed_too_often(run: Run) -> None:
    for peer in run.peers:
        if peer.state is State.KILLED and len(peer.kills) >= MOST_STARTS:
            peer.fail(f"{peer.reason}, for the {len(peer.kills)}th time")


def _is_to_start(run: Run, index: int, peer: Progress) -> bool:
    if peer.state is State.KILLED:
        return len(peer.kills) < MOST_STARTS
    is_late = index == run.settings.late_peer
    return peer.state is State.PLANNED and (not is_late or run.step >= run.settings.steps // 6)


def _is_to_be_killed(run: Run, peer: Progress) -> bool:
    trains = peer.state in (State.TRAINING, State.WAITING)
    return trains and not peer.kills and peer.step >= max(1, run.settings.steps // 3)

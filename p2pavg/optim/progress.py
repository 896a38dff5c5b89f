"""How far the peers of a run are, from what each says of itself, and what follows for one of them.

No I/O, no clock. A *state* names the parameters that a peer has: where it began, and every update since
(:mod:`p2pavg.optim.lineage`). Peers of one state have the same parameters, and only those average with each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from p2pavg.errors import RemoteProtocolError
from p2pavg.net.wire import pack, unpack

MAX_SAMPLES = 1e15
MAX_EPOCH = 2**53
STATE_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What one peer says of itself.

    Raises:
        RemoteProtocolError: a number is out of range.
    """

    epoch: int
    """Updates since the run began."""
    state: bytes
    samples: float
    """Accumulated since the last update."""
    samples_per_second: float
    waiting: bool
    """Whether it computes no more until the next update."""

    def __post_init__(self) -> None:
        if not 0 <= self.epoch <= MAX_EPOCH or len(self.state) != STATE_BYTES:
            raise RemoteProtocolError("progress with an epoch or a state out of range")
        if not (0 <= self.samples <= MAX_SAMPLES and 0 <= self.samples_per_second <= MAX_SAMPLES):
            raise RemoteProtocolError("progress with samples out of range")


def encode_progress(progress: Progress) -> bytes:
    """A word for the bulletin."""
    return pack(
        1,
        progress.epoch,
        progress.state,
        float(progress.samples),
        float(progress.samples_per_second),
        progress.waiting,
    )


def read_progress(value: bytes) -> Progress:
    """Raises RemoteProtocolError for anything that :func:`encode_progress` does not make."""
    version, epoch, state, samples, speed, waiting = unpack(value, int, int, bytes, float, float, bool)
    if version != 1:
        raise RemoteProtocolError(f"progress of version {version}")
    return Progress(epoch=epoch, state=state, samples=samples, samples_per_second=speed, waiting=waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The run as one peer sees it."""

    peers: int
    """That have this peer's state, itself included."""
    samples: float
    """That they have accumulated together since the last update."""
    samples_per_second: float
    waiting: bool
    """Whether all of them compute no more."""
    others: int
    """Peers of other states."""
    ahead: tuple[int, int] | None
    """Epoch and number of the peers of the other state that the run goes on with, if it does not with this one: of
    those that are no less far the most, of as many the furthest, and of these the one of the greatest name."""


def survey(mine: Progress, others: Iterable[Progress]) -> Survey:
    """What ``others`` say, as seen from ``mine``."""
    everybody = [mine, *others]
    same = [progress for progress in everybody if progress.state == mine.state]
    elsewhere = Counter(
        (progress.state, progress.epoch) for progress in everybody if progress.state != mine.state
    )
    further = {(count, epoch, state) for (state, epoch), count in elsewhere.items() if epoch >= mine.epoch}
    most, epoch, state = max(further, default=(0, 0, b""))
    return Survey(
        peers=len(same),
        samples=math.fsum(progress.samples for progress in same),
        samples_per_second=math.fsum(progress.samples_per_second for progress in same),
        waiting=all(progress.waiting for progress in same),
        others=len(everybody) - len(same),
        ahead=(epoch, most) if (most, epoch, state) > (len(same), mine.epoch, mine.state) else None,
    )


@dataclass(frozen=True, slots=True)
class Compute:
    """Go on with the next batch."""

    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Compute no more; look again when somebody has said something."""

    reason: str


@dataclass(frozen=True, slots=True)
class Average:
    """Begin the round, with so many peers."""

    peers: int
    reason: str


@dataclass(frozen=True, slots=True)
class Behind:
    """Most of the run has other parameters, and this peer cannot follow by itself."""

    epoch: int
    """Of most of the run."""
    reason: str


Decision: TypeAlias = Compute | Wait | Average | Behind


def decide(
    mine: Progress, seen: Survey, *, target: float, peers_to_start: int = 1, least: int = 1
) -> Decision:
    """What a peer does next.

    Args:
        target: samples that the peers of one state accumulate together before they average; infinite when each counts
            its own steps, and all wait for each other.
        peers_to_start: peers without which no round begins; 1 once the peer has been in one.
        least: peers without which a round comes to nothing: until they are there, each goes on by itself.
    """
    starting = seen.peers < peers_to_start
    if seen.ahead is not None:
        epoch, peers = seen.ahead
        # Of as many at the beginning this peer may only not have heard of those that are with it.
        if not (starting and epoch == mine.epoch and peers <= seen.peers):
            where = f"epoch {epoch}" if epoch > mine.epoch else f"epoch {epoch} too, from other updates"
            return Behind(
                epoch,
                f"{_are(peers)} at {where}; {seen.peers} with this one at epoch {mine.epoch}",
            )
    if mine.samples <= 0:
        return Compute("nothing is accumulated")
    apart = f"; {_are(seen.others)} at other parameters" if seen.others else ""
    far = f"{seen.peers} peers have {seen.samples:g} of {target:g} samples together{apart}"
    if starting:
        reason = f"{seen.peers} of {peers_to_start} peers are there to start{apart}"
        enough = (
            mine.waiting or seen.samples >= target
        )  # more would only be more of this peer's in the first update
        return Wait(reason) if enough else Compute(reason)
    if seen.peers < least:
        return Compute(f"{seen.peers} of the {least} peers of a group are there{apart}")
    if seen.samples >= target:
        return Average(seen.peers, far)
    if seen.waiting and math.isinf(target):
        return Average(seen.peers, f"all {seen.peers} peers wait")
    if seen.waiting:
        return Compute(f"{far}, and all wait")  # for a peer that is gone: the others do its part
    return Wait(far) if mine.waiting else Compute(far)


def _are(peers: int) -> str:
    return "1 peer is" if peers == 1 else f"{peers} peers are"


def following(progress: Progress, before: bytes, mine: Progress) -> Progress:
    """What a peer that took the same update is about to say, while it still says what it was ``before``."""
    if progress.state != before:
        return progress
    return replace(progress, epoch=mine.epoch, state=mine.state, samples=0.0, waiting=False)


def read_all(said: Mapping[str, bytes]) -> dict[str, Progress]:
    """What each peer says; nonsense is left out."""
    found = {}
    for peer_id, value in said.items():
        try:
            found[peer_id] = read_progress(value)
        except RemoteProtocolError:
            continue
    return found

"""Progress of a run's peers, as each states its own, and the resulting decision of one peer.

No I/O, no clock. A *state* names a peer's parameters by its beginning and every update since
(:mod:`p2pavg.optim.base.state`). Peers of one state have the same parameters, and only those average with each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from msgspec import Meta
from msgspec.structs import replace

from p2pavg.base.limits import MAX_VERSION
from p2pavg.base.messages import Hash, Message

MAX_SAMPLES = 1e15
MAX_EPOCH = 2**53
MAX_BATCH_SECONDS = 600.0  # the default sync_timeout: no peer is waited for longer

# Which of both is told by the peers' recipes, a few seconds later: a guess would often be wrong.
ANOTHER_BEGINNING = "with other first parameters or settings"


_Samples = Annotated[float, Meta(ge=0.0, le=MAX_SAMPLES)]
# The bounds keep the sums and medians that are made of words finite.


class PeerProgress(Message, frozen=True, kw_only=True, tag=6):
    """The progress that one peer publishes, its *word*."""

    epoch: Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
    """Updates since the run began."""
    state: Hash
    samples: _Samples
    """Samples accumulated since the last update."""
    samples_per_second: _Samples
    waiting: bool
    """True if it computes no more until the next update."""
    batch_seconds: Annotated[float, Meta(ge=0.0, le=MAX_BATCH_SECONDS)] = 0.0
    """Seconds that a batch of this peer takes, the median of the last few; 0 before the first one."""
    started: bool = False
    """True if it has taken an update with others since it began, or since it loaded a state."""
    follows: bool = False
    """True if it replays the run's last updates, and will observe the next round as soon as it has caught up."""
    left: bool = False
    """True if it takes no further update: it has finished, and stays only to hand over what other peers lack."""
    version: Annotated[int, Meta(ge=0, le=MAX_VERSION)] = 0
    """Of the program that it trains with; see :attr:`p2pavg.AveragingConfig.version`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPeer:
    """The word of another peer, and the credit it gets (:mod:`p2pavg.optim.coordination.attendance`)."""

    peer_id: str
    progress: PeerProgress
    samples: float
    """The part of its claimed samples that this peer believes."""
    votes: bool = True
    """True if it counts for the decision which state the run continues with."""
    expected: bool = True
    """True if it is expected in the next round, provided that it has this peer's state."""
    observes: bool = False
    """True if it will only observe that round."""
    stays: bool = True
    """True if it counts against later states, as a peer that was awake since it took its last update does."""
    in_vain: bool = False
    """True if its claims of later states count only where most peers agree with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The run as one peer sees it."""

    peers: int
    """Number of peers expected in the next round of this peer's state, this peer included."""
    samples: float
    """Samples that these peers have accumulated since the last update, as far as they are believed."""
    samples_per_second: float
    waiting: bool
    """True if all of them have stopped computing until the next update."""
    others: int
    """Number of peers with other states."""
    ahead: tuple[int, int] | None
    """Epoch and number of peers of another state that the run continues with; ``None`` if it continues with this peer's
    state. The state is chosen among those at this peer's epoch or later: the one with most peers, then the latest
    epoch, then the largest digest."""
    unmet_ahead: tuple[int, int] | None = None
    """The same if the words of all peers counted, and ``ahead`` is ``None``: a part of the run that split off, or
    invented peers."""
    claimed: float = 0.0
    """Samples that these peers claim, believed or not."""
    others_wait: bool = False
    """True if there are other peers among them, and all of those have stopped computing."""
    computing: tuple[str, ...] = ()
    """Ids of the other peers among them that still compute."""
    observers: int = 0
    """Number of peers that are expected in the next round, and will only observe it; this peer not included."""
    coming: int = 0
    """Number of peers with this peer's state that are not expected in the next round, such as one that has just fetched
    the state."""
    expected: tuple[str, ...] = ()
    """Ids of the other peers that are expected in the next round of this peer's state."""
    apart: str = ""
    """Known reason why no more peers share this peer's state; empty if there is none."""
    ahead_peers: tuple[str, ...] = ()
    """Ids of the peers of ``ahead``."""
    few_ahead: bool = False
    """True if they are not more than the peers of this peer's state, some of which do not count against later states.
    One of the few may lie: what they say has to be proven by signatures of this peer's own companions."""
    differs: str = ""
    """Known differences in training between this peer and others; empty if there are none."""


def survey(
    mine: PeerProgress, others: Iterable[SeenPeer], differs: Sequence[str] = (), *, stays: bool = True
) -> Survey:
    """Summarise the words of ``others`` for the peer with the progress ``mine``.

    Args:
        differs: known differences in training between this peer and others, as sentences: the reason why they began
            otherwise.
        stays: true if this peer itself counts against later states.
    """
    seen = list(others)
    with_me = [other for other in seen if other.progress.state == mine.state]
    expected = [other for other in with_me if other.expected]
    elsewhere = [other.progress for other in seen if other.progress.state != mine.state]
    # Only voters decide: a stranger could otherwise invent peers that are ahead, and this one would wait for
    # a state.
    ahead, state, few = _ahead(mine, [other for other in seen if other.votes], stays)
    why = "; ".join(differs)
    return Survey(
        peers=1 + len(expected),
        # Rounded once, so that the sum does not depend on the order of the words.
        samples=math.fsum([mine.samples, *(other.samples for other in expected)]),
        samples_per_second=math.fsum(
            [mine.samples_per_second, *(other.progress.samples_per_second for other in expected)]
        ),
        waiting=mine.waiting and all(other.progress.waiting for other in expected),
        others=len(elsewhere),
        ahead=ahead,
        # For the log only: after a split, each part takes the peers of the other one for strangers.
        unmet_ahead=None if ahead else _ahead(mine, seen, stays)[0],
        claimed=math.fsum([mine.samples, *(other.progress.samples for other in expected)]),
        others_wait=bool(expected) and all(other.progress.waiting for other in expected),
        computing=tuple(sorted(other.peer_id for other in expected if not other.progress.waiting)),
        observers=sum(other.observes for other in expected),
        coming=sum(not other.progress.left for other in with_me) - len(expected),
        expected=tuple(sorted(other.peer_id for other in expected)),
        apart=_apart(mine, elsewhere, why) if seen else "no other peer of this run is seen",
        ahead_peers=tuple(sorted(other.peer_id for other in seen if ahead and other.progress.state == state)),
        few_ahead=few,
        differs=why,
    )


def _ahead(
    mine: PeerProgress, others: Collection[SeenPeer], stays: bool
) -> tuple[tuple[int, int] | None, bytes, bool]:
    """Return the part of the run that is ahead, its state, and whether it is ahead of peers that do not count only."""
    counts = Counter((other.progress.state, other.progress.epoch) for other in others)
    here = [other.stays for other in others if other.progress.state == mine.state]
    with_me = 1 + len(here)
    # A peer that was awake looks no further than all are: it would wait for those that sleep, on one word.
    that_stay = with_me if stays else sum(here)
    heeded = Counter((other.progress.state, other.progress.epoch) for other in others if not other.in_vain)
    # A total order, so that two parts of equal size do not each wait for the other one's state. For the same reason,
    # all count against another state of the same epoch.
    further = [
        (count, epoch, state)
        for (state, epoch), count in counts.items()
        if state != mine.state
        and (
            count >= with_me or max(that_stay, 1) <= heeded[state, epoch]
            if epoch > mine.epoch
            else epoch == mine.epoch and (count, state) > (with_me, mine.state)
        )
    ]
    most, epoch, state = max(further, default=(0, 0, b""))
    few = bool(most) and (most, epoch, state) < (with_me, mine.epoch, mine.state)
    return ((epoch, most) if most else None), state, few


def _apart(mine: PeerProgress, elsewhere: Iterable[PeerProgress], differs: str) -> str:
    """Return the differences that keep the peers with other states from this one, most common first."""
    kinds = Counter(_difference(mine, other) for other in elsewhere)
    largest = sorted(kinds.items(), key=lambda kind: (-kind[1], kind[0]))[:3]
    told = [f"{_peers(count)} {what}" for what, count in largest]
    return "; ".join([*told, differs] if told and differs else told)


def _difference(mine: PeerProgress, other: PeerProgress) -> str:
    if other.epoch != mine.epoch:
        return f"{'ahead' if other.epoch > mine.epoch else 'behind'}, at epoch {other.epoch}"
    if mine.epoch == 0:
        return ANOTHER_BEGINNING
    return f"at epoch {mine.epoch} too, from other updates"


@dataclass(frozen=True, slots=True)
class Compute:
    """Go on with the next batch."""

    reason: str


@dataclass(frozen=True, slots=True)
class WaitForPeers:
    """Stop computing; look again when a peer has published something."""

    reason: str


@dataclass(frozen=True, slots=True)
class Average:
    """Begin the round with this many peers."""

    peers: int
    reason: str


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """Most of the run has other parameters, and this peer cannot follow by itself."""

    epoch: int
    """Epoch of most of the run."""
    reason: str


Decision: TypeAlias = Compute | WaitForPeers | Average | LeftBehind


def decide(
    mine: PeerProgress,
    seen: Survey,
    *,
    target: float,
    peers_to_start: int = 1,
    least: int = 1,
    settled: bool = True,
    at_once: bool = False,
    hurries: bool = False,
) -> Decision:
    """Decide what a peer does next.

    Args:
        target: number of samples that the peers of one state accumulate together before they average; infinite when
            each counts its own steps, and all wait for each other.
        peers_to_start: number of peers that the first round needs; 1 once the peer has been in a round.
        least: number of peers that any round needs: with fewer, each goes on computing by itself.
        settled: true if the first round may begin, because no new peer has come for a while.
        at_once: true if rounds run in the background: a peer that is due does not wait until the others are.
        hurries: true if the peers that are due have waited long enough for those that still compute.
    """
    starting = seen.peers < peers_to_start
    # First of all: what this peer has accumulated belongs to parameters with which the run does not go on.
    if seen.ahead is not None:
        epoch, peers = seen.ahead
        # At the start, with no more peers in the other state, this peer may just not have heard of its own yet.
        if not ((starting or not settled) and epoch == mine.epoch and peers <= seen.peers):
            return LeftBehind(
                epoch,
                f"{_where(mine, epoch, peers)}; {seen.peers} with this one at epoch"
                f" {mine.epoch}{'; ' if seen.differs else ''}{seen.differs}",
            )
    if mine.samples <= 0:
        return Compute("nothing is accumulated")
    apart = f"; {seen.apart}" if seen.apart else ""
    if starting or not settled:
        there = f"{seen.peers} of {peers_to_start} peers are there to start"
        reason = f"{there if starting else 'more peers may be about to start'}{apart}"
        # Further samples would only raise this peer's part in the first update.
        return WaitForPeers(reason) if mine.waiting or seen.samples >= target else Compute(reason)
    # A round of so few could not form a group, so the time is better spent on further batches.
    if seen.peers < least:
        return Compute(f"{seen.peers} of the {least} peers of a group are there{apart}")
    ready = seen.peers - len(seen.computing)
    # A slow peer may not hold up the others for ever: after the grace period, those that are due begin without it. They
    # are more than half, so that parts of a run do not go on separately.
    quorum = max(least, seen.peers // 2 + 1)
    if hurries and mine.waiting and quorum <= ready < seen.peers and math.isinf(target):
        return Average(
            ready, f"{seen.peers - ready} of {seen.peers} peers still compute after the grace period"
        )
    # The round waits for the others by itself, and this peer goes on computing meanwhile.
    if at_once and mine.waiting:
        return Average(seen.peers, "the round runs in the background")
    return _when_there(mine, seen, target, apart)


def _when_there(mine: PeerProgress, seen: Survey, target: float, apart: str) -> Decision:
    """Decide what a peer does next once enough peers are present: it depends on samples, or on all peers waiting."""
    far = f"{seen.peers} peers have {seen.samples:g} of {target:g} samples together{apart}"
    if seen.samples >= target:
        return Average(seen.peers, far)
    # Peers that count steps need no samples together: each of them has done its part.
    if seen.waiting and math.isinf(target):
        return Average(seen.peers, f"all {seen.peers} peers wait")
    # Unbelieved claims count when all the others have stopped because of them: then honest peers believe them.
    if seen.others_wait and seen.claimed >= target:
        return Average(seen.peers, f"the other {seen.peers - 1} say that {seen.claimed:g} samples are there")
    if seen.waiting:
        return Compute(f"{far}, and all wait")  # the others do the part of a peer that is gone
    return WaitForPeers(far) if mine.waiting else Compute(far)


def _where(mine: PeerProgress, epoch: int, peers: int) -> str:
    if epoch > mine.epoch:
        return f"{_peers(peers)} at epoch {epoch}"
    if epoch == 0:
        return f"{_peers(peers)} at epoch 0, {ANOTHER_BEGINNING}"
    return f"{_peers(peers)} at epoch {epoch} too, from other updates"


def _peers(number: int) -> str:
    return "1 peer is" if number == 1 else f"{number} peers are"


def following(progress: PeerProgress, earlier: Collection[bytes], mine: PeerProgress) -> PeerProgress:
    """Return a peer's expected next word, if its word is of one of this peer's earlier states.

    Such a peer took this peer's last update and its word is still from before, or it replays the last updates.

    Args:
        progress: the other peer's word.
        earlier: this peer's states before the last update; words may be slower than updates.
        mine: progress of this peer.
    """
    if progress.state not in earlier:
        return progress
    return replace(
        progress,
        epoch=mine.epoch,
        state=mine.state,
        samples=0.0,
        # It observes the next round, and computes nothing for it.
        waiting=progress.follows,
        started=not progress.follows,
    )

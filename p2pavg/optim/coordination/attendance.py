"""Trust in the other peers' words: which of them count, for how much, and for how long. No I/O, no clock.

A peer's *word* is the progress that it publishes. Each word is signed, but none is proven: a stranger can make any
number of identities, and each can claim anything. So a peer trusts most the peers that took one of its last updates
with it, its *known* peers:

* While a known peer is there, only known peers decide whether this peer is behind.
* Samples of known peers count as claimed. Samples of *newcomers* count as far as they could have been computed since
  the newcomer's first word. Together they count no more than the samples of this peer and its known peers.
* This peer waits for newcomers only briefly, and lets only a few into a round at once. After newcomers repeatedly fail
  to come, it expects none for a while.

A peer without known peers has just begun, or all of them are gone. It believes everything but samples. This gap remains
as long as any peer may join: most of the words that such a peer sees may be invented.

Peers that have slept, or have come to a state by fetching it, are no evidence that the run has stayed there. Their
number does not outweigh a later state, which a few others have reached meanwhile, until they had time to follow it.

At the start, every peer that is present is waited for. Later a peer is waited for once it has computed a batch, and
until it has computed nothing for a few of its own batch times. All calls are given ``now``, in seconds of any clock.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from p2pavg.base.limits import HOLD_OFF_SECONDS, LOOK_SECONDS
from p2pavg.optim.coordination.progress import PeerProgress, SeenPeer, following

SETTLE_START_SECONDS = 5.0
"""The first round begins when no new peer has come for this long. Programs that are started together differ by as much:
importing torch takes 2 to 4 s, more on a busy machine, and a word takes up to a second."""
MAX_SETTLE_SECONDS = 30.0
"""The first round begins after this time even if new peers keep coming. Otherwise an attacker could delay the start by
inventing one every 5 s."""
FIRST_BATCH_SECONDS = 60.0
"""Time that a peer present at the start may take for its first batch: ``torch.compile`` takes as long."""
PAUSE_BATCHES = 4
"""A peer that computes nothing for this many of its batch times is no longer waited for."""
MIN_ABSENCE_SECONDS = 10.0
"""Minimum of that time, for peers with short batches. Dropping a peer leaves it behind, and a busy machine, a
checkpoint or a late word takes seconds. Also the time that a peer of the last round has to publish its new state."""
NEWCOMER_BATCHES = 2
"""Batch times for which a newcomer is waited for. It joins the round after its batch, when it sees that the others
wait; the second batch allows for the words' delay."""
NEWCOMER_SECONDS = 30.0
"""Maximum of that time, whatever batch time a newcomer claims. It is the default ``match_timeout``, which a newcomer
that does not come costs anyway."""
NEWCOMERS = 4
"""Newcomers in a round with this many known peers or fewer; with more, as many newcomers as known peers."""
REPLAY_SECONDS = 1.0
"""Time for which a peer that replays the last updates is waited for: it hears of the last one, and fetches it. All
other peers wait for it, and one peer gains an update. So it is short."""
WOKEN_SECONDS = 30.0
"""Time after its pause or its arrival for which a peer does not count against a later state: long enough to follow the
peers that are there. It is also the time for which one peer's claims of later states may hold this one up in vain, in
all: see :class:`VainClaims`."""
KNOWN_UPDATES = 8
"""A peer that took none of this peer's last updates is a newcomer again."""
CLAIM_MARGIN = 10.0
"""Factor by which a newcomer may be faster than this peer and the median known peer: a GPU beside a CPU."""
FIRST_BATCHES = 4.0
"""Credit for a newcomer's work before its first word, in batches of this peer."""
MAX_UPDATES_PER_SECOND = 50.0
"""No run is faster: a round between processes of one machine takes 0.1 s."""
MAX_REMEMBERED = 1024
"""Limit of the remembered absent peers; the oldest is forgotten. An attacker that uses more names gains one missed
round for each, as it would with new names anyway."""
MAX_ABSENT_RETRY_SECONDS = 120.0


@dataclass(slots=True)
class _Peer:
    """The word of one peer at its present state."""

    progress: PeerProgress
    since: float
    computed_at: float
    """Time at which its words last showed progress."""
    observes: bool
    """True if it will only observe the next round."""
    counts_from: float = -math.inf
    """It counts against later states from this time on; see :data:`WOKEN_SECONDS`."""


class VainClaims:
    """Peers whose claims of later states have held this peer up long enough, without an average that proves them.

    A peer that slept, or follows the log, looks to a few that are ahead (:attr:`Survey.few_ahead`). One of them may
    lie, with one word for ever or a new one for each update, so the time counts for the peer and not for its word.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[str, float] = OrderedDict()  # seconds, by peer
        self._noted_at = -math.inf

    @property
    def peers(self) -> frozenset[str]:
        """Ids of the peers whose claims hold this peer up no more, unless most peers agree with them."""
        return frozenset(peer for peer, seconds in self._held.items() if seconds >= WOKEN_SECONDS)

    def note(self, few: Collection[str], now: float) -> None:
        """Note which few peers hold this one up now."""
        # While this peer does not look, its program trains or sleeps, and is not held up.
        seconds, self._noted_at = min(now - self._noted_at, LOOK_SECONDS), now
        for peer in few:
            self._held[peer] = self._held.pop(peer, 0.0) + seconds
            if len(self._held) > MAX_REMEMBERED:
                self._held.popitem(last=False)

    def proved(self, peers: Iterable[str]) -> None:
        """Note that this peer has reached a state that these peers had claimed."""
        for peer in peers:
            self._held.pop(peer, None)


@dataclass(frozen=True, slots=True)
class _Missed:
    """A peer that did not come to a round in which it was expected."""

    times: int
    said: PeerProgress
    """Its word at that time."""
    until_epoch: int
    until: float


class PeerTrust:
    """The other peers of a run as one peer counts them.

    Args:
        now: seconds of the clock that all calls use.
        overlaps: true if peers go on computing while a round runs. Then a peer of the last round may take its result
            much later than this one, and a peer that is expected in a round need not be due yet.
    """

    def __init__(self, now: float, *, overlaps: bool = False) -> None:
        self._overlaps = overlaps
        self._peers: dict[str, _Peer] = {}
        self._missed: dict[str, _Missed] = {}
        self.begin(now)

    def begin(self, now: float) -> None:
        """Start anew with other parameters: no peer has taken an update with this one yet."""
        self._known: dict[str, int] = {}  # peer id -> epoch of the last update taken together
        self._companions: frozenset[str] = frozenset()  # peers of the last update
        self._logged: frozenset[str] = frozenset()
        """Members of the group whose update this peer has replayed last."""
        self._earlier: deque[bytes] = deque(maxlen=KNOWN_UPDATES)  # this peer's states before it
        self._took_at = -math.inf
        self.started = False
        self._due: set[str] = set()  # peers expected in the next round
        self._news_at = now
        self._enough_at: float | None = None
        self._waits_since: float | None = None
        self._fruitless = 0  # consecutive updates to which newcomers were expected and none came
        self._newcomers_from = 0  # epoch from which newcomers are expected again
        self._missed.clear()
        self._self: _Peer | None = None  # this peer's own word, judged as those of the others are

    @property
    def known(self) -> frozenset[str]:
        """Ids of the known peers."""
        return frozenset(self._known)

    @property
    def logged(self) -> frozenset[str]:
        """Ids of the peers that took the last update which this peer has taken from the log, since it began."""
        return self._logged

    # ------------------------------------------------------------------ words of other peers

    def receive(
        self, mine: PeerProgress, words: Mapping[str, PeerProgress], now: float
    ) -> tuple[SeenPeer, ...]:
        """Take in the peers' current words; return each peer with the credit that its word gets."""
        # The patience with newcomers runs from the moment at which this peer itself has stopped computing.
        if not mine.waiting:
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = now
        words = {
            peer: word for peer, word in words.items() if not self._is_absent(peer, word, mine.epoch, now)
        }
        self._note(mine, words, now)
        known = self._known.keys() & words.keys()
        seen = self._believed(mine, known, now)
        # At the start all that are present are expected, also before their first batch.
        if self.is_start(mine):
            expected = {peer for peer in seen if self._is_awake(peer, now, at_least=FIRST_BATCH_SECONDS)}
        else:
            expected = self._expected(mine, known, now)
        expected -= {peer for peer in seen if self._peers[peer].progress.left}
        # A peer that was expected at any time before the round has missed it if it does not come.
        self._due |= expected
        return tuple(
            SeenPeer(
                peer_id=peer,
                progress=self._peers[peer].progress,
                samples=samples,
                votes=self._votes(peer, mine, known, now),
                expected=peer in expected,
                observes=self._peers[peer].observes,
                stays=self._stays(self._peers[peer], now),
            )
            for peer, samples in seen.items()
        )

    def _note(self, mine: PeerProgress, words: Mapping[str, PeerProgress], now: float) -> None:
        before, self._peers = self._peers, {}
        for peer, word in words.items():
            # A companion has observed, and its word is late.
            observes = word.follows and peer not in self._companions
            if word.follows and word.state == mine.state:  # it has caught up, and waits as this peer does
                word = replace(word, follows=False)
            elif word.follows or (peer in self._companions and self._takes_soon(word, now)):
                stays = self._overlaps and word.waiting  # in the round, and computing
                # Its word is late. It will have this peer's state by the time of the round,
                # so it counts as if it said so.
                word = following(word, self._earlier, mine)
                word = replace(word, waiting=word.waiting or stays)
            last = before.get(peer)
            if last is None or last.progress.state != word.state:
                # Peers with other parameters do not hold up the start, since they will not be in this peer's rounds.
                if word.state == mine.state and not self.started:
                    self._news_at = now
                took_part = word.state == mine.state and peer in self._companions
                self._peers[peer] = _Peer(
                    word, now, now, observes, -math.inf if took_part else now + WOKEN_SECONDS
                )
                continue
            self._peers[peer] = self._went_on(last, word, observes, now)

    def _went_on(self, last: _Peer, word: PeerProgress, observes: bool, now: float) -> _Peer:
        """Return what is noted of a peer that has another word at the same state."""
        if word.samples == last.progress.samples and not word.waiting:
            return _Peer(word, last.since, last.computed_at, observes, last.counts_from)
        slept = not self._was_awake(last, now)
        return _Peer(word, last.since, now, observes, now + WOKEN_SECONDS if slept else last.counts_from)

    def stays(self, mine: PeerProgress, now: float) -> bool:
        """Return whether this peer itself counts against later states."""
        last = self._self
        if last is None or last.progress.state != mine.state:
            by_round = self._took_at > -math.inf
            self._self = _Peer(mine, now, now, False, -math.inf if by_round else now + WOKEN_SECONDS)
        else:
            # It looks when it computes and when it waits: only while it sleeps, it does not.
            self._self = self._went_on(last, replace(mine, waiting=True), False, now)
        return self._stays(self._self, now)

    def _stays(self, peer: _Peer, now: float) -> bool:
        if peer.progress.epoch == 0:  # nothing was missed yet
            return True
        return now >= peer.counts_from and self._was_awake(peer, now)

    def _takes_soon(self, word: PeerProgress, now: float) -> bool:
        """Return whether a peer of the last round will take its result, if it has not done so."""
        return now < self._took_at + MIN_ABSENCE_SECONDS or (self._overlaps and word.waiting)

    def _is_absent(self, peer: str, word: PeerProgress, epoch: int, now: float) -> bool:
        """Return whether a peer is ignored because it claimed to be present and did not come to a round."""
        missed = self._missed.get(peer)
        return missed is not None and (
            word == missed.said or epoch < missed.until_epoch or now < missed.until
        )

    # ------------------------------------------------------------------ credit

    def _believed(self, mine: PeerProgress, known: Collection[str], now: float) -> dict[str, float]:
        """Return each peer's samples as far as they are believed."""
        speeds = [self._peers[peer].progress.samples_per_second for peer in known]
        fastest = CLAIM_MARGIN * max(mine.samples_per_second, statistics.median(speeds) if speeds else 0.0)
        first = FIRST_BATCHES * mine.samples_per_second * mine.batch_seconds
        found = {}
        for peer, word in self._peers.items():
            samples = word.progress.samples
            # The speed that a newcomer claims does not count here: it could claim any.
            found[peer] = samples if peer in known else min(samples, first + fastest * (now - word.since))
        here = {peer for peer in found if self._peers[peer].progress.state == mine.state}
        if here & set(known):
            most = math.fsum([mine.samples, *(found[peer] for peer in here if peer in known)])
            newcomers = math.fsum(found[peer] for peer in here if peer not in known)
            # All newcomers together count at most as much as this peer and its known peers, whatever their number.
            if newcomers > most:
                found |= {peer: found[peer] * (most / newcomers) for peer in here if peer not in known}
        return found

    def replayed(self, members: Iterable[str]) -> None:
        """Note the members of a group whose update this peer has taken from the log, after :meth:`begin`."""
        self._logged = frozenset(members)

    def _votes(self, peer: str, mine: PeerProgress, known: Collection[str], now: float) -> bool:
        # A peer that follows the log has taken no update with others, and its updates are those of some peers all the
        # same. Otherwise each stranger could hold it up anew after each update.
        voters = known or self._logged & self._peers.keys()
        if voters and peer not in voters:
            return False
        if not self.started:
            return True
        # This holds for known peers too.
        # It lets a peer catch up that was suspended, since the limit grows with the time.
        possible = mine.epoch + 1 + (now - self._took_at) * MAX_UPDATES_PER_SECOND
        return self._peers[peer].progress.epoch <= possible

    # ------------------------------------------------------------------ peers to wait for

    def is_start(self, mine: PeerProgress) -> bool:
        """Return whether the run starts: all peers of this state are about to take their first update."""
        others = (peer.progress for peer in self._peers.values() if peer.progress.state == mine.state)
        return not self.started and not (mine.epoch > 0 and any(other.started for other in others))

    def joins(self, mine: PeerProgress) -> bool:
        """Return whether this peer has joined a running run and has taken no update with it yet."""
        return not self.started and not self.is_start(mine)

    def is_settled(self, mine: PeerProgress, peers: int, peers_to_start: int, now: float) -> bool:
        """Return whether the first round may begin, because no new peer has come for a while.

        Args:
            mine: progress of this peer.
            peers: number of peers that are present.
            peers_to_start: number of peers that the first round needs.
            now: the current time.
        """
        if not self.is_start(mine):
            return True
        if peers < peers_to_start:
            self._enough_at = None
        elif self._enough_at is None:
            self._enough_at = now
        if self._enough_at is not None and now >= self._enough_at + MAX_SETTLE_SECONDS:
            return True
        return now >= self._news_at + SETTLE_START_SECONDS

    def _is_awake(self, peer: str, now: float, *, at_least: float = MIN_ABSENCE_SECONDS) -> bool:
        """Return whether a peer has computed something lately, compared with its batch time."""
        word = self._peers[peer]
        return word.progress.waiting or self._was_awake(word, now, at_least)

    def _was_awake(self, peer: _Peer, now: float, at_least: float = MIN_ABSENCE_SECONDS) -> bool:
        """Return whether a peer's last sign of progress is no longer ago than its batches explain."""
        return now < peer.computed_at + max(PAUSE_BATCHES * peer.progress.batch_seconds, at_least)

    def _expected(self, mine: PeerProgress, known: Collection[str], now: float) -> set[str]:
        here = [peer for peer, word in self._peers.items() if word.progress.state == mine.state]
        here = [peer for peer in here if self._is_awake(peer, now)]
        old = {
            peer for peer in here if peer in known and (peer in self._companions or self._has_computed(peer))
        }
        new = [peer for peer in here if peer not in known and self._has_computed(peer)]
        if not known:
            running = [peer for peer in here if self._peers[peer].progress.started]
            return {*old, *new, *running}
        if mine.epoch < self._newcomers_from:
            return old
        new = [peer for peer in new if not self._is_given_up(peer, now)]
        # Those that were seen first have the places, so that ever new names do not displace a newcomer that waits.
        new.sort(key=lambda peer: (self._peers[peer].since, peer))
        return {*old, *new[: max(NEWCOMERS, len(known))]}

    def _has_computed(self, peer: str) -> bool:
        progress = self._peers[peer].progress
        return progress.samples > 0 or progress.waiting

    def _is_given_up(self, newcomer: str, now: float) -> bool:
        """Return whether this peer has waited long enough for a newcomer."""
        progress = self._peers[newcomer].progress
        if self._waits_since is None:
            return False
        if progress.follows:
            return now >= self._waits_since + REPLAY_SECONDS
        if progress.waiting:
            return False
        grace = max(NEWCOMER_BATCHES * progress.batch_seconds, MIN_ABSENCE_SECONDS)
        return now >= self._waits_since + min(grace, NEWCOMER_SECONDS)

    def is_asleep(self, peer: str, now: float) -> bool:
        """Return whether a peer has computed nothing for long, by what was last heard of it, or says nothing."""
        if peer not in self._peers:
            return True
        return not (self._peers[peer].progress.left or self._is_awake(peer, now))

    # ------------------------------------------------------------------ rounds

    def took(
        self, companions: Iterable[str], mine: PeerProgress, words: Mapping[str, PeerProgress], now: float
    ) -> None:
        """Note an update that this peer took with others.

        Args:
            companions: ids of the other peers.
            mine: progress of this peer before the update.
            words: the current words of all peers.
            now: the current time.
        """
        self.receive(mine, words, now)
        self._companions = frozenset(companions)
        self._earlier.append(mine.state)
        epoch = mine.epoch + 1
        self._judge_newcomers(epoch)
        self._known |= dict.fromkeys(self._companions, epoch)
        self._known = {peer: last for peer, last in self._known.items() if last > epoch - KNOWN_UPDATES}
        for peer in self._companions:
            self._missed.pop(peer, None)
        for peer in self._due - self._companions:
            if self._was_due(peer, mine):
                self._note_missed(peer, words[peer], epoch, -math.inf)
        # A companion whose word of the new state came before this peer had it has taken part all the same.
        for peer in self._companions & self._peers.keys():
            if self._peers[peer].progress.state != mine.state:
                self._peers[peer].counts_from = -math.inf
        self.started, self._took_at = True, now
        self._due.clear()
        self._waits_since = None

    def no_group_formed(self, mine: PeerProgress, words: Mapping[str, PeerProgress], now: float) -> None:
        """Note a round to which no other peer came within the match timeout."""
        self.receive(mine, words, now)
        for peer in tuple(self._due):
            if self._was_due(peer, mine):
                times = self._missed[peer].times if peer in self._missed else 0
                # A pause in seconds, not in updates: without these peers there may be no update.
                pause = (
                    min(HOLD_OFF_SECONDS * 2.0 ** min(times - 1, 8), MAX_ABSENT_RETRY_SECONDS)
                    if times > 1
                    else 0.0
                )
                self._note_missed(peer, words[peer], 0, now + pause)
        self._due.clear()
        self._waits_since = None

    def _was_due(self, peer: str, mine: PeerProgress) -> bool:
        """Return whether a peer's word was of this peer's state, or of one that replays the updates up to it."""
        heard = self._peers.get(peer)
        if heard is None or heard.progress.state != mine.state:
            return False
        return heard.progress.waiting or not self._overlaps

    def _judge_newcomers(self, epoch: int) -> None:
        expected = self._due - self._known.keys()
        if not self._known or not expected:
            return
        # One newcomer that comes shows that not all of them are invented.
        self._fruitless = 0 if expected & self._companions else self._fruitless + 1
        if self._fruitless > 2:
            self._newcomers_from = epoch + 2 ** min(self._fruitless - 2, 8)

    def _note_missed(self, peer: str, word: PeerProgress, epoch: int, until: float) -> None:
        """Ignore an absent peer until its word changes; if it is repeatedly absent, for exponentially more updates."""
        times = self._missed[peer].times + 1 if peer in self._missed else 1
        updates = 2 ** min(times - 2, 8) if times > 2 and epoch else 0
        self._missed.pop(peer, None)
        self._missed[peer] = _Missed(times, word, epoch + updates, until)
        # The one that was missed longest ago stands first, because each new absence moves a peer to the end.
        if len(self._missed) > MAX_REMEMBERED:
            del self._missed[next(iter(self._missed))]

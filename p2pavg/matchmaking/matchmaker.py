"""Groups for one averager: one attempt after the other, and answers to peers that ask between attempts."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import trio

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import CLOCK_SKEW_SECONDS, TAIL_SECONDS
from p2pavg.group.bandwidth import BandwidthMeter
from p2pavg.group.candidate import Candidate, sign_candidate
from p2pavg.group.places.gossip import EVERYWHERE, SearchPlace, key_at
from p2pavg.group.places.levels import Ladder, ladder_for, slot_at
from p2pavg.group.roster import Roster
from p2pavg.matchmaking.actions import GaveUp, Refuses, Renew, Settings
from p2pavg.matchmaking.attempt_runner import AttemptRunner, SearchListener, announced
from p2pavg.matchmaking.attempt_state import Memory
from p2pavg.matchmaking.messages import Declined, JoinRequest, Nudge, encode
from p2pavg.matchmaking.reunion import LastGroup, holds_back, last_group
from p2pavg.matchmaking.rules import Matchmaking
from p2pavg.matchmaking.search import PlaceSearch, level_after
from p2pavg.matchmaking.timing import ATTEMPT_SECONDS, REUNION_SECONDS
from p2pavg.net.transport import Stream, send_message
from p2pavg.runs.context import PeerContext
from p2pavg.runs.records.run_records import RunRecords

logger = logging.getLogger(__name__)

MAX_MOVES = 4
"""A group is looked for with so many changes of this peer's reach at most; each may delay its deadline by seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOffer:
    """The words about itself that this peer signs for one round; see :class:`~p2pavg.group.candidate.Candidate`.

    A peer whose contribution has the weight 0 observes, or is an auxiliary, which only reduces a share.
    """

    weight: float = 0.0
    auxiliary: bool = False
    state: bytes = b""
    tags: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    norm: float = 0.0


class Matchmaker:
    """Finds groups for one averager, one attempt at a time, and answers peers that ask between attempts.

    Args:
        meter: knows the bandwidth that signed candidates announce.
    """

    def __init__(
        self,
        context: PeerContext,
        *,
        key: bytes,
        settings: Settings,
        codec: str,
        meter: BandwidthMeter,
        records: RunRecords,
        site: str = "",
    ) -> None:
        self._context = context
        self._records = records
        self._key = key
        self._place_key = key
        self._settings = settings
        self._codec = codec
        self._meter = meter
        self._site = site
        self._attempt: AttemptRunner | None = None
        self._linger = trio.CancelScope()
        self._closed = False
        self._said: list[bytes] = []
        """Keys under which there may be a record of an earlier attempt, or of this one."""
        self._taken: tuple[str, ...] = ()
        """Ids of the other members of the last group, as long as their records may still be read."""
        self._last: LastGroup | None = None
        """The group of the last round, if it was finished."""
        self._looked = -math.inf
        """Time of the last attempt in which this peer announced itself."""
        self._level: int | None = None
        self._memory = Memory()

    @property
    def key(self) -> bytes:
        """The ready key under which it answers."""
        return self._key

    def answers(self, key: bytes) -> bool:
        """Return whether it answers under a ready key: its own, or that of the place where it looked last."""
        return key in (self._key, self._place_key)

    @property
    def ready_peers(self) -> int:
        """Number of contributors known to be ready, this peer included."""
        return 1 if self._attempt is None else self._attempt.rules.ready_peers

    def ban(self, peer_id: str, reason: str, seconds: float) -> None:
        """Ban a peer from this attempt, and all that begin within ``seconds``. A roster that was accepted goes on."""
        self._memory.ban(peer_id, reason, trio.current_time() + seconds)
        if self._attempt is not None:
            self._attempt.expel(peer_id, reason)

    def finished_with(self, members: Sequence[Candidate]) -> None:
        """Note that a round with these members, in the roster's order, was finished; later attempts prefer them."""
        others = [member for member in members if member.peer_id != self._context.signer.peer_id]
        # The next attempt asks these peers first, may hope for the same group,
        # and sends its records to them directly.
        self._memory.finished_with(others)
        self._last = last_group(self._place_key, members)
        self._records.met(others)

    def recheck(self) -> None:
        """Drop the leader or followers that are members of the run no longer."""
        if self._attempt is not None and self._settings.refuses is not None:
            for candidate in self._attempt.partners:
                # A certificate may be revoked, or evidence arrive, after the peer was
                # admitted. A group that is formed already goes on.
                if (why := self._settings.refuses(candidate, self._context.wall_clock())) is not None:
                    self._attempt.expel(candidate.peer_id, why)

    def waits_for(self) -> str:
        """Return a sentence that says what the current attempt waits for; empty without an attempt."""
        return "" if self._attempt is None else self._attempt.rules.waits_for()

    def exchange_begun(self, group_id: bytes, peer_id: str) -> None:
        """Note that a peer has opened a stream of the exchange of an expected group."""
        if self._attempt is not None:
            self._attempt.exchange_begun(group_id, peer_id)

    async def find_group(
        self,
        *,
        offer: RoundOffer,
        target: int | None = None,
        contributors: int = 0,
        expected: Collection[str] = (),
        meeting: SearchPlace = EVERYWHERE,
        listener: SearchListener,
    ) -> Roster | GaveUp:
        """Return a committed roster with this peer in it, or the reason for which there is none.

        Args:
            offer: this peer's words about itself.
            target: number of members that this group aims at; ``None`` takes that of the settings.
            contributors: number of contributors without which the group is not complete.
            expected: ids of the other peers that the group is to be with, if they are known.
            meeting: where the group is looked for.
            listener: the round that the group is for.
        """
        if self._attempt is not None:
            raise RuntimeError("an attempt runs already")
        # The next announcement replaces the record of the last attempt, so there is no need to withdraw it before.
        self._linger.cancel()
        self._taken = ()
        self._place_key = key_at(self._key, meeting.place)
        usual = self._settings
        settings = replace(
            usual,
            target=target or usual.target,
            contributors=contributors,
            expected=frozenset(expected),
            match_timeout=meeting.patience or usual.match_timeout,
            refuses=_refusing(usual.refuses, meeting.avoid) if meeting.avoid else usual.refuses,
        )
        last, self._last = self._last, None  # after a round that fails, the next one begins without it
        # A search that avoids peers of the last groups looks for others, and an
        # auxiliary expects no group of its own.
        again = not (meeting.avoid or offer.auxiliary) and holds_back(
            self._context.signer.peer_id,
            last,
            key=self._place_key,
            target=settings.target,
            expected=settings.expected,
            match_timeout=settings.match_timeout,
            looked=trio.current_time() - self._looked,
            network=self._records.network_size,
        )
        outcome: Roster | GaveUp | Renew = Renew("the first attempt")
        moves = 0
        try:
            while isinstance(outcome, Renew):
                # A renewed attempt looks anew at the time slot and the size of the network: both may have changed.
                search = self._search_in(meeting, settings.target)
                # The common place alone has the same key for all members.
                hold_back = REUNION_SECONDS if again and search.ladder.start == 0 else 0.0
                # A renewed attempt begins after that time, in which the last group has not met again.
                again = False
                self._enter(search, holds_back=hold_back > 0)
                # Only a change of this peer's reach gives a deadline, close to the old
                # one: the caller must not wait longer for it.
                deadline = outcome.deadline
                if deadline is None:
                    # The deadline orders candidates. Those that hold back sign a later one, so the leader of the last
                    # group comes before them even if it announces itself after them.
                    patience = ATTEMPT_SECONDS if offer.auxiliary else settings.match_timeout
                    deadline = self._context.wall_clock() + patience + hold_back
                # A peer whose reach changes all the time would put its deadline off without end.
                moves += outcome.deadline is not None
                rules = Matchmaking(
                    self._sign(offer, deadline),
                    settings,
                    self._context.wall_clock(),
                    self._memory,
                    companions=frozenset() if last is None else last.members,
                    hold_back=hold_back,
                )
                # An attempt applies these bans until it ends.
                for peer_id, reason in self._memory.banned(trio.current_time()).items():
                    rules.state.peers.ban(peer_id, reason)
                self._attempt = AttemptRunner(
                    self._context, self._records, rules, listener, search, may_move=moves < MAX_MOVES
                )
                try:
                    outcome = await self._attempt.run()
                finally:
                    # Also when cancelled: records in further places would bring other peers to ask this one in vain.
                    self._leave(search, settings.target)
            if isinstance(outcome, Roster):
                mine = self._context.signer.peer_id
                # A peer that asks too late is told these names, and goes on to another
                # group instead of asking each of them.
                self._taken = tuple(member.peer_id for member in outcome.members if member.peer_id != mine)
            return outcome
        finally:
            self._attempt = None
            # In the peer's nursery, as it has to outlive this call and its cancellation.
            self._context.nursery.start_soon(self._withdraw_unless_renewed)

    def _search_in(self, meeting: SearchPlace, target: int) -> PlaceSearch:
        """Return the places of an attempt. A meeting's own place is small enough already."""
        ladder = (
            Ladder(0, 0) if meeting.place else ladder_for(self._records.network_size, target, self._level)
        )
        slot = slot_at(self._context.wall_clock())
        return PlaceSearch(self._context.signer.peer_id, self._place_key, slot, ladder)

    def _enter(self, search: PlaceSearch, *, holds_back: bool) -> None:
        """Enter the first place of an attempt, and leave those of earlier ones."""
        first = search.key_on(search.ladder.start)
        self._forget(key for key in self._said if key != first)
        # A peer that holds back has not announced itself under this key, but a
        # record of its last attempt may be there.
        self._said = [key for key in self._said if key == first] if holds_back else [first]

    def _leave(self, search: PlaceSearch, target: int) -> None:
        """Leave the places of an attempt, but for the first one: the next attempt is likely to begin there."""
        self._forget(search.said[1:])
        before, self._said = self._said, search.said[:1]
        if not search.said:  # what is left of an earlier attempt is not true any more
            self._forget(before)
            return
        self._looked = trio.current_time()
        # The place of a meeting has few peers by design, and tells nothing about the size of the run.
        if search.key == self._key:
            self._level = level_after(search, target)

    def _forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            # Withdrawals call other peers. An attempt must neither wait for them,
            # nor cancel them when it is cancelled itself.
            self._context.nursery.start_soon(self._withdraw_left, key)

    async def _withdraw_left(self, key: bytes) -> None:
        if key not in self._keys_said():  # the next attempt may begin where this one has ended
            await self._records.withdraw(key)

    def _sign(self, offer: RoundOffer, deadline: float) -> Candidate:
        reach, addresses = announced(self._context.transport)
        return sign_candidate(
            self._context.signer,
            key=self._place_key,
            deadline=deadline,
            expiration_time=self._context.wall_clock() + ATTEMPT_SECONDS + CLOCK_SKEW_SECONDS,
            bandwidth=self._meter.announced_mbps,
            codec=self._codec,
            addresses=addresses,
            certificate=self._records.certificate,
            **asdict(offer),
            reach=reach,
            site=self._site,
        )

    async def serve(self, stream: Stream, message: JoinRequest | Nudge) -> None:
        """Serve an inbound stream that begins with ``message``, until its conversation ends."""
        # Signed records are public: any peer could send the record of another one, and act in its name.
        if message.me.peer_id != stream.remote or not self.answers(message.me.record.key):
            raise RemoteProtocolError(f"{stream.remote} sent a record that is not its own")
        attempt = self._attempt
        if attempt is None:
            # The asker saw the record of an attempt that is over, and must not wait. A nudge expects no answer.
            if isinstance(message, JoinRequest):
                declined = Declined("not looking for a group", taken=self._taken, over=True)
                await send_message(stream, encode(declined))
                await stream.aclose()
        elif isinstance(message, Nudge):
            attempt.nudged(message.me)
        else:
            await attempt.serve(stream, message.me)

    async def close(self) -> None:
        """Withdraw the readiness record for good: its owner begins no attempt any more."""
        # An attempt that is being cancelled would withdraw the record of the owner's successor a moment later.
        self._closed = True
        await self.withdraw()

    async def withdraw(self) -> None:
        """Withdraw the readiness record, if there is one."""
        self._linger.cancel()
        # Taken before the first call: an attempt that begins meanwhile notes keys of its own, which stay.
        said, self._said = self._keys_said(), []
        self._records.keep_no_places()
        for key in sorted(said):
            await self._records.withdraw(key)

    def _keys_said(self) -> set[bytes]:
        return {*self._said, *(() if self._attempt is None else self._attempt.keys_said)}

    async def _withdraw_unless_renewed(self) -> None:
        with trio.CancelScope() as scope:
            self._linger = scope
            # A loop that steps again meanwhile replaces the record, which halves the calls.
            await trio.sleep(TAIL_SECONDS)
        # An attempt may have begun before this task ran, and have cancelled the scope of an earlier one. If it has
        # ended since, a later task like this one lingers for it.
        is_latest = not scope.cancelled_caught and self._linger is scope and self._attempt is None
        if is_latest and not self._closed:
            self._taken = ()
            await self.withdraw()


def _refusing(refuses: Refuses | None, avoid: frozenset[str]) -> Refuses:
    """Return the rule that refuses some peers beside those that ``refuses`` does."""

    def refuse(candidate: Candidate, now: float) -> str | None:
        if candidate.peer_id in avoid:
            return "this peer has met it lately, and meets another one first"
        return None if refuses is None else refuses(candidate, now)

    return refuse

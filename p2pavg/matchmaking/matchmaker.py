"""Matchmaking's I/O: records, join streams and timers that carry out :mod:`p2pavg.matchmaking.rules`."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import trio

from p2pavg.context import PeerContext
from p2pavg.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.group.candidate import Candidate, read_candidate, sign_candidate
from p2pavg.group.roster import Roster
from p2pavg.matchmaking.actions import (
    Actions,
    Close,
    Expect,
    Formed,
    GaveUp,
    Open,
    Renew,
    Report,
    Send,
    Settings,
)
from p2pavg.matchmaking.link import Link
from p2pavg.matchmaking.memory import Memory
from p2pavg.matchmaking.messages import PROTOCOL, Accept, Ask, Declined, Message, Nudge, Refuse, encode
from p2pavg.matchmaking.rules import Matchmaking
from p2pavg.net.blame import guarded
from p2pavg.net.framing import send_message
from p2pavg.net.transport import Stream
from p2pavg_dht import Record

logger = logging.getLogger(__name__)

RECORD_TTL_SECONDS = 30.0  # the record of a peer that died expires after this
ATTEMPT_SECONDS = 3500.0  # the signed candidate of an attempt is valid for an hour
OPEN_SECONDS = 5.0
# The record stays this long after an attempt. A training loop that steps again replaces it, which halves the calls.
LINGER_SECONDS = 2.0
_POLL_FIRST_SECONDS = 0.25
_POLL_MOST_SECONDS = 4.0
# A peer whose message raised an exception here is banned for so long, because it would send the message again.
FAULT_BAN_SECONDS = 600.0
MAX_BANNED = 1024  # peers; a banned peer can take a new identity at no cost, so more bans would not help


class Matchmaker:
    """Finds groups for one averager, one attempt at a time, and answers peers that ask between attempts."""

    def __init__(
        self,
        context: PeerContext,
        *,
        key: bytes,
        settings: Settings,
        codec: str,
        bandwidth: Callable[[], float],  # returns the Mbit/s for the next signed candidate
    ) -> None:
        self._context = context
        self._key = key
        self._settings = settings
        self._codec = codec
        self._bandwidth = bandwidth
        self._attempt: _Attempt | None = None
        self._linger = trio.CancelScope()
        self._published = False
        self._banned: dict[str, tuple[str, float]] = {}
        self._memory = Memory()

    @property
    def ready_peers(self) -> int:
        """Number of contributors known to be ready, this peer included."""
        return 1 if self._attempt is None else self._attempt.ready_peers

    def ban(self, peer_id: str, reason: str, seconds: float) -> None:
        """Ban a peer from all attempts that begin within ``seconds``."""
        self._banned.pop(peer_id, None)
        self._banned[peer_id] = (reason, trio.current_time() + seconds)
        if len(self._banned) > MAX_BANNED:
            del self._banned[next(iter(self._banned))]

    def finished_with(self, peer_ids: Iterable[str]) -> None:
        """Note that a round with these peers was finished; later attempts prefer them."""
        self._memory.finished_with(peer_id for peer_id in peer_ids if peer_id != self._context.signer.peer_id)

    def waits_for(self) -> str:
        """Return a sentence that says what the current attempt waits for; empty without an attempt."""
        return "" if self._attempt is None else self._attempt.waits_for()

    def _blame(self, peer_id: str, error: Exception) -> None:
        """Drop a peer whose message or record raised an exception."""
        reason = f"what it said raised {type(error).__name__} here"
        self.ban(peer_id, reason, FAULT_BAN_SECONDS)
        if self._attempt is not None:
            self._attempt.expel(peer_id, reason)

    def exchange_begun(self, group_id: bytes, peer_id: str) -> None:
        """Note that a peer has opened a stream of the exchange of an expected group."""
        if self._attempt is not None:
            self._attempt.exchange_begun(group_id, peer_id)

    async def find_group(
        self,
        *,
        weight: float,
        auxiliary: bool = False,
        state: bytes = b"",
        tags: Sequence[str] = (),
        metrics: Mapping[str, float] = MappingProxyType({}),
        norm: float = 0.0,
        target: int | None = None,
        on_report: Callable[[Report], None],
        on_expect: Callable[[bytes | None], None],
    ) -> Roster | GaveUp:
        """Return a committed roster with this peer in it, or the reason for which there is none.

        Args:
            weight: weight of this peer's contribution, in samples. A peer with 0 observes, or is an auxiliary.
            auxiliary: only reduce a share.
            state, tags, metrics, norm: see :class:`~p2pavg.group.candidate.Candidate`.
            target: number of members that this group aims at; ``None`` takes that of the settings.
            on_report: called at the end of each match timeout that passes without a group.
            on_expect: called with the group whose streams may arrive from now on.
        """
        if self._attempt is not None:
            raise RuntimeError("an attempt runs already")
        self._linger.cancel()
        settings = self._settings if target is None else replace(self._settings, target=target)
        outcome: Roster | GaveUp | Renew = Renew("the first attempt")
        try:
            while isinstance(outcome, Renew):
                me = self._sign(weight, auxiliary, state, tags, metrics, norm)
                self._attempt = self._begin(me, settings, on_report, on_expect)
                outcome = await self._attempt.run()
            return outcome
        finally:
            self._attempt = None
            self._context.nursery.start_soon(self._withdraw_unless_renewed)

    def _sign(
        self,
        weight: float,
        auxiliary: bool,
        state: bytes,
        tags: Sequence[str],
        metrics: Mapping[str, float],
        norm: float,
    ) -> Candidate:
        now = self._context.wall_clock()
        return sign_candidate(
            self._context.signer,
            key=self._key,
            deadline=now + (ATTEMPT_SECONDS if auxiliary else self._settings.match_timeout),
            expiration_time=now + ATTEMPT_SECONDS + 60.0,
            weight=weight,
            bandwidth=self._bandwidth(),
            codec=self._codec,
            auxiliary=auxiliary,
            addresses=self._context.transport.addresses[:8],
            state=state,
            tags=tags,
            metrics=metrics,
            norm=norm,
        )

    def _begin(
        self,
        me: Candidate,
        settings: Settings,
        on_report: Callable[[Report], None],
        on_expect: Callable[[bytes | None], None],
    ) -> _Attempt:
        now = self._context.wall_clock()
        rules = Matchmaking(me, settings, now, self._memory)
        for peer_id, (reason, until) in list(self._banned.items()):
            if until > trio.current_time():
                rules.state.peers.ban(peer_id, reason)
            else:
                del self._banned[peer_id]
        self._published = True
        return _Attempt(self._context, me, rules, now, on_report, on_expect, self._blame)

    async def serve(self, stream: Stream, message: Ask | Nudge) -> None:
        """Serve an inbound stream that begins with ``message``, until its conversation ends."""
        if message.me.peer_id != stream.remote or message.me.record.key != self._key:
            raise RemoteProtocolError(f"{stream.remote} sent a record that is not its own")
        attempt = self._attempt
        if attempt is None:
            if isinstance(message, Ask):
                await send_message(stream, encode(Declined("not looking for a group", over=True)))
                await stream.aclose()
        elif isinstance(message, Nudge):
            attempt.nudged(message.me)
        else:
            await attempt.serve(stream, message.me)

    async def withdraw(self) -> None:
        """Withdraw the readiness record, if there is one."""
        self._linger.cancel()
        if self._published:
            self._published = False
            await self._context.records.withdraw(self._key)

    async def _withdraw_unless_renewed(self) -> None:
        with trio.CancelScope() as self._linger:
            await trio.sleep(LINGER_SECONDS)
        if not self._linger.cancelled_caught and self._attempt is None:
            await self.withdraw()


class _Attempt:
    """One :class:`Matchmaking` and its join streams."""

    def __init__(
        self,
        context: PeerContext,
        me: Candidate,
        rules: Matchmaking,
        now: float,
        on_report: Callable[[Report], None],
        on_expect: Callable[[bytes | None], None],
        on_fault: Callable[[str, Exception], None],
    ) -> None:
        self._context = context
        self._me = me
        self._rules = rules
        self._on_fault = on_fault
        self._on_report = on_report
        self._on_expect = on_expect
        self._started = (now, trio.current_time())
        self._upward: dict[str, Link] = {}
        self._downward: dict[str, Link] = {}
        self._opening: dict[str, trio.CancelScope] = {}
        self._changed = trio.Event()
        self._done = trio.Event()
        self._outcome: Roster | GaveUp | Renew | None = None
        self._nursery: trio.Nursery | None = None

    @property
    def ready_peers(self) -> int:
        """Number of contributors known to be ready, this peer included."""
        return self._rules.ready_peers

    def waits_for(self) -> str:
        """Return a sentence that says what the attempt waits for."""
        return self._rules.waits_for()

    def expel(self, peer_id: str, reason: str) -> None:
        """Drop a peer whose message raised an exception. The rules may have handled half of the message."""
        left: Actions = []
        with guarded(peer_id, self._abandon, what="the loss"):
            left = self._rules.expel(peer_id, reason, self._now())
        self._do(left)

    def _abandon(self, peer_id: str, error: Exception) -> None:
        """End this attempt: the rules raise even without the peer. The next attempt starts afresh, without it."""
        self._outcome = GaveUp(f"what {peer_id} said raised {type(error).__name__} here")
        self._done.set()

    def _now(self) -> float:
        """Return the wall-clock time in seconds, which does not jump or run backwards within the attempt."""
        wall, monotonic = self._started
        return wall + trio.current_time() - monotonic

    async def run(self) -> Roster | GaveUp | Renew:
        """Run until a group is committed, the attempt gives up, or a new attempt is to begin."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._announce)
                nursery.start_soon(self._keep_time)
                try:
                    with trio.move_on_after(ATTEMPT_SECONDS):
                        await self._done.wait()
                finally:
                    self._nursery = None  # streams outlive the attempt, but their messages start no new tasks
                    nursery.cancel_scope.cancel()
        finally:
            self._do(self._rules.stop("the peer has stopped looking for a group"))
            if not isinstance(self._outcome, Roster):
                self._on_expect(None)
        return self._outcome or GaveUp(f"no group within {ATTEMPT_SECONDS:.0f} s")

    def nudged(self, candidate: Candidate) -> None:
        """Handle the nudge of an earlier candidate."""
        actions: Actions = []
        with guarded(candidate.peer_id, self._on_fault, what="a nudge"):
            actions = self._rules.nudged(candidate, self._now())
        self._do(actions)

    def exchange_begun(self, group_id: bytes, peer_id: str) -> None:
        """Note that a member has begun the exchange: it has heard of a commit that this peer may not know yet."""
        self._do(self._rules.exchange_begun(group_id, peer_id))

    async def serve(self, stream: Stream, candidate: Candidate) -> None:
        """Serve the join stream of a peer that asks to join."""
        old = self._downward.pop(candidate.peer_id, None)
        if old is not None:
            old.close()
            self._do(self._rules.lost(candidate.peer_id, "it asked again", self._now()))
        link = self._downward[candidate.peer_id] = Link(stream)
        actions: Actions = []
        with guarded(candidate.peer_id, self._on_fault):
            actions = self._rules.asked(candidate, self._now())
        self._do(actions)
        await self._run_link(link, candidate.peer_id, upward=False)

    async def _run_link(self, link: Link, peer_id: str, *, upward: bool) -> None:
        """Pass messages to the rules while the link is the current one with that peer in that direction."""
        links = self._upward if upward else self._downward

        def told(message: Message) -> None:
            if links.get(peer_id) is link:
                tell = self._rules.told_by_leader if upward else self._rules.told
                actions: Actions = []
                with guarded(peer_id, self._on_fault):
                    actions = tell(peer_id, message, self._now())
                self._do(actions)

        def lost(reason: str) -> None:
            if links.get(peer_id) is link:
                del links[peer_id]
                lose = self._rules.lost_leader if upward else self._rules.lost
                self._do(lose(peer_id, reason, self._now()))

        await link.run(told, lost, self._on_fault)

    async def _announce(self) -> None:
        """Publish this peer's record, which returns the other peers' records; then poll at growing intervals."""
        records = self._context.records
        published = await records.publish(self._me.record.key, self._me.record.value, ttl=RECORD_TTL_SECONDS)
        self._read(published.records)
        pause = _POLL_FIRST_SECONDS
        while True:
            await trio.sleep(pause)
            self._read(await records.find(self._me.record.key))
            pause = min(2 * pause, _POLL_MOST_SECONDS)

    def _read(self, records: Iterable[Record]) -> None:
        for record in records:
            try:
                with guarded(
                    record.publisher, self._on_fault, what="a record", expected=(RemoteProtocolError,)
                ):
                    self._rules.state.learn(read_candidate(record), self._now())
            except RemoteProtocolError as error:
                logger.info("%s published an invalid candidate: %s", record.publisher, error)
        self._do(self._rules.discovered((), self._now()))

    async def _keep_time(self) -> None:
        while True:
            self._changed = trio.Event()
            wait = self._rules.wake_at() - self._now()
            with trio.move_on_after(max(wait, 0.0)) as scope:
                await self._changed.wait()
            if scope.cancelled_caught:
                self._do(self._rules.tick(self._now()))

    def _do(self, actions: Actions) -> None:
        self._changed.set()
        for action in actions:
            logger.debug("%s: %s", self._me.peer_id, action)
            match action:
                case Send(peer_id, message):
                    self._send(peer_id, message)
                case Close(peer_id, _, upward):
                    self._close(peer_id, upward=upward)
                case Open(candidate, Ask() as ask):
                    self._start(self._ask, candidate, ask)
                case Open(candidate, Nudge() as nudge):
                    self._start(self._nudge, candidate, nudge)
                case Expect(group_id):
                    self._on_expect(group_id)
                case Report():
                    self._on_report(action)
                case GaveUp() | Renew():
                    self._outcome = action
                    self._done.set()
                case Formed(roster):
                    self._outcome = roster
                    self._done.set()

    def _start(self, task: Callable[..., Awaitable[None]], *args: object) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(task, *args)

    def _send(self, peer_id: str, message: Message) -> None:
        links = self._upward if isinstance(message, Accept | Refuse) else self._downward
        if (link := links.get(peer_id)) is not None:
            link.send(message)

    def _close(self, peer_id: str, *, upward: bool) -> None:
        if upward and (opening := self._opening.pop(peer_id, None)) is not None:
            opening.cancel()
        link = (self._upward if upward else self._downward).pop(peer_id, None)
        if link is not None:
            link.close()

    async def _ask(self, candidate: Candidate, ask: Ask) -> None:
        peer_id = candidate.peer_id
        reason = "it could not be asked"
        with trio.CancelScope() as scope:
            self._opening[peer_id] = scope
            try:
                stream = await self._context.transport.open_stream(
                    peer_id, PROTOCOL, addresses=candidate.addresses, timeout=OPEN_SECONDS
                )
            except UnreachableError as error:
                reason = str(error)
            else:
                if self._opening.get(peer_id) is not scope:  # the rules closed it while it was opening
                    await stream.reset()
                    return
                link = self._upward[peer_id] = Link(stream)
                link.send(ask)
                # This nursery outlives the attempt, so queued messages are still sent.
                self._context.nursery.start_soon(partial(self._run_link, link, peer_id, upward=True))
                return
            finally:
                if self._opening.get(peer_id) is scope:
                    del self._opening[peer_id]
            self._do(self._rules.lost_leader(peer_id, reason, self._now(), reachable=False))

    async def _nudge(self, candidate: Candidate, nudge: Nudge) -> None:
        try:
            stream = await self._context.transport.open_stream(
                candidate.peer_id, PROTOCOL, addresses=candidate.addresses, timeout=OPEN_SECONDS
            )
            await send_message(stream, encode(nudge))
            await stream.aclose()
        except (UnreachableError, StreamBrokenError, ClosedError) as error:
            logger.debug("%s was not nudged: %s", candidate.peer_id, error)
            self._do(self._rules.not_nudged(candidate.peer_id, str(error), self._now()))

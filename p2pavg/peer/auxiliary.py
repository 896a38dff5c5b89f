"""A peer that trains nothing and helps those that do: it reduces a share of each group that takes it in."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from functools import lru_cache
from typing import Any

import trio

from p2pavg.allreduce.context import run_context
from p2pavg.base.limits import (
    CALM_LOOK_SECONDS,
    EXCHANGE_SECONDS,
    FAREWELL_SECONDS,
    MAX_AUXILIARY_ELEMENTS,
    TAIL_SECONDS,
)
from p2pavg.group.aggregation import read_aggregation
from p2pavg.group.bandwidth import BandwidthMeter
from p2pavg.group.candidate import ready_key
from p2pavg.group.roster import ShareCutter
from p2pavg.matchmaking.actions import Settings
from p2pavg.matchmaking.matchmaker import Matchmaker
from p2pavg.net.limits.rate import RateLimit
from p2pavg.peer.host import Host, JoinedRun
from p2pavg.peer.statuses import HeardStatuses
from p2pavg.peer.watched import Telemetry
from p2pavg.round.exchange import ExchangeOutcome
from p2pavg.round.reports import RoundReports
from p2pavg.round.roles import Auxiliary
from p2pavg.round.round import Round
from p2pavg.round.rounds import Rounds, RoundSettings
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.membership.certificate import Role
from p2pavg.runs.membership.membership import RunAccess
from p2pavg.runs.records.run_entry import RunEntry, read_entries, run_key
from p2pavg.runs.records.spread_records import find_sample
from p2pavg.telemetry.status import TOPIC
from p2pavg_compression import resolve_codec

# The rounds that an auxiliary helps: those that run, and the totals of those that have ended.

LEAVES = "this peer leaves"


class HelpedRounds:
    """An auxiliary's rounds of one run, as its owner sees them.

    Args:
        peer_id: this peer's id.
    """

    def __init__(self, peer_id: str) -> None:
        self.rounds = 0
        """Rounds that ended with a result."""
        self.failed_rounds = 0
        self.elements = 0
        """Elements that this peer has reduced, in all rounds together."""
        self.bytes_sent = 0
        self.bytes_received = 0
        self.round_peers: tuple[str, ...] = ()
        """Ids of the other members of the last round."""
        self.run_peers: frozenset[str] = frozenset()
        """Ids of the other peers that have published an entry of the run."""
        self.heards: HeardStatuses | None = None
        """The statuses that peers of the run publish; ``None`` until the run was joined."""
        self.looked = trio.Event()
        """Is set when :attr:`run_peers` is known."""
        self._peer_id = peer_id
        self._running: set[Round[Any]] = set()
        self._leaving = trio.Event()
        self._changed = trio.Event()

    @property
    def is_exchanging(self) -> bool:
        """True while a round that runs has its group."""
        return any(each.is_exchanging for each in self._running)

    @property
    def is_leaving(self) -> bool:
        """True if no further round begins."""
        return self._leaving.is_set()

    def leave(self) -> None:
        """Begin no further round, and end those that have no group yet."""
        self._leaving.set()
        for each in tuple(self._running):
            each.leave(LEAVES)

    async def left(self) -> None:
        """Wait until :meth:`leave` was called and no round runs any more."""
        await self._leaving.wait()
        while self._running:
            await self._changed.wait()

    @contextmanager
    def running(self, begun: Round[Any]) -> Iterator[None]:
        """Count a round as running until the end of the block."""
        self._running.add(begun)
        try:
            yield
        finally:
            self._running.discard(begun)
            self._changed.set()
            self._changed = trio.Event()

    def ended(self, outcome: ExchangeOutcome) -> None:
        """Add a round to the totals."""
        roster = outcome.roster
        self.bytes_sent += outcome.bytes_sent
        self.bytes_received += outcome.bytes_received
        self.round_peers = tuple(m.peer_id for m in roster.members if m.peer_id != self._peer_id)
        if outcome.verdict is not None:
            self.failed_rounds += 1
            return
        self.rounds += 1
        self.elements += roster.shares[roster.position(self._peer_id)]


logger = logging.getLogger(__name__)

# Different schemas of one run that are helped at once; the run's peers say what theirs are, and strangers may lie.
MAX_SCHEMAS = 4
MAX_NAMES = 1024
"""Pairs of a codec and a rule that were read and are kept: four times the publishers of one key."""


async def assist(
    host: Host,
    run_id: str,
    *,
    bandwidth: float | None = None,
    max_upload_mbps: float | None = None,
    max_download_mbps: float | None = None,
    access: RunAccess | None = None,
    name: str = "",
    helping: HelpedRounds | None = None,
) -> None:
    """Take part in rounds of a run with weight 0, until cancelled, or until ``helping.leave()`` and the rounds' end.

    Args:
        host: this peer, a :class:`p2pavg.Peer`.
        bandwidth: what this peer can send and receive, in Mbit/s; its share of a group's vector follows from it.
            ``None``: measured in rounds.
        max_upload_mbps: Mbit/s that it sends at most in all rounds of the run together, headers included; ``None`` is
            without limit.
        max_download_mbps: Mbit/s that it receives at most, likewise.
        access: keys and certificate of a run that has an authority; ``None``: the run is open to anybody.
        name: of this peer, for people; see :class:`p2pavg.AveragingConfig`.
        helping: counts the rounds, and ends them.

    Raises:
        ConfigError: an argument is out of the range that :class:`p2pavg.AveragingConfig` allows.
    """
    config = AveragingConfig(
        run_id=run_id,
        bandwidth=bandwidth,
        max_upload_mbps=max_upload_mbps,
        max_download_mbps=max_download_mbps,
        access=access,
        name=name,
    )
    helper = _Assistance(host, config, HelpedRounds(host.id) if helping is None else helping)
    with closing(helper.run):
        await helper.help_rounds()


class _Assistance:
    """One auxiliary in one run."""

    def __init__(self, host: Host, config: AveragingConfig, helping: HelpedRounds) -> None:
        self._host = host
        self._config = config
        self._helping = helping
        # For the rounds of all schemas together: they share one link.
        self._upload, self._download = RateLimit(config.max_upload_mbps), RateLimit(config.max_download_mbps)
        self.run = JoinedRun(host, config.run_id, config.access)

    async def help_rounds(self) -> None:
        """Look for schemas that peers of the run average, and help the rounds of each."""
        host, helping, run_id, records = self._host, self._helping, self._config.run_id, self.run.records
        # The schemas whose groups take this peer in, by their ready keys.
        helped: dict[bytes, trio.CancelScope] = {}
        async with (
            trio.open_nursery() as tails,
            trio.open_nursery() as nursery,
            self._publishing(nursery) as reports,
        ):
            missing: set[bytes] = set()
            told = ""
            nursery.start_soon(self.run.run)
            nursery.start_soon(self._end_when_left, nursery.cancel_scope, tails.cancel_scope)
            while True:
                published = read_entries(
                    await find_sample(records.find, run_key(run_id), host.id, records.network_size)
                )
                # Whatever the entries say: the owner shows how many peers the run has.
                helping.run_peers = frozenset(published) - {host.id}
                helping.looked.set()
                entries, unknown = most_common(published)
                # Once, and not at each look.
                if unknown and unknown != told:
                    logger.warning("%s", unknown)
                told = unknown
                # By the key, not by the schema: peers that change their rules look for groups under another key.
                wanted = {
                    ready_key(run_id, schema_hash, entry.rule, entry.aggregation): entry
                    for schema_hash, entry in entries.items()
                }
                gone = helped.keys() - wanted.keys()
                # Missing in two looks in a row: one look is a sample, and a group may be in the midst of a round.
                # Without room for both, at once: strangers that publish others each time must not multiply what this
                # peer helps.
                has_room = len(helped.keys() | wanted.keys()) <= MAX_SCHEMAS
                for key in gone & missing if has_room else gone:
                    helped.pop(key).cancel()
                missing = gone - missing
                for key, entry in wanted.items():
                    # An averager of this same peer may answer under the key, and a key has one matchmaker.
                    if key not in helped and host.registry.find(key) is None:
                        helped[key] = scope = trio.CancelScope()
                        nursery.start_soon(self._help_schema, key, entry, scope, tails, reports)
                await trio.sleep(CALM_LOOK_SECONDS)

    @asynccontextmanager
    async def _publishing(self, nursery: trio.Nursery) -> AsyncIterator[RoundReports]:
        """Publish this peer's status and read the others', as long as the block runs; yield what makes round events."""
        # Each schema has a meter of its own, and none is that of the whole link.
        watched = Telemetry(self._host, self._config, self.run, nursery, BandwidthMeter(), Role.AUXILIARY)
        board = watched.boards.open(TOPIC, CALM_LOOK_SECONDS)
        self._helping.heards = HeardStatuses(board, self._host.context)
        try:
            yield watched.reports
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + FAREWELL_SECONDS):
                async with trio.open_nursery() as withdrawing:
                    watched.boards.close(withdrawing)
            watched.statuses.close()

    async def _end_when_left(self, rounds: trio.CancelScope, tails: trio.CancelScope) -> None:
        await self._helping.left()
        # The rounds have ended here, and other members may still ask how.
        tails.deadline = trio.current_time() + TAIL_SECONDS
        rounds.cancel()

    async def _help_schema(
        self, key: bytes, entry: RunEntry, scope: trio.CancelScope, tails: trio.Nursery, reports: RoundReports
    ) -> None:
        host, config = self._host, self._config
        codec = resolve_codec(entry.codec)
        aggregation = read_aggregation(entry.aggregation)
        cutter = ShareCutter(entry.elements, codec.granularity, aggregation.topology)
        # One meter a schema, because a meter sees one round at a time.
        meter = BandwidthMeter(
            given_mbps=config.bandwidth,
            max_upload_mbps=config.max_upload_mbps,
            max_download_mbps=config.max_download_mbps,
        )
        matchmaker = Matchmaker(
            host.context,
            key=key,
            settings=Settings(
                target=entry.group_size,
                minimum=2,
                match_timeout=EXCHANGE_SECONDS,
                cutter=cutter,
                choose_observers=None,  # the members' rule is unknown here
                max_share=MAX_AUXILIARY_ELEMENTS,
                refuses=self.run.refuses,
            ),
            codec=codec.name,
            meter=meter,
            records=self.run.records,
        )
        rounds = Rounds(
            run_context(
                host.context,
                host.lobby,
                codec=codec,
                aggregation=aggregation,
                group_size=entry.group_size,
                # An entry is a stranger's claim, and must not decide how much memory is taken.
                elements=min(entry.elements, MAX_AUXILIARY_ELEMENTS),
                meter=meter,
                cutter=cutter,
                upload=self._upload,
                download=self._download,
            ),
            matchmaker,
            RoundSettings(
                run_id=config.run_id,
                target=entry.group_size,
                minimum=2,
                exchange_timeout=EXCHANGE_SECONDS,
                max_share=MAX_AUXILIARY_ELEMENTS,
            ),
            tails,
            self.run,
        )
        host.registry.add(key, matchmaker)
        self.run.matchmakers.append(matchmaker)
        logger.info("helping peers that average %d tensors of %d elements", entry.tensors, entry.elements)
        try:
            with scope:
                while not self._helping.is_leaving:
                    one = Round(rounds, Auxiliary(host.id, reports, self._helping.ended))
                    with self._helping.running(one):
                        await one.run()
        finally:
            # Also when cancelled: a matchmaker that looks for no group would answer those that ask under the key.
            host.registry.remove(key)
            self.run.matchmakers.remove(matchmaker)


def most_common(entries: dict[str, RunEntry]) -> tuple[dict[bytes, RunEntry], str]:
    """Return one entry a schema, those of the most peers first, and a sentence about codecs or rules that are unknown.

    The sentence is empty if this version has them all. It is one for all entries, since strangers may publish hundreds
    of them.
    """
    chosen: dict[bytes, RunEntry] = {}
    unknown = ""
    # By the number of peers that say the same: an attacker needs as many identities to push a schema out.
    for entry, _ in Counter(entries.values()).most_common():
        if len(chosen) == MAX_SCHEMAS:
            break
        if entry.schema_hash in chosen:
            continue
        # An unknown one takes no place: a later entry of the same schema may be one that this version can help.
        if is_known(entry.codec, entry.aggregation):
            chosen[entry.schema_hash] = entry
        elif not unknown:
            unknown = (
                f"peers of the run use the codec {entry.codec!r} and combine by {entry.aggregation!r}, and this version"
                " does not have both"
            )
    return chosen, unknown


@lru_cache(maxsize=MAX_NAMES)
def is_known(codec: str, aggregation: str) -> bool:
    """Return whether this version has a codec and a way to combine contributions, as other peers name them.

    Refusals are kept too: the same entries are read again at each look.
    """
    try:
        resolve_codec(codec)
        read_aggregation(aggregation)
    except ValueError:
        return False
    return True

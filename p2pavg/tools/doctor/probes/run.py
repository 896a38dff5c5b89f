"""Facts of a run, from the records of its peers, and the peers that cannot be reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import trio
from msgspec.structs import replace

from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.messages import decoded_all
from p2pavg.group.candidate import Candidate, read_candidate, ready_key
from p2pavg.group.places.levels import slot_at
from p2pavg.matchmaking.messages import PROTOCOL as MATCH_PROTOCOL
from p2pavg.net.transport import Transport
from p2pavg.optim.coordination.word import TOPIC, RecipeRecord
from p2pavg.peer.peer import Peer
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.membership.certificate import refusal
from p2pavg.runs.membership.revocation import RevocationList, no_revocations, read_revocations
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.runs.membership.sealing import MemberRecord, sealed_key, unseal
from p2pavg.runs.records.board import board_key
from p2pavg.runs.records.notices import revocations_of
from p2pavg.runs.records.run_entry import RunEntry, read_entries, run_key
from p2pavg.runs.records.spread_records import find_sample
from p2pavg.tools.doctor.probes.addresses import QUICK_PROBE_SECONDS
from p2pavg.tools.doctor.rules.run import FoundRun
from p2pavg_dht import Record

MAX_RECORDS = 512
"""Records of one key that are read; hostile keepers can send thousands."""
MAX_KINDS = 3  # of entries whose ready peers are looked for
MAX_REACHED = 8  # ready peers that are dialled


class RunReader:
    """Reads the records of a run without being a member: a run file is enough.

    Args:
        file: the run file; ``None`` for a run that is open to anybody.
    """

    def __init__(self, peer: Peer, run_id: str, file: RunFile | None) -> None:
        self._peer = peer
        self._run_id = run_id
        self._file = file
        self._now = peer.context.wall_clock
        self.revocations: RevocationList | None = None
        """The newest list of revoked certificates; ``None`` before it was looked for, and without a run file."""
        self._refused: dict[str, str] = {}

    async def read(self) -> FoundRun:
        """Return the run as its records describe it."""
        if self._file is not None:
            self.revocations = await self._newest_revocations(self._file)
        entries = read_entries(
            await find_sample(
                self._find, run_key(self._run_id), self._peer.id, self._peer.records.network_size
            )
        )
        said = await self._find(board_key(self._run_id, TOPIC))
        config = None if self._file is None else AveragingConfig(**self._file.settings)
        return FoundRun(
            run_id=self._run_id,
            known=len(self._peer.records.contacts),
            entries=entries,
            ready=await self._ready(entries),
            refused=self._refused,
            words=decoded_all({record.publisher: record.value for record in said}, RecipeRecord),
            sealed=self._file is not None,
            codec=None if config is None else config.codec.name,
            aggregation=None if config is None else config.aggregation.text,
        )

    async def _ready(self, entries: Mapping[str, RunEntry]) -> tuple[Candidate, ...]:
        """Return the peers that are ready for a round, of the most common kinds of entries."""
        kinds = Counter((each.schema_hash, each.rule, each.aggregation) for each in entries.values())
        found: dict[str, Candidate] = {}
        for kind, _ in kinds.most_common(MAX_KINDS):
            key, network = ready_key(self._run_id, *kind), self._peer.records.network_size
            slot = slot_at(self._now())
            for record in await find_sample(self._find, key, self._peer.id, network, slot=slot):
                try:
                    found[record.publisher] = read_candidate(record)
                except RemoteProtocolError as error:
                    self._refused[record.publisher] = str(error)
        return tuple(found.values())

    async def _find(self, key: bytes) -> list[Record]:
        if self._file is None:
            return list(await self._peer.records.find(key))[:MAX_RECORDS]
        stored = sealed_key(self._file.secret, key)
        opened = []
        for record in (await self._peer.records.find(stored))[:MAX_RECORDS]:
            await trio.lowlevel.checkpoint()  # each has signatures to check
            try:
                value = self._open(self._file, record)
            except RemoteProtocolError as error:
                self._refused[record.publisher] = str(error)
            else:
                opened.append(replace(record, value=value))
        return opened

    def _open(self, file: RunFile, record: Record) -> bytes:
        """Return the value of a member's record. Raise RemoteProtocolError if its publisher is no member."""
        content = unseal(file.secret, record.key, record.publisher, record.value)
        found = MemberRecord.decode(content)
        why = refusal(
            found.certificate,
            authority=file.authority,
            peer_id=record.publisher,
            now=self._now(),
            revoked=self.revocations.identifiers if self.revocations is not None else (),
        )
        if why is not None:
            raise RemoteProtocolError(why)
        return found.value

    async def _newest_revocations(self, file: RunFile) -> RevocationList:
        newest = no_revocations(file.authority)
        for record in await self._find(revocations_of(file.authority).key):
            try:
                found = read_revocations(record.value, file.authority)
            except RemoteProtocolError:  # it hides no list: the other members publish it too
                continue
            newest = max(newest, found, key=lambda each: each.number)
        return newest


async def unreached(
    transport: Transport, ready: Sequence[Candidate], own_id: str | None
) -> tuple[tuple[Candidate, str], ...]:
    """Open a stream to a few of the ready peers, as a peer that asks to join does. Return those that are not reached.

    Args:
        own_id: the id of the examined peer, which is not dialled.
    """
    found: list[tuple[Candidate, str]] = []

    async def reach(candidate: Candidate) -> None:
        try:
            stream = await transport.open_stream(
                candidate.peer_id, MATCH_PROTOCOL, addresses=candidate.addresses, timeout=QUICK_PROBE_SECONDS
            )
        except (UnreachableError, StreamBrokenError, ClosedError) as error:
            found.append((candidate, str(error)))
        else:
            await stream.reset()

    others = [each for each in ready if each.peer_id != own_id]
    async with trio.open_nursery() as nursery:
        for candidate in others[:MAX_REACHED]:
            nursery.start_soon(reach, candidate)
    return tuple(found)

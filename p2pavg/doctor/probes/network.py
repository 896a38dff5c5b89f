"""Facts that other peers tell: their clocks and versions, the run, this machine's reachability, and the bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import trio

from p2pavg.allreduce.messages import PROTOCOL as EXCHANGE_PROTOCOL
from p2pavg.config import AveragingConfig
from p2pavg.doctor.rules.network import Reach
from p2pavg.doctor.rules.run import Measured, Run
from p2pavg.encoding import unpack
from p2pavg.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.evidence.messages import PROTOCOL as EVIDENCE_PROTOCOL
from p2pavg.matchmaking.messages import PROTOCOL as MATCH_PROTOCOL
from p2pavg.membership.certificate import refusal
from p2pavg.membership.revocation import RevocationList, no_revocations, read_revocations
from p2pavg.membership.run_file import RunFile
from p2pavg.membership.sealing import sealed_key, unseal
from p2pavg.net.transport import Stream, Transport
from p2pavg.optim.word import TOPIC, read_words
from p2pavg.peer import Peer
from p2pavg.records.bandwidth import PROTOCOL as BANDWIDTH_PROTOCOL
from p2pavg.records.bandwidth import measure
from p2pavg.records.board import board_key
from p2pavg.records.greeting import Greeter
from p2pavg.records.hello import Heard
from p2pavg.records.revocations import revocations_key
from p2pavg.records.run_entry import read_entries, run_key
from p2pavg.state.messages import PROTOCOL as STATE_PROTOCOL
from p2pavg_dht import PROTOCOL as RECORDS_PROTOCOL
from p2pavg_dht import Contact, Record

PROTOCOLS = (RECORDS_PROTOCOL, MATCH_PROTOCOL, EXCHANGE_PROTOCOL, EVIDENCE_PROTOCOL, STATE_PROTOCOL)
"""The protocols whose versions are compared with those of other peers."""

MEASURED_PEERS = 3
MEASURE_SECONDS = 4.0  # of one peer
STREAM_SECONDS = 2.0
POLL_SECONDS = 0.2
MAX_ERROR_CHARS = 200
MAX_RECORDS = 512
"""Records of one key that are read; hostile keepers can send thousands."""


async def ask_clocks(peer: Peer, wall_clock: Callable[[], float]) -> tuple[Heard, ...]:
    """Return the answers of a few peers.

    Args:
        wall_clock: this machine's clock, uncorrected.
    """
    greeter = Greeter(
        peer.context.transport,
        wall_clock=wall_clock,
        protocols=PROTOCOLS,
        runs=lambda: 0,
        contacts=lambda: peer.records.contacts,
    )
    return await greeter.look()


# ------------------------------------------------------------------ the run


class RunReader:
    """Reads the records of a run without being a member: a run file is enough.

    Args:
        file: the run file; ``None`` for a run that is open to anybody.
        now: wall clock, seconds, corrected by what other peers say.
    """

    def __init__(self, peer: Peer, run_id: str, file: RunFile | None, now: Callable[[], float]) -> None:
        self._peer = peer
        self._run_id = run_id
        self._file = file
        self._now = now
        self.revocations: RevocationList | None = None
        """The newest list of revoked certificates; ``None`` before it was looked for, and without a run file."""
        self._refused: dict[str, str] = {}

    async def read(self) -> Run:
        """Return the run as its records describe it."""
        if self._file is not None:
            self.revocations = await self._newest_revocations(self._file)
        entries = read_entries(await self._find(run_key(self._run_id)))
        said = await self._find(board_key(self._run_id, TOPIC))
        return Run(
            run_id=self._run_id,
            known=len(self._peer.records.contacts),
            entries=entries,
            refused=self._refused,
            words=read_words({record.publisher: record.value for record in said}),
            sealed=self._file is not None,
            **_settings(self._file),
        )

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
        certificate, value = unpack(content, bytes, bytes)
        why = refusal(
            certificate,
            authority=file.authority,
            peer_id=record.publisher,
            now=self._now(),
            revoked=self.revocations.serials if self.revocations is not None else (),
        )
        if why is not None:
            raise RemoteProtocolError(why)
        return bytes(value)

    async def _newest_revocations(self, file: RunFile) -> RevocationList:
        newest = no_revocations(file.authority)
        for record in await self._find(revocations_key(self._run_id)):
            try:
                found = read_revocations(record.value, file.authority)
            except (
                RemoteProtocolError
            ):  # a member that publishes no list hides none: the others publish it too
                continue
            newest = max(newest, found, key=lambda each: each.number)
        return newest


def _settings(file: RunFile | None) -> dict[str, Any]:
    if file is None:
        return {}
    config = AveragingConfig(**file.settings)
    return {"codec": config.codec.name, "aggregation": config.aggregation.text}


# ------------------------------------------------------------------ reachability and bandwidth


async def wait_for_reach(transport: Transport, seconds: float) -> Reach | None:
    """Return the reachability as soon as it is known, or what is known of it after ``seconds``."""
    with trio.move_on_after(seconds):
        while not _is_known(_reach_of(transport)):  # noqa: ASYNC110 - a transport does not tell of changes
            await trio.sleep(POLL_SECONDS)
    return _reach_of(transport)


def _is_known(reach: Reach | None) -> bool:
    return reach is not None and reach.kind != "unknown"


def _reach_of(transport: Transport) -> Reach | None:
    found = getattr(transport, "reachability", None)
    if found is None:
        return None
    return Reach(kind=str(found.kind), sentence=found.sentence, outer_hosts=tuple(found.outer_hosts))


async def measure_some(peer: Peer, members: Collection[str]) -> list[Measured]:
    """Measure the bandwidth to three peers, one after the other: members of the run first."""
    contacts = sorted(peer.records.contacts, key=lambda contact: contact.peer_id not in members)
    transport = peer.context.transport
    return [await _measure(transport, contact) for contact in contacts[:MEASURED_PEERS]]


async def _measure(transport: Transport, contact: Contact) -> Measured:
    peer_id, addresses = contact.peer_id, contact.addresses
    stream: Stream | None = None
    try:
        with trio.move_on_after(MEASURE_SECONDS):
            stream = await transport.open_stream(
                peer_id, BANDWIDTH_PROTOCOL, addresses=addresses, timeout=STREAM_SECONDS
            )
            found = await measure(stream)
            return Measured(
                peer_id=peer_id, up_mbps=found.up_mbps, down_mbps=found.down_mbps, seconds=found.seconds
            )
    except (UnreachableError, StreamBrokenError, RemoteProtocolError, ClosedError) as error:
        return Measured(peer_id=peer_id, error=str(error)[:MAX_ERROR_CHARS])
    finally:
        if stream is not None:
            await stream.reset()
    return Measured(peer_id=peer_id, error=f"no result within {MEASURE_SECONDS:.0f} s; the link is slow")

"""The processor time that a stranger takes by a first message, beside the processor time that sending it costs.

One process is a peer that serves every protocol (``strangers_worker``). This process is the stranger: it has prepared
its messages, and speaks through this project's own transport. Each figure is (processor seconds of the peer) /
(processor seconds of the stranger), for a number of messages of one kind, one after another on streams or connections
of their own. Each process' own time is counted, all threads together; what the peer does by itself in the same time is
subtracted. Each row is measured at a fresh peer whose budgets are full, and at one whose budgets are used up.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import trio

from p2pavg.allreduce.messages import PROTOCOL as EXCHANGE_PROTOCOL
from p2pavg.allreduce.messages import Lane, LaneHeader
from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.messages import pack
from p2pavg.group.candidate import Candidate, sign_candidate
from p2pavg.group.roster import Roster
from p2pavg.matchmaking import messages as matching
from p2pavg.net.lanes import halfway as lanes
from p2pavg.net.lanes.certificates import OwnCertificate
from p2pavg.net.libp2p.transport import Libp2pTransport, open_libp2p_transport
from p2pavg.net.nat.punch import plan as punches
from p2pavg.net.nat.reach import service as reaching
from p2pavg.net.nat.reach.options import ONLY_ASKS
from p2pavg.net.nat.relay import messages as relays
from p2pavg.net.transport import receive_message, send_message
from p2pavg.runs.records.bandwidth import PROTOCOL as BANDWIDTH_PROTOCOL
from p2pavg.runs.records.bandwidth import BandwidthQuestion
from p2pavg.runs.records.hello import PROTOCOL as HELLO_PROTOCOL
from p2pavg.runs.records.hello import QUESTION as HELLO_QUESTION
from p2pavg.runs.records.invitations import PROTOCOL as INVITE_PROTOCOL
from p2pavg.state.messages import PROTOCOL as STATE_PROTOCOL
from p2pavg.state.messages import SessionHello, state_key
from p2pavg.tools.control.messages import Question, encode_question
from p2pavg.verification.evidence.accusation import PROTOCOL as EVIDENCE_PROTOCOL
from p2pavg.verification.evidence.accusation import EvidenceRequest, accusations_key
from p2pavg_dht import PROTOCOL as RECORDS_PROTOCOL
from p2pavg_dht import Ed25519Signer, sign_record
from p2pavg_dht.messages import Find, Locate, Store
from p2pavg_dht.messages import encode as encode_records
from scripts.benchmarks.figures import Report
from scripts.benchmarks.strangers_worker import RUN

NAME = "strangers"
ROOT = Path(__file__).resolve().parents[2]
SEED = bytes([9]) * 32
ANSWER_SECONDS = 1.0
"""A peer that says nothing within this has taken what it takes."""
BUDGETS = ("usual", "spent")

Message = bytes
Attack = Callable[[int], Awaitable[None]]
"""Sends the message of a number, and waits until the peer has answered it or closed."""


class Victim:
    """The peer, in a process of its own."""

    def __init__(self, process: Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self.told: dict[str, Any] = json.loads(process.stdout.readline())

    def taken(self) -> float:
        """Return the seconds of its processor time so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("?\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


@dataclass(frozen=True)
class Row:
    """A kind of first message."""

    protocol: str
    message: str
    """In words."""
    attack: Attack
    nbytes: int


def candidates(key: bytes, count: int, first: int) -> list[Candidate]:
    """Return signed candidates of invented peers; half of more than 64 are auxiliaries."""
    now = time.time()
    return [
        sign_candidate(
            Ed25519Signer(hashlib.sha256(bytes(f"stranger {first + index}", "ascii")).digest()),
            key=key,
            deadline=now + 300.0 + index,
            expiration_time=now + 900.0,
            weight=0.0 if index >= 64 else 1.0,
            bandwidth=100.0,
            codec="fp32",
            auxiliary=index >= 64,
            addresses=(),
        )
        for index in range(count)
    ]


def own_candidate(key: bytes, number: int) -> Candidate:
    """Return a candidate of the stranger itself, another one for each number."""
    now = time.time()
    return sign_candidate(
        Ed25519Signer(SEED),
        key=key,
        deadline=now - 80.0 + number / 1000,
        expiration_time=now + 900.0,
        weight=1.0,
        bandwidth=100.0,
        codec="another",
        auxiliary=False,
        addresses=(),
    )


def first_messages(key: bytes, count: int) -> dict[tuple[str, str, str], list[Message]]:
    """Return the messages on streams, by protocol, its name in the table, and the kind of message."""
    certificate = OwnCertificate("a stranger").der
    now = time.time()
    signed = [
        sign_record(
            Ed25519Signer(hashlib.sha256(bytes(f"publisher {index}", "ascii")).digest()),
            key=key,
            sequence=1,
            expiration_time=now + 300.0,
            value=b"x",
        )
        for index in range(64 * min(count, 20))
    ]
    stores = [encode_records(Store((), tuple(signed[at : at + 64]))) for at in range(0, len(signed), 64)]
    proposals = []
    for number in range(min(count, 20)):
        members = tuple(candidates(key, 128, 128 * number))
        proposals.append(
            matching.encode(matching.GroupProposal(Roster(members=members, shares=(1,) * 128, proposal=0)))
        )
    unknown = hashlib.sha256(b"another run").digest()
    return {
        (matching.PROTOCOL, "match", "128 signed members"): proposals,
        (matching.PROTOCOL, "match", "a candidate of this run"): [
            matching.encode(matching.JoinRequest(own_candidate(key, number))) for number in range(count)
        ],
        (matching.PROTOCOL, "match", "a candidate of another run"): [
            matching.encode(matching.JoinRequest(own_candidate(unknown, number))) for number in range(count)
        ],
        (matching.PROTOCOL, "match", "a nudge"): [
            matching.encode(matching.Nudge(own_candidate(key, number))) for number in range(count)
        ],
        (lanes.PROTOCOL, "lane", "a certificate"): [lanes.LaneRequest(certificate).encode()],
        (lanes.PROTOCOL, "lane", "8 KiB that are none"): [pack(bytes(8000))],
        (EXCHANGE_PROTOCOL, "votes and parts", "a header of an unknown group"): [
            LaneHeader(bytes(32), lane).encode() for lane in (Lane.CONTROL, Lane.CONTRIBUTIONS, Lane.ASK)
        ],
        (RECORDS_PROTOCOL, "records", "64 signed records"): stores,
        (RECORDS_PROTOCOL, "records", "a search"): [encode_records(Find((), key))],
        (RECORDS_PROTOCOL, "records", "a question for contacts"): [encode_records(Locate((), key))],
        (STATE_PROTOCOL, "state", "a hello"): [SessionHello(state_key(RUN), b"", bytes(32)).encode()],
        (STATE_PROTOCOL, "state", "a hello of another run"): [
            SessionHello(unknown, bytes(640), bytes(32)).encode()
        ],
        (EVIDENCE_PROTOCOL, "evidence", "a question"): [
            EvidenceRequest(accusations_key(RUN), bytes(32), b"").encode()
        ],
        (HELLO_PROTOCOL, "hello", "a question"): [HELLO_QUESTION],
        (BANDWIDTH_PROTOCOL, "bandwidth", "a measurement"): [BandwidthQuestion().encode()],
        (INVITE_PROTOCOL, "invitation", "a false token"): [pack(1, bytes(range(100)))],
        (reaching.PROTOCOL, "reach", "a look"): [reaching.Look().encode()],
        (reaching.PROTOCOL, "reach", "a dial-back"): [reaching.DialBack(9, bytes(16)).encode()],
        (punches.PROTOCOL, "punch", "a request to dial"): [
            punches.DialMe(("/ip4/203.0.113.1/tcp/4001",)).encode()
        ],
        (relays.PROTOCOL, "relay", "a circuit"): [relays.Connect(Ed25519Signer(bytes(32)).peer_id).encode()],
        ("/p2pavg/none/1", "any", "a protocol that is not served"): [b"x"],
    }


async def say(transport: Libp2pTransport, victim: Victim, protocol: str, message: Message) -> None:
    """Send a first message on a stream of its own, and wait for the answer or the end."""
    address = victim.told["addresses"][0]
    try:
        with trio.move_on_after(ANSWER_SECONDS):
            stream = await transport.open_stream(
                address.rpartition("/")[2], protocol, addresses=[address], timeout=ANSWER_SECONDS
            )
            try:
                await send_message(stream, message)
                await receive_message(stream, max_bytes=1 << 20)
            finally:
                await stream.reset()
    except (UnreachableError, StreamBrokenError, RemoteProtocolError, ClosedError):
        return


async def raw(host: str, port: int, message: Message) -> None:
    """Send bytes on a TCP connection of its own, and wait for an answer or the end."""
    with trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM) as opened:
        try:
            with trio.move_on_after(ANSWER_SECONDS):
                await opened.connect((host, port))
                await opened.send(message)
                await opened.recv(65536)
        except OSError:
            return


async def handshake(victim: Victim, number: int) -> None:
    """Make a connection with a new identity, and end it."""
    seed = hashlib.sha256(bytes(f"identity {number}", "ascii")).digest()
    try:
        async with open_libp2p_transport(seed=seed, listen=[], options=ONLY_ASKS) as transport:
            await transport.dial(victim.told["addresses"][0], timeout=ANSWER_SECONDS)
    except UnreachableError:
        return


async def local(path: str, message: Message) -> None:
    """Ask on the control socket."""
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as opened:
        try:
            await opened.connect(path)
            await opened.send(len(message).to_bytes(4, "big") + message)
            await opened.recv(4096)
        except OSError:
            return


def client_hello() -> bytes:
    """Return the first bytes of a TLS client that names a ticket."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client = context.wrap_bio(incoming, outgoing, server_hostname="00" * 16)
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("a handshake without an answer")


def rows(transport: Libp2pTransport, victim: Victim, count: int) -> list[Row]:
    """Return all kinds of first messages."""
    found = []
    for (protocol, name, what), messages in first_messages(bytes.fromhex(victim.told["key"]), count).items():

        async def send(number: int, protocol: str = protocol, messages: list[Message] = messages) -> None:
            await say(transport, victim, protocol, messages[number % len(messages)])

        found.append(Row(name, what, send, len(messages[0])))

    port = int(victim.told["addresses"][0].split("/")[4])
    greeting = b"\x13/multistream/1.0.0\n\x07/noise\n\x00\x20" + bytes(range(1, 33))
    page = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for name, what, at, message in (
        ("TCP", "half of a handshake of Noise", port, greeting),
        ("TCP", "half of a handshake of TLS", port, client_hello()),
        ("TCP", "a byte that begins nothing", port, b"\xff"),
        ("TCP", "a probe of the port", port, b"P" + bytes(23)),
        ("metrics", "a scrape", victim.told["metrics"], page),
        ("monitor", "the page", victim.told["monitor"], b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        (
            "monitor",
            "the run",
            victim.told["monitor"],
            b"GET /api/run.json HTTP/1.1\r\nHost: localhost\r\n\r\n",
        ),
    ):

        async def connect(_: int, at: int = at, message: bytes = message) -> None:
            await raw("127.0.0.1", at, message)

        found.append(Row(name, what, connect, len(message)))
    found.append(Row("libp2p", "a whole handshake of a new identity", partial(handshake, victim), 0))
    status = encode_question(Question.STATUS)

    async def ask(_: int) -> None:
        await local(victim.told["control"], status)

    found.append(Row("control socket", "a question", ask, len(status)))
    return found


@asynccontextmanager
async def attacked(budgets: str) -> AsyncIterator[tuple[Libp2pTransport, Victim]]:
    """Start a peer, and yield a stranger's transport with it."""
    process = Popen(  # noqa: ASYNC220 - nothing else runs meanwhile
        [sys.executable, "-m", "scripts.benchmarks.strangers_worker", budgets],
        stdin=PIPE, stdout=PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        victim = await trio.to_thread.run_sync(Victim, process)
        async with open_libp2p_transport(seed=SEED, listen=[], options=ONLY_ASKS) as transport:
            await transport.dial(victim.told["addresses"][0], timeout=60.0)
            await trio.sleep(2.0)  # what a peer does at the start is over
            yield transport, victim
    finally:
        process.kill()
        process.wait()


Told = Callable[[Row, float, float], None]
"""Takes a row, with the processor seconds of the peer and of the stranger."""


async def measure(count: int, budgets: str, only: Sequence[str], told: Told) -> None:
    """Measure all rows at one peer."""
    async with attacked(budgets) as (transport, victim):
        idle, began = victim.taken(), time.monotonic()
        await trio.sleep(2.0)
        idle = (victim.taken() - idle) / (time.monotonic() - began)
        for row in rows(transport, victim, count):
            if only and row.protocol not in only:
                continue
            await row.attack(0)  # with which a budget that is nearly used up is used up
            before, own, moment = victim.taken(), time.process_time(), time.monotonic()
            for number in range(count):
                await row.attack(number)
            await trio.sleep(0.2)  # for what the peer does after it has closed
            spent, passed = time.process_time() - own, time.monotonic() - moment
            told(row, max(0.0, victim.taken() - before - idle * passed), spent)


def run(count: int, only: Sequence[str], report: Report) -> None:
    """Measure all rows, and report them."""
    for budgets in BUDGETS:

        def told(row: Row, taken: float, spent: float, budgets: str = budgets) -> None:
            report.figure(
                NAME, "processor taken, of the sender's own", ": 1", [taken / spent], system=row.protocol,
                message=row.message, budgets=budgets, bytes=row.nbytes, messages=count,
                taken_ms=round(1000 * taken / count, 2), spent_ms=round(1000 * spent / count, 2),
            )  # fmt: skip

        trio.run(measure, count, budgets, only, told)


def add_arguments(parser: argparse.ArgumentParser, *, small: bool) -> None:
    """Add the options of this part of the benchmark."""
    parser.add_argument(
        "--strangers", action="store_true", help="what first messages of strangers cost instead"
    )
    parser.add_argument(
        "--messages", type=int, default=5 if small else 129, help="of each kind, with --strangers"
    )
    parser.add_argument(
        "--protocols", default="", help="only these rows, with --strangers, such as match,lane"
    )

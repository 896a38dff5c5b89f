"""Fuzz test on virtual time: hostile members send valid messages in random order to honest peers.

scripts/faults fuzz --messages 100000      this many messages, over as many seeds as needed
scripts/faults fuzz --seed 1234 --log      one seed again, with every line of its log

Each seed is a run of two to four honest peers and one or two hostile ones. A hostile peer runs the real averager, so
that it is a member of the groups. It also sends votes, lanes, matchmaking messages, records and accusations, which
decode and have random contents. Its snapshots have keys that collide, references to one tensor, and other settings; a
member of a population reads them. Its texts have markup, escapes, HTML and labels, and are shown where texts are. Its
delegates choose the serials of others' certificates. It claims to be at an outer step far ahead. The checks are:

* no exception leaves an honest peer's averager or the handling of a message;
* no honest peer is excluded;
* a snapshot that is refused has changed nothing, and no option is taken from one;
* a text is refused, or shown as it is; a list of revoked certificates shuts out those that it means only;
* claims of fewer than half of a group make no honest member throw its average away;
* every call of ``step`` returns within its match timeout and its exchange timeout;
* every ``Success`` of an honest peer is the weighted mean of exactly its ``peers``, two of the same group and the same
  ``peers`` hold the same bits, and its certificate says so.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import logging
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import trio

import p2pavg
from p2pavg.allreduce import reduction
from p2pavg.allreduce.messages import PROTOCOL as EXCHANGE_PROTOCOL
from p2pavg.allreduce.messages import Lane, part_frame
from p2pavg.allreduce.movers.reuse import START, ResumeMark
from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.messages import pack
from p2pavg.consensus.choice import next_ballot
from p2pavg.consensus.member import MemberState
from p2pavg.consensus.statements import CONTRADICTION, Signed, Statement, encode_evidence, result_digest
from p2pavg.consensus.votes import (
    DIGEST_BYTES,
    OUTPUT_BYTES,
    SIGNATURE_BYTES,
    Accepted,
    Begin,
    Complete,
    Gather,
    Left,
    Promise,
    ReceivedUpTo,
    ResultCommit,
    ResultHeld,
    SignedOutput,
    StaleBallot,
    Trouble,
    Unknown,
    Vote,
    decode_vote,
)
from p2pavg.group.candidate import Candidate, read_candidate, sign_candidate
from p2pavg.group.places.gossip import OUTER_STEP, rounds_of_others
from p2pavg.group.roster import Roster
from p2pavg.matchmaking import messages
from p2pavg.matchmaking.attempt_runner import AttemptRunner
from p2pavg.net.transport import Stream, receive_message, send_message
from p2pavg.optim.coordination.progress import PeerProgress
from p2pavg.optim.mixing.mixing import is_too_far
from p2pavg.peer.auxiliary import is_known
from p2pavg.peer.peer import Peer
from p2pavg.round import control, exchange
from p2pavg.round.signing import Signing
from p2pavg.runs.records.board import board_key
from p2pavg.runs.records.run_entry import RunEntry, run_key
from p2pavg.testing import MemoryNetwork, run_peers, simulate
from p2pavg.testing.simulation import simulated_signer
from p2pavg.verification.evidence.accusation import PROTOCOL as EVIDENCE_PROTOCOL
from p2pavg.verification.evidence.accusation import (
    EvidenceAnswer,
    EvidenceRequest,
    Named,
    Notice,
    accusations_key,
    digest_of,
    read_accusation,
)
from p2pavg_dht import PROTOCOL as RECORDS_PROTOCOL
from p2pavg_dht import Ed25519Signer, Record, sign_record
from p2pavg_dht.messages import Find, Locate, Store
from p2pavg_dht.messages import Request as RecordRequest
from p2pavg_dht.messages import encode as encode_record_request
from scripts.fault_search import fuzz_serials, fuzz_states, fuzz_texts
from scripts.fault_search.simulate import describe

RUN = "fuzzed"
ELEMENTS = 600
PART_ELEMENTS = 64
MATCH_TIMEOUT = 4.0
EXCHANGE_TIMEOUT = 10.0
SLACK = 2.0  # ending at a deadline takes a few more moments
ROUNDS = 2
TRIES = 6  # calls of step before a round must have a result
KINDS = ("votes", "lanes", "matches", "records", "accusations", "states", "names", "first messages",
         "texts", "serials", "claims")  # fmt: skip
SNAPSHOTS = 100  # of a seed with this kind
TEXTS = 30  # likewise
CERTIFICATES = 60  # likewise
CLAIMS = (1e9, -1e9, 2.0**53)


@dataclass(frozen=True)
class Setting:
    """The parameters that a seed stands for."""

    seed: int
    honest: int
    hostile: int
    kinds: frozenset[str]

    @property
    def peers(self) -> int:
        """Number of peers of both kinds; the hostile ones are drawn among them."""
        return self.honest + self.hostile

    @property
    def liars(self) -> frozenset[int]:
        """Indices of the hostile peers."""
        return frozenset(random.Random(f"liars/{self.seed}").sample(range(self.peers), self.hostile))


def setting(seed: int) -> Setting:
    """Return the parameters of a seed, always the same."""
    dice = random.Random(f"fuzz/{seed}")
    kinds = dice.sample(KINDS, dice.randint(1, len(KINDS)))
    return Setting(seed, honest=dice.randint(2, 4), hostile=dice.randint(1, 2), kinds=frozenset(kinds))


@dataclass
class Seen:
    """Everything that is recorded for the checks after a run."""

    sent: Counter[str] = field(default_factory=Counter)
    tally: Counter[str] = field(default_factory=Counter)
    given: dict[tuple[str, float], torch.Tensor] = field(default_factory=dict)
    """Contributions by peer and weight."""
    successes: list[tuple[str, p2pavg.Success]] = field(default_factory=list)
    longest: float = 0.0
    excluded: set[str] = field(default_factory=set)
    """Peers that an honest peer has excluded."""


# ---------------------------------------------------------------------- messages that decode


def some_members(dice: random.Random, size: int) -> frozenset[int]:
    """Draw some members, often all, or all but one."""
    members = list(range(size))
    left_out = dice.choice([0, 0, 1, 1, dice.randint(0, size - 1)])
    return frozenset(dice.sample(members, size - left_out))


def some_commit(
    dice: random.Random, member: MemberState, signing: Signing, attempt: int, members: frozenset[int]
) -> ResultCommit:
    """Draw a commit with the liar's own signature, with those that it has been sent, or with forged ones."""
    signatures = {position: dice.randbytes(SIGNATURE_BYTES) for position in members if dice.random() < 0.2}
    if dice.random() < 0.5:
        attempt, members, signatures = (
            member.begun.attempt,
            member.begun.members,
            dict(member.pending.signatures),
        )
    digests = member.own.digests or (bytes(DIGEST_BYTES),) * len(members)
    if dice.random() < 0.8:
        signatures[member.me] = signing.sign(attempt, members, digests)
    signed = tuple(sorted((one, signed) for one, signed in signatures.items() if one in members))
    return ResultCommit(attempt, members, result_digest(digests) if signed else b"", signed)


def some_share(dice: random.Random, member: MemberState, attempt: int) -> SignedOutput:
    """Draw what a reducer is said to have signed of its share: true, of another digest, or of other bytes."""
    own, reducers = member.own, sorted(member.begun.members)
    share = dice.randrange(len(reducers))
    digest, output = bytes(DIGEST_BYTES), dice.randbytes(OUTPUT_BYTES)
    if share < len(own.outputs) and own.outputs[share] and dice.random() < 0.7:
        digest, output = dice.choice([own.digests[share], digest]), own.outputs[share]
    return SignedOutput(dice.choice([0, member.begun.attempt, attempt]), reducers[share], digest, output)


def some_vote(dice: random.Random, member: MemberState, signing: Signing) -> Vote:
    """Draw a vote that is valid, if not at this time or in this state."""
    size, me = member.size, member.me
    own = next_ballot(me, size, max(member.promised, member.begun.ballot))
    known = [0, member.begun.ballot, member.promised, member.begun.attempt, own, own - size]
    ballot = dice.choice([*known, *known, dice.randint(0, 4 * size), dice.randint(0, 2**20)])
    attempt = dice.choice([0, member.begun.attempt, ballot, dice.randint(0, max(ballot, 0))])
    members, view, other = some_members(dice, size), some_members(dice, size), dice.randrange(size)
    members = dice.choice([members, member.begun.members, view])
    digests = tuple(
        bytes([dice.randrange(3)]) * DIGEST_BYTES for _ in range(dice.choice([0, size, size - 1]))
    )
    accepted = dice.choice([None, Accepted(ballot, attempt, members, view, dice.random() < 0.3)])
    complete = dice.choice([None, Complete(attempt, members)])
    apart = some_members(dice, size) if dice.random() < 0.2 else frozenset({other})
    hostile = frozenset(dice.sample(sorted(apart), dice.randint(0, len(apart))))
    lacking = frozenset(dice.sample(sorted(members), dice.randint(0, len(members))))
    votes: list[Callable[[], Vote]] = [
        lambda: Gather(ballot, attempt),
        lambda: Promise(
            dice.choice([ballot, ballot + 1, dice.randint(0, 4) * size]),
            attempt,
            accepted,
            complete,
            apart,
            hostile,
            b"" if complete is None else dice.choice([b"", member.own.digest, bytes(DIGEST_BYTES)]),
        ),
        lambda: StaleBallot(ballot),
        lambda: Begin(
            ballot, attempt, members, dice.choice([members, view]), other, lacking, dice.random() < 0.3
        ),
        lambda: ResultHeld(dice.choice([0, ballot]), digests, signing.sign(attempt, members, digests)),
        lambda: some_share(dice, member, attempt),
        lambda: some_commit(dice, member, signing, attempt, members),
        lambda: Trouble(other, dice.random() < 0.3, "so it says"),
        lambda: Left(dice.choice([-1, 0, ballot]), "so it says"),
        lambda: Unknown(),
        lambda: ReceivedUpTo(
            dice.choice([0, member.begun.attempt, attempt]),
            dice.choice([0, 1, 5, 2**31]),
            dice.choice([0, 1, 64, 2**31]),
        ),
    ]
    # Votes that end the round, or the sender's part in it, are rare; otherwise runs would be short.
    weights = [3, 4, 2, 4, 3, 2, 0.05, 1, 0.03, 0.03, 3]
    while True:
        vote = dice.choices(votes, weights)[0]()
        try:
            decode_vote(vote.encode(), size)
        except RemoteProtocolError:
            continue
        return vote


def some_candidate(dice: random.Random, index: int, key: bytes, now: float) -> Candidate:
    """Draw a hostile peer's candidate record."""
    auxiliary = dice.random() < 0.2
    return sign_candidate(
        simulated_signer(index),
        key=key,
        deadline=now + dice.choice([-100.0, -1.0, 0.0, 0.5, MATCH_TIMEOUT, 1000.0]) + dice.random(),
        expiration_time=now + dice.choice([1.0, 60.0, 3600.0]),
        weight=0.0 if auxiliary else dice.choice([0.0, 1.0, 5.0, 1e6]),
        bandwidth=dice.choice([1.0, 100.0, 900.0]),
        codec=dice.choice(["fp32", "fp32", "blockwise8/64"]),
        auxiliary=auxiliary,
        addresses=dice.choice([(), (f"/ip4/10.0.0.{dice.randrange(9)}/tcp/4001",)]),
        state=dice.choice([b"", b"", b"another"]),
    )


def some_roster(dice: random.Random, known: Sequence[Candidate]) -> Roster | None:
    """Draw any members in any order, with any shares; return ``None`` if that is not a valid roster."""
    members = tuple(dice.sample(list(known), min(len(known), dice.randint(2, 6))))
    cuts = sorted([0, ELEMENTS, *(dice.randint(0, ELEMENTS) for _ in members[1:])])
    shares = tuple(stop - start for start, stop in itertools.pairwise(cuts))
    observers = frozenset(member.peer_id for member in members if member.weight == 0 and not member.auxiliary)
    try:
        return Roster(members=members, shares=shares, proposal=dice.randrange(3), observers=observers)
    except RemoteProtocolError:
        return None


def some_match_message(dice: random.Random, known: Sequence[Candidate], group_id: bytes) -> messages.Message:
    """Draw any message of matchmaking."""
    one = dice.choice(list(known))
    roster = some_roster(dice, known)
    group_id = dice.choice([group_id, bytes(32), roster.group_id if roster is not None else bytes(32)])
    options: list[messages.Message] = [
        messages.JoinRequest(one),
        messages.Nudge(one),
        messages.Joined(one),
        messages.Declined("so it says", dice.choice([None, one]), (one.peer_id,), dice.random() < 0.5),
        messages.LeaderStatus(dice.randint(1, 8), dice.random() < 0.5),
        messages.Accept(group_id),
        messages.Refuse(group_id, "so it says"),
        messages.GroupCommit(group_id),
        messages.Disband("so it says", dice.choice([None, one])),
    ]
    if roster is not None:
        options += [messages.GroupProposal(roster)] * 3
    return dice.choice(options)


def some_names(dice: random.Random) -> tuple[str, str]:
    """Draw the texts of a codec and of an aggregation: known ones, costly ones, and ones that are none."""
    number = dice.choice([0, 1, 64, 166, 1000, 1024, 4096, 10**9, 10**10])
    codec = dice.choice(
        ["fp32", f"topk:4096:{number}:2", f"topk:{number}", f"int8:{number}", ":" * 64, "topk" + ":1" * 30]
    )
    aggregation = dice.choice(
        ["", "median", f"centered_clip:1:{number}", f"trimmed_mean:{number}e-400", "audit:before:" + "9" * 40,
         f"topology:gossip:{number}", " " * 512, "max_norm:nan", "centered_clip:inf:1e308"]
    )  # fmt: skip
    return codec, aggregation


# ---------------------------------------------------------------------- hostile peers


class HostileControl(control.VoteStreams):
    """A member's control channel that adds random votes to the member's own."""

    dice: random.Random
    sent: Counter[str]
    begun: list[int]
    newest = 0

    async def _speak(self, line: Any, stream: Stream) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._babble, line)
            await super()._speak(line, stream)
            nursery.cancel_scope.cancel()

    async def _babble(self, line: Any) -> None:
        while True:
            await trio.sleep(self.dice.expovariate(50.0))
            member = self._hears.member  # type: ignore[attr-defined]  # of the hostile peer's own exchange
            if self.dice.random() < 0.3:
                self._mislead(member)
            for _ in range(self.dice.randint(1, 4)):
                self._say(line, some_vote(self.dice, member, self._hears.signing))  # type: ignore[attr-defined]

    def _mislead(self, member: MemberState) -> None:
        """Send ballots in a sequence, about real and invented attempts."""
        dice, size = self.dice, member.size
        self.newest = next_ballot(self._me, size, max(self.newest, member.promised))
        attempts = [0, member.begun.attempt, self.newest, *self.begun]
        members = dice.choice([some_members(dice, size), member.begun.members])
        attempt, view = dice.choice(attempts[-4:]), dice.choice([members, some_members(dice, size)])
        if attempt == self.newest:
            view = members
            self.begun.append(attempt)
        source, lacking = dice.choice(sorted(view)), frozenset(dice.sample(sorted(view), dice.randint(0, 1)))
        begin = Begin(self.newest, attempt, members, view, source, lacking, dice.random() < 0.3)
        for line in self._lines.values():
            self._say(line, Gather(self.newest))
            self._say(line, begin)

    def _say(self, line: Any, vote: Vote) -> None:
        if len(line.unsent) < 48:
            line.unsent.append(vote)
            line.wake()
            self.sent["votes"] += 1


class Hostile:
    """A hostile peer's additional messages."""

    def __init__(self, peer: Peer, index: int, how: Setting, record: Seen) -> None:
        self.peer = peer
        self.index = index
        self.how = how
        self.sent = record.sent
        self.dice = random.Random(f"hostile/{how.seed}/{index}")
        self.key = bytes(32)
        self.group_id = bytes(32)
        self.known: list[Candidate] = []
        self.evidence = {bytes(32): b"invented"}
        if "accusations" in how.kinds:
            peer.context.transport.serve(EVIDENCE_PROTOCOL, self._show)

    async def run(self, averager: p2pavg.DecentralizedAverager) -> None:
        """Send messages until cancelled."""
        tasks = {"lanes": self._lane, "matches": self._match, "records": self._record}
        tasks |= {"accusations": self._accuse, "names": self._name, "first messages": self._begin}
        chosen = [task for kind, task in tasks.items() if kind in self.how.kinds]
        while True:
            await trio.sleep(self.dice.expovariate(8.0))
            self._look(averager)
            if chosen:
                try:
                    with trio.move_on_after(1.0):
                        await self.dice.choice(chosen)()
                except (UnreachableError, StreamBrokenError, ClosedError):
                    continue

    def _look(self, averager: p2pavg.DecentralizedAverager) -> None:
        if averager._rounds is not None:
            self.key = averager._rounds.matchmaker.key
        now = self.peer.context.wall_clock()
        found = {}
        for record in self.peer.records.held(self.key):
            try:
                found[record.publisher] = read_candidate(record)
            except RemoteProtocolError:
                continue
        self.known = [*found.values(), some_candidate(self.dice, self.index, self.key, now)]
        if averager._round is not None and averager._round._roster is not None:
            self.group_id = averager._round._roster.group_id

    def _other(self) -> str:
        others = [index for index in range(self.how.peers) if index != self.index]
        return simulated_signer(self.dice.choice(others)).peer_id

    async def _lane(self) -> None:
        # As fields: a LaneHeader refuses to be made of what no honest peer says.
        header = pack(
            self.group_id,
            int(self.dice.choice(list(Lane))),
            self.dice.choice([0, 0, 1, self.dice.randrange(20)]),
            self.dice.choice([0, 0, self.dice.randrange(8)]),
            b"",
            self.dice.choice([START, START, ResumeMark(self.dice.randrange(8), self.dice.randrange(300))]),
        )
        stream = await self.peer.context.transport.open_stream(self._other(), EXCHANGE_PROTOCOL, timeout=1.0)
        await send_message(stream, header)
        self.sent["lanes"] += 1
        for index in range(self.dice.randint(0, 6)):
            values = torch.randn(PART_ELEMENTS, generator=torch.Generator().manual_seed(index))
            await stream.send_all(part_frame(index) + values.numpy().tobytes())
            self.sent["parts"] += 1
        await self._leave(stream)

    async def _match(self) -> None:
        stream = await self.peer.context.transport.open_stream(self._other(), messages.PROTOCOL, timeout=1.0)
        opening: list[messages.Message] = [
            messages.JoinRequest(self.known[-1]),
            messages.Nudge(self.known[-1]),
        ]
        await send_message(stream, messages.encode(self.dice.choice(opening)))
        for _ in range(self.dice.randint(0, 5)):
            await send_message(
                stream, messages.encode(some_match_message(self.dice, self.known, self.group_id))
            )
            self.sent["matches"] += 1
        await self._leave(stream)

    async def _begin(self) -> None:
        """Begin a join stream with any message, such as a roster, in place of a candidate of one's own."""
        stream = await self.peer.context.transport.open_stream(self._other(), messages.PROTOCOL, timeout=1.0)
        await send_message(stream, messages.encode(some_match_message(self.dice, self.known, self.group_id)))
        self.sent["first messages"] += 1
        await self._leave(stream)

    async def _name(self) -> None:
        """Publish a run entry whose codec and rule are names that a reader may have to compute with."""
        codec, aggregation = some_names(self.dice)
        is_known(codec, aggregation)  # as a peer that helps the run does; it raises nothing
        entry = RunEntry(
            schema_hash=self.dice.randbytes(32),
            tensors=1,
            elements=self.dice.choice([0, 1, 2**34]),
            codec=codec,
            group_size=self.dice.randint(2, 64),
            rule=self.dice.choice(["", "fraction 0x1p-1 seed 1", "x" * 512]),
            aggregation=aggregation,
        )
        now = self.peer.context.wall_clock()
        record = sign_record(
            simulated_signer(self.index),
            key=run_key(RUN),
            sequence=int(now * 1e6) + self.dice.randrange(10**6),
            expiration_time=now + 60.0,
            value=entry.encode(),
        )
        stream = await self.peer.context.transport.open_stream(self._other(), RECORDS_PROTOCOL, timeout=1.0)
        await send_message(stream, encode_record_request(Store((), (record,))))
        self.sent["names"] += 1
        await self._leave(stream)

    async def _record(self) -> None:
        now, dice = self.peer.context.wall_clock(), self.dice
        records = tuple(self._some_record(now) for _ in range(dice.randint(1, 4)))
        store = Store((), records)
        requests: list[RecordRequest] = [store, store, Find((), self.key), Locate((), self.key)]
        request = dice.choice(requests)
        stream = await self.peer.context.transport.open_stream(self._other(), RECORDS_PROTOCOL, timeout=1.0)
        await send_message(stream, encode_record_request(request))
        self.sent["records"] += len(records) if isinstance(request, Store) else 1
        await self._leave(stream)

    async def _accuse(self) -> None:
        """Name evidence, which may be genuine, or ask for some."""
        dice, now = self.dice, self.peer.context.wall_clock()
        named = tuple(self._some_name() for _ in range(dice.randint(1, 16)))
        record = sign_record(
            simulated_signer(self.index),
            key=accusations_key(RUN),
            sequence=int(now * 1e6) + dice.randrange(10**6),
            expiration_time=now + dice.choice([5.0, 600.0]),
            value=dice.choice([Notice((), named).encode(), dice.randbytes(40)]),
        )
        request = EvidenceRequest(
            dice.choice([accusations_key(RUN), bytes(32)]), dice.choice(list(self.evidence)), b""
        )
        messages = [
            (RECORDS_PROTOCOL, encode_record_request(Store((), (record,)))),
            (EVIDENCE_PROTOCOL, dice.choice([request.encode(), dice.randbytes(9)])),
        ]
        protocol, message = dice.choices(messages, [3, 1])[0]
        stream = await self.peer.context.transport.open_stream(self._other(), protocol, timeout=1.0)
        await send_message(stream, message)
        self.sent["accusations"] += 1
        await self._leave(stream)

    def _some_name(self) -> Named:
        """Draw the name of genuine evidence against an invented peer, or of evidence against any peer."""
        dice = self.dice
        if dice.random() < 0.5:
            data = two_results(Ed25519Signer(dice.randbytes(32)), dice)
            named = read_accusation(data).named
        else:
            data = dice.randbytes(dice.randint(1, 600))
            kind = dice.choice([CONTRADICTION, CONTRADICTION, "another"])
            named = Named(digest_of(data), len(data), simulated_signer(dice.randrange(8)).peer_id, kind)
        self.evidence[named.digest] = data
        return named

    async def _show(self, stream: Stream) -> None:
        """Answer a peer that fetches: with the evidence, with other bytes, or not at all."""
        request = await receive_message(stream)
        if request is None or self.dice.random() < 0.1:
            return
        data = self.evidence.get(EvidenceRequest.decode(request).digest, b"")
        if self.dice.random() < 0.05:
            data = self.dice.randbytes(len(data))
        await send_message(stream, EvidenceAnswer(self.dice.choice(["", "", "", "so it says"])).encode())
        await stream.send_all(data)
        self.sent["evidence"] += 1
        await stream.aclose()

    def _some_record(self, now: float) -> Record:
        dice, signer = self.dice, simulated_signer(self.index)
        entry = RunEntry(
            schema_hash=dice.randbytes(32),
            tensors=dice.randint(1, 9),
            elements=dice.randrange(10**6),
            codec="fp32",
            group_size=dice.randint(2, 64),
            rule="",
            aggregation=dice.choice(["", "median", "trimmed_mean:0.25"]),
        )
        progress = PeerProgress(
            epoch=dice.choice([0, 1, 10**6]),
            state=bytes(32),
            samples=dice.choice([0.0, 1e15]),
            samples_per_second=dice.choice([0.0, 1e15]),
            waiting=dice.random() < 0.5,
        )
        key, value = dice.choice(
            [
                (self.key, some_candidate(dice, self.index, self.key, now).record.value),
                (self.key, dice.randbytes(dice.randint(1, 99))),
                (run_key(RUN), entry.encode()),
                (board_key(RUN, "progress"), progress.encode()),
                (dice.randbytes(32), b"anything"),
            ]
        )
        return sign_record(
            signer,
            key=key,
            sequence=int(now * 1e6) + dice.randrange(10**6),
            expiration_time=now + dice.choice([0.5, 30.0, 600.0]),
            value=value,
        )

    async def _leave(self, stream: Stream) -> None:
        if self.dice.random() < 0.5:
            await trio.sleep(self.dice.random())
        if self.dice.random() < 0.5:
            await stream.aclose()
        else:
            await stream.reset()


def two_results(signer: Ed25519Signer, dice: random.Random) -> bytes:
    """Return evidence that a peer signed two results."""
    group, members = dice.randbytes(32), some_members(dice, 4) | {0}
    said = [Statement(group, 0, members, dice.randbytes(32)) for _ in range(2)]
    one, other = (Signed(signer.peer_id, each, signer.sign(each.signed_bytes())) for each in said)
    return encode_evidence(one, other)


@contextmanager
def hostile_members(how: Setting, record: Seen) -> Iterator[dict[str, Hostile]]:
    """Let hostile peers vote at random, and send random messages during matchmaking."""
    hostile: dict[str, Hostile] = {}
    send = AttemptRunner._send

    def make(**given: Any) -> control.VoteStreams:
        liar = hostile.get(given["transport"].peer_id)
        if liar is None or "votes" not in how.kinds:
            return control.VoteStreams(**given)
        made = HostileControl(**given)
        made.dice, made.sent, made.begun = liar.dice, record.sent, []
        return made

    def say(self: Any, peer_id: str, message: messages.Message) -> None:
        liar = hostile.get(self._me.peer_id)
        if liar is not None and "matches" in how.kinds and liar.known and liar.dice.random() < 0.4:
            message = some_match_message(liar.dice, liar.known, liar.group_id)
            record.sent["matches"] += 1
        send(self, peer_id, message)

    vars(exchange)["VoteStreams"] = make
    AttemptRunner._send = say  # type: ignore[method-assign]
    try:
        yield hostile
    finally:
        vars(exchange)["VoteStreams"] = control.VoteStreams
        AttemptRunner._send = send  # type: ignore[method-assign]


# ---------------------------------------------------------------------- one seed


async def run(how: Setting) -> Seen:
    """Run one seed from the first peer to the last."""
    record = Seen()
    # Links are slow, so that a round lasts long enough for many votes.
    bandwidth = random.Random(f"bandwidth/{how.seed}").choice([None, 3e4, 1e4])
    network = MemoryNetwork(seed=how.seed, latency=(0.001, 0.02), bandwidth=bandwidth)
    config = p2pavg.AveragingConfig(
        run_id=RUN,
        group_size=how.peers,
        min_group_size=2,
        match_timeout=MATCH_TIMEOUT,
        exchange_timeout=EXCHANGE_TIMEOUT,
        compression=None,
    )

    async def work(peer: Peer, index: int) -> None:
        async with peer.averager(config) as averager, trio.open_nursery() as nursery:
            if index in how.liars:
                liar = hostile[peer.id] = Hostile(peer, index, how, record)
                nursery.start_soon(liar.run, averager)
            await average(record, averager, index, how)
            if index not in how.liars:
                record.excluded |= averager.excluded.keys()
            nursery.cancel_scope.cancel()

    with hostile_members(how, record) as hostile:
        await run_peers(network, how.peers, work)
    return record


async def average(record: Seen, averager: p2pavg.DecentralizedAverager, index: int, how: Setting) -> None:
    """Run a few rounds of one peer."""
    generator = torch.Generator().manual_seed(how.seed * 100 + index)
    for number in range(ROUNDS):
        averager.clear()
        values, weight = torch.randn(ELEMENTS, generator=generator), 1.0 + number
        step = float(number)
        if "claims" in how.kinds and index in how.liars:
            step = random.Random(f"claims/{how.seed}/{index}/{number}").choice(CLAIMS)
            record.sent["claims"] += 1
        averager.accumulate([values], weight=weight, metrics={OUTER_STEP: step})
        record.given[averager.peer_id, weight] = values
        for _ in range(TRIES):
            began = trio.current_time()
            result = await averager.step(wait=None)
            if index in how.liars:
                if not isinstance(result, p2pavg.InProgress):
                    break
                continue
            record.longest = max(record.longest, trio.current_time() - began)
            record.tally[type(result).__name__] += 1
            if isinstance(result, p2pavg.Success):
                record.successes.append((averager.peer_id, result))
            if not isinstance(result, p2pavg.InProgress):
                break


def check(how: Setting, record: Seen, faults: Sequence[str]) -> None:
    """Check a run; raise AssertionError with the violation."""
    assert not faults, f"handling a message raised: {faults[0]}"
    bound = MATCH_TIMEOUT + EXCHANGE_TIMEOUT + SLACK
    assert record.longest <= bound, f"a step took {record.longest:.1f} s"
    liars = {simulated_signer(index).peer_id for index in how.liars}
    honest = {simulated_signer(index).peer_id for index in range(how.peers)} - liars
    assert not honest & record.excluded, "an honest peer is excluded"
    record.tally["excluded"] += len(record.excluded)
    bits: dict[tuple[str, tuple[str, ...]], str] = {}
    for peer_id, result in record.successes:
        assert isinstance(result.averaged, list)
        averaged = result.averaged[0]
        assert bool(torch.isfinite(averaged).all()), f"{peer_id} holds numbers that are not finite"
        digest = hashlib.sha256(averaged.numpy().tobytes()).hexdigest()
        same = bits.setdefault((result.group_id, result.peers), digest)
        assert same == digest, f"members of a group with the same peers hold different bits: {peer_id}"
        assert peer_id in result.peers, f"{peer_id} is not in its own result"
        proof = p2pavg.verify_certificate(result.certificate)
        assert (proof.group_id, proof.peers) == (result.group_id, result.peers), (
            "a certificate of another result"
        )
        assert peer_id in proof.signers, f"{peer_id} has not signed its own result"
        if 2 * len(liars & set(result.peers)) < len(result.peers):
            for step in range(ROUNDS):
                others = rounds_of_others(step, result.metrics[OUTER_STEP], result.peers, peer_id)
                assert not is_too_far(step, others, ROUNDS), f"{peer_id} throws an average away"
        if "lanes" in how.kinds and liars & set(result.peers):
            continue  # a hostile member's contribution is random
        exact = torch.zeros(ELEMENTS, dtype=torch.float64)
        for member, weight in result.weights.items():
            exact += weight * record.given[member, weight].double()
        exact /= result.total_weight
        error = float((averaged.double() - exact).norm() / exact.norm())
        assert error <= 1e-5, f"{peer_id} holds an average that is {error:.1e} from the mean of its peers"


class Faults(logging.Handler):
    """Collects log records of bugs that a message triggered."""

    def __init__(self, liars: Iterable[str]) -> None:
        super().__init__(level=logging.ERROR)
        # Hostile peers, about themselves.
        self._told = tuple(f"other peers exclude this one, {liar}" for liar in liars)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep an error's first line and its exception."""
        if record.getMessage().startswith(self._told):
            return
        raised = "" if record.exc_info is None else f": {record.exc_info[1]!r}"
        self.found.append(record.getMessage() + raised)


def one(seed: int) -> tuple[int, Counter[str], Counter[str], str]:
    """Run and check one seed; return the sent messages, the results, and a violation, if any."""
    torch.set_num_threads(1)
    how = setting(seed)
    faults = Faults(simulated_signer(index).peer_id for index in how.liars)
    vars(reduction)["part_size"] = lambda _elements, _reducers: PART_ELEMENTS
    logging.getLogger().addHandler(faults)
    try:
        record = simulate(partial(run, how), seed=seed)
        check(how, record, faults.found)
        if "states" in how.kinds:
            record.tally += fuzz_states.search(random.Random(f"states/{seed}"), SNAPSHOTS)
            record.sent["states"] += SNAPSHOTS
        if "texts" in how.kinds:
            record.tally += fuzz_texts.search(random.Random(f"texts/{seed}"), TEXTS)
            record.sent["texts"] += TEXTS
        if "serials" in how.kinds:
            record.tally += fuzz_serials.search(random.Random(f"serials/{seed}"), CERTIFICATES)
            record.sent["serials"] += CERTIFICATES
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return seed, Counter(), Counter(), f"{describe(error)}\n  {how}"
    finally:
        logging.getLogger().removeHandler(faults)
    return seed, record.sent, record.tally, ""


def main() -> int:
    """Run the fuzz test."""
    parser = argparse.ArgumentParser(
        prog="scripts/faults fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    parser.add_argument("--messages", type=int, default=10_000, help="how many, at least")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--log", action="store_true", help="with the peers' log")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    arguments = parser.parse_args()
    logging.basicConfig(
        level=logging.DEBUG if arguments.log else logging.ERROR,
        format="%(name)s %(message)s",
        stream=sys.stdout,
    )
    if not arguments.log:
        logging.getLogger().handlers[0].setLevel(logging.CRITICAL)  # errors are printed with their seeds
    if arguments.seed is not None:
        print(setting(arguments.seed))
        _, sent, tally, wrong = one(arguments.seed)
        print(dict(sent), dict(tally), wrong or "nothing is wrong")
        return int(bool(wrong))
    began = time.monotonic()
    total, sent_in_all, seeds, failed = Counter[str](), Counter[str](), 0, 0
    with multiprocessing.Pool(arguments.processes) as pool:
        first = arguments.first
        while sum(sent_in_all.values()) < arguments.messages:
            batch = range(first, first + 2 * arguments.processes)
            first = batch.stop
            for seed, sent, tally, wrong in pool.imap_unordered(one, batch):
                sent_in_all += sent
                total += tally
                seeds += 1
                if wrong:
                    failed += 1
                    print(
                        f"seed {seed}: {wrong}\n  again: scripts/faults fuzz --seed {seed} --log", flush=True
                    )
            if failed > 20:
                break
    seconds = time.monotonic() - began
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(sent_in_all.items()))
    results = ", ".join(f"{count} {name}" for name, count in sorted(total.items()))
    print(f"{seeds} seeds, {sum(sent_in_all.values())} messages ({kinds}) in {seconds:.0f} s: {failed} wrong")
    print(f"results of the honest peers: {results}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

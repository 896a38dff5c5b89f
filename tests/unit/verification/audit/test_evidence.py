"""Evidence of a false average, from the network: only what is signed and false counts."""

from __future__ import annotations

import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import pack
from p2pavg.group.aggregation import Aggregation
from p2pavg.verification.audit import evidence as module
from p2pavg.verification.audit.evidence import MAGIC, MAX_EVIDENCE_BYTES, read_false_average
from p2pavg.verification.audit.layout import read_manifest
from p2pavg.verification.evidence.accusation import read_accusation
from p2pavg_compression import Blockwise8, Codec, resolve_codec
from tests.unit.verification.audit.played import IDS, Played

CODEC = Blockwise8(block_size=64)


def evidence_of(liar: int | None, codec: Codec = CODEC) -> bytes:
    """Return well-formed evidence about the second member; it proves something only if that member lied."""
    played = Played(codec, Aggregation(), liar=liar)
    task, manifest, inputs = played.answered()
    index = task.indices[0]
    found = module.FalseAverage(
        roster=played.group,
        share=task.share,
        signed=task.signed,
        manifest=read_manifest(task.share, task.indices, manifest),
        index=index,
        inputs=inputs[0],
        average=task.averages[index],
    )
    return found.pack()


EVIDENCE = evidence_of(liar=1)
ROSTER_END = len(MAGIC) + 4 + struct.unpack_from(">I", EVIDENCE, len(MAGIC))[0]


def with_about(*fields: object, evidence: bytes = EVIDENCE) -> bytes:
    """Return the evidence with other words about what it is about."""
    end = len(MAGIC) + 4 + struct.unpack_from(">I", evidence, len(MAGIC))[0]
    (length,) = struct.unpack_from(">I", evidence, end)
    about = pack(*fields)
    return evidence[:end] + struct.pack(">I", len(about)) + about + evidence[end + 4 + length :]


def test_only_a_false_average_is_an_accusation() -> None:
    accusation = read_accusation(EVIDENCE)
    assert accusation.peer_id == IDS[1]
    assert accusation.reason.startswith("it sent a false average in attempt 0 of group ")
    with pytest.raises(RemoteProtocolError, match="evidence about an average that is right"):
        read_accusation(evidence_of(liar=None))


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.integers(0, len(EVIDENCE) - 1), st.integers(1, 255))
def test_no_changed_byte_is_accepted(position: int, change: int) -> None:
    """Each byte is part of something that is signed, or its own length."""
    changed = bytearray(EVIDENCE)
    changed[position] ^= change
    with pytest.raises(RemoteProtocolError):
        read_false_average(bytes(changed))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    for begin in (b"", MAGIC, EVIDENCE[:ROSTER_END]):
        with pytest.raises(RemoteProtocolError):
            read_false_average(begin + data)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(EVIDENCE) - 1))
def test_evidence_that_is_cut_short_or_too_long_is_refused(length: int) -> None:
    with pytest.raises(RemoteProtocolError):
        read_false_average(EVIDENCE[:length])
    with pytest.raises(RemoteProtocolError, match="after its end"):
        read_false_average(EVIDENCE + bytes(1))


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ((0, (0, 1, 2), 1, "", 6), "evidence about part 6 of 1"),
        ((0, (0, 1, 2), 1, "", -1), "EvidenceSubject"),
        ((-1, (0, 1, 2), 1, "", 0), "EvidenceSubject"),
        ((0, (0, 1), 1, "", 0), "a first attempt among some"),
        ((1, (1, 0), 1, "", 0), "EvidenceSubject"),
        ((1, (0, 1, 3), 1, "", 0), "members that the roster has not"),
        ((1, (0, -1), 0, "", 0), "EvidenceSubject"),
        ((0, (0, 1, 2), 1, "no rule", 0), "unknown codec or rule"),
        ((0, (0, 1, 2), 1, "median", 0), "has not signed"),
        ((0, (0, 1, 2), 2, "", 0), "has not signed"),
        ((0, (0, 1, 2), 1, ""), "EvidenceSubject"),
    ],
)
def test_evidence_about_the_impossible_is_refused(about: tuple[object, ...], reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        read_false_average(with_about(*about))


def test_a_robust_rule_of_sparse_contributions_is_not_computed() -> None:
    """No honest group has one, and 70 KB of such evidence took a peer 12 s."""
    sparse = evidence_of(1, resolve_codec("topk:64:4"))
    for rule in ("median", "centered_clip:1.0:3"):
        with pytest.raises(RemoteProtocolError, match="robust cannot be combined"):
            read_false_average(with_about(0, (0, 1, 2), 1, rule, 0, evidence=sparse))


def test_more_contributors_than_a_group_may_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GROUP_SIZE", 2)
    with pytest.raises(RemoteProtocolError, match="a group of 3 contributors"):
        read_false_average(EVIDENCE)


def test_evidence_that_is_too_large_is_refused_unread() -> None:
    with pytest.raises(RemoteProtocolError):
        read_false_average(MAGIC + bytes(MAX_EVIDENCE_BYTES))


def test_a_roster_of_a_huge_vector_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shares would be cut into more parts than the evidence has digests."""
    huge = Played(CODEC, Aggregation()).group
    object.__setattr__(huge, "shares", (2**60, 2**60, 2**60))
    roster = huge.pack()
    data = MAGIC + struct.pack(">I", len(roster)) + roster + EVIDENCE[ROSTER_END:]
    monkeypatch.setattr(module, "Share", None)  # nothing is computed of the share
    with pytest.raises(RemoteProtocolError, match="more parts than it has digests"):
        read_false_average(data)

"""The record that names evidence, and the messages of a fetch: their bytes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_CERTIFICATE_BYTES
from p2pavg.base.messages import pack
from p2pavg.verification.evidence.accusation import (
    MAX_ADDRESSES,
    MAX_ANSWER_BYTES,
    MAX_EVIDENCE_BYTES,
    MAX_KIND_CHARS,
    MAX_NAMED,
    MAX_REQUEST_BYTES,
    EvidenceAnswer,
    EvidenceRequest,
    Notice,
    accusations_key,
    read_notice,
)
from tests.unit.verification.evidence.samples import named, signer

PEER = signer(1).peer_id
NAMED = (bytes(32), 300, PEER, "p2pavg-evidence/1")
LARGEST = Notice(
    ("/" + "a" * 255,) * MAX_ADDRESSES,
    tuple(
        named(PEER, number, size=MAX_EVIDENCE_BYTES, kind="k" * MAX_KIND_CHARS) for number in range(MAX_NAMED)
    ),
)


def test_the_bytes_never_change() -> None:
    notice = Notice(("/ip4/1.2.3.4/tcp/5",), (named(PEER, 7),))
    assert (
        notice.encode().hex()
        == pack(1, ["/ip4/1.2.3.4/tcp/5"], [[(7).to_bytes(32, "big"), *NAMED[1:]]]).hex()
    )
    assert EvidenceRequest(b"k" * 32, b"d" * 32, b"c").encode() == pack(1, b"k" * 32, b"d" * 32, b"c")
    assert EvidenceAnswer("no").encode() == b"\x92\x01\xa2no"
    assert accusations_key("run").hex() == "622c2b69421e9acbb58aaf7d3f2f53dd802c8eef0e9ca4260a3841f26621063c"


def test_the_largest_notice_fits_into_a_record() -> None:
    assert len(LARGEST.encode()) <= 4096
    assert read_notice(LARGEST.encode()) == LARGEST


@pytest.mark.parametrize(
    "fields",
    [
        (2, (), (NAMED,)),
        (1, (), ()),
        (1, (), (NAMED,) * (MAX_NAMED + 1)),
        (1, ("/a",) * (MAX_ADDRESSES + 1), (NAMED,)),
        (1, ("no address",), (NAMED,)),
        (1, (7,), (NAMED,)),
        (1, (), (7,)),
        (1, (), ((bytes(31), *NAMED[1:]),)),
        (1, (), ((bytes(32), 0, *NAMED[2:]),)),
        (1, (), ((bytes(32), MAX_EVIDENCE_BYTES + 1, *NAMED[2:]),)),
        (1, (), ((bytes(32), True, *NAMED[2:]),)),
        (1, (), ((*NAMED[:2], "no peer", NAMED[3]),)),
        (1, (), ((*NAMED[:3], ""),)),
        (1, (), ((*NAMED[:3], "k" * (MAX_KIND_CHARS + 1)),)),
        (1, (), ((*NAMED[:3], "new\nline"),)),
        (1, (), (NAMED[:3],)),
    ],
)
def test_other_notices_are_refused(fields: tuple[Any, ...]) -> None:
    with pytest.raises(RemoteProtocolError):
        read_notice(pack(*fields))


def test_requests_and_answers_survive_the_wire_within_their_limits() -> None:
    request = EvidenceRequest(b"k" * 32, b"d" * 32, b"c" * MAX_CERTIFICATE_BYTES)
    assert EvidenceRequest.decode(request.encode()) == request
    assert len(request.encode()) <= MAX_REQUEST_BYTES
    assert EvidenceAnswer.decode(EvidenceAnswer("").encode()).refusal == ""
    assert EvidenceAnswer.decode(EvidenceAnswer("x" * 999).encode()).refusal == "x" * 200
    assert len(EvidenceAnswer("\U0001f600" * 999).encode()) <= MAX_ANSWER_BYTES


@pytest.mark.parametrize(
    "data",
    [
        pack(2, bytes(32), bytes(32), b""),
        pack(1, bytes(31), bytes(32), b""),
        pack(1, bytes(32), bytes(33), b""),
        pack(1, bytes(32), bytes(32), bytes(MAX_CERTIFICATE_BYTES + 1)),
        pack(1, bytes(32), bytes(32)),
        b"",
    ],
)
def test_other_requests_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        EvidenceRequest.decode(data)


@pytest.mark.parametrize(
    "data", [pack(2, ""), pack(1, "x" * 201), pack(1, "a\x1b[2J"), pack(1, b""), b"\xff"]
)
def test_other_answers_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        EvidenceAnswer.decode(data)

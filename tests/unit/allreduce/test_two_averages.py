"""Evidence that a reducer signed two averages of one share: any peer can check it, and no other peer can make it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2pavg.allreduce.proofs import (
    MAX_EVIDENCE_BYTES,
    PART_DIGEST_BYTES,
    Output,
    Subject,
    encode_two_averages,
    read_two_averages,
)
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_MEMBERS
from p2pavg.consensus.votes import SIGNATURE_BYTES
from p2pavg.verification.evidence.accusation import read_accusation
from tests.unit.group.samples import SIGNERS

REDUCER, OTHER = SIGNERS[0], SIGNERS[1]
SUBJECT = Subject(b"g" * 32, 3, (0, 1, 4), "mean")


def output(digest: bytes, subject: Subject = SUBJECT, position: int = 1, signer: object = REDUCER) -> Output:
    digest, inputs = digest * PART_DIGEST_BYTES, b"i" * PART_DIGEST_BYTES
    return Output(digest, inputs, signer.sign(subject.share_bytes(position, inputs, digest)))  # type: ignore[attr-defined]


def evidence() -> bytes:
    return encode_two_averages(REDUCER.peer_id, SUBJECT, 1, output(b"a"), output(b"b"))


def test_two_signatures_accuse_the_reducer_in_either_order() -> None:
    assert read_two_averages(evidence()) == (REDUCER.peer_id, SUBJECT)
    assert evidence() == encode_two_averages(REDUCER.peer_id, SUBJECT, 1, output(b"b"), output(b"a"))
    accusation = read_accusation(evidence())
    assert accusation.peer_id == REDUCER.peer_id
    assert "it signed two averages of its share in attempt 3" in accusation.reason


@pytest.mark.parametrize(
    "second",
    [
        output(b"a"),
        output(b"b", replace(SUBJECT, attempt=4)),
        output(b"b", replace(SUBJECT, members=(0, 1))),
        output(b"b", replace(SUBJECT, group_id=b"h" * 32)),
        output(b"b", position=4),
        output(b"b", signer=OTHER),
    ],
    ids=["the same", "another attempt", "other members", "another group", "another share", "another signer"],
)
def test_nothing_else_is_evidence(second: Output) -> None:
    with pytest.raises(ValueError, match="do not contradict"):
        encode_two_averages(REDUCER.peer_id, SUBJECT, 1, output(b"a"), second)


def test_bytes_that_are_changed_anywhere_prove_nothing() -> None:
    data = evidence()
    for at in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            read_two_averages(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    for wrong in (b"", data[:-1], data + b"\0", bytes(MAX_EVIDENCE_BYTES + 1)):
        with pytest.raises(RemoteProtocolError):
            read_two_averages(wrong)


def test_evidence_of_the_largest_group_fits() -> None:
    subject = replace(SUBJECT, members=tuple(range(MAX_MEMBERS)), aggregation="x" * 500)
    two = (output(b"a", subject), output(b"b", subject))
    data = encode_two_averages(REDUCER.peer_id, subject, 1, *two)
    assert len(data) <= MAX_EVIDENCE_BYTES
    assert len(two[0].signature) == SIGNATURE_BYTES
    assert read_two_averages(data) == (REDUCER.peer_id, subject)

"""Averages of the log: a manifest counts only if members of the run signed exactly these bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg.allreduce.averages import EncodedAverage
from p2pavg.allreduce.reduction import parts_of_share
from p2pavg.base.errors import RemoteProtocolError, StateError
from p2pavg.consensus.certificate import encode_certificate
from p2pavg.consensus.statements import Statement, result_digest
from p2pavg.consensus.votes import DIGEST_BYTES, ResultCommit
from p2pavg.group.candidate import Candidate, sign_candidate
from p2pavg.group.roster import Roster, ShareCutter
from p2pavg.state.average import (
    MAX_MANIFEST_BYTES,
    MAX_NUMBERS_BYTES,
    Expected,
    FewSignersError,
    LoggedAverage,
    decode,
    manifest_of,
    pack_numbers,
    read_manifest,
    read_numbers,
)
from p2pavg.state.joiner.transfers import replayed_success
from p2pavg.testing.simulation import simulated_signer
from p2pavg_compression import resolve_codec

KEY = b"k" * 32
STATE = b"s" * 32
ELEMENTS = 3000
CODEC = resolve_codec("bf16")
VALUES = torch.arange(ELEMENTS, dtype=torch.float32).remainder(64)
CUTTER = ShareCutter(ELEMENTS, CODEC.granularity)


def member(index: int, **changes: Any) -> Candidate:
    fields: dict[str, Any] = {
        "key": KEY,
        "deadline": 100.0 + index,
        "expiration_time": 1000.0,
        "weight": 1.0 + index,
        "bandwidth": 100.0,
        "codec": CODEC.name,
        "auxiliary": False,
        "addresses": ("/ip4/203.0.113.7/tcp/40001",),
        "state": STATE,
    }
    return sign_candidate(simulated_signer(index), **(fields | changes))


def roster_of(size: int = 4, **changes: Any) -> Roster:
    members = tuple(member(index, **changes) for index in range(size))
    return Roster(members=members, shares=CUTTER.cut(members), proposal=1)


ROSTER = roster_of()


def encoded_in(roster: Roster, values: torch.Tensor = VALUES) -> tuple[EncodedAverage, bytes]:
    """Return an average that is cut into the roster's shares, and the digest that members sign."""
    parts, digests, of_shares = [], [], []
    for position in range(len(roster.members)):
        cut = parts_of_share(roster, position, CODEC.granularity)
        payloads = [bytes(CODEC.encode(values[part.start : part.stop])) for part in cut]
        found = [blake3(payload).digest() for payload in payloads]
        of_shares.append(blake3(b"".join(found)).digest(DIGEST_BYTES))
        parts += payloads
        digests += found
    return EncodedAverage(tuple(parts), tuple(digests)), result_digest(of_shares)


def logged(
    roster: Roster = ROSTER,
    *,
    signers: Sequence[int] = (0, 1, 2, 3),
    attempt: int = 0,
    members: Sequence[int] | None = None,
    cut: Roster | None = None,
    values: torch.Tensor = VALUES,
) -> LoggedAverage:
    """Return the average of one attempt of a group, with a genuine certificate.

    Args:
        cut: roster with the shares of the attempt, if they are not those of its members.
    """
    among = range(len(roster.members)) if members is None else members
    found = roster.among(attempt, among, CUTTER) if cut is None else cut
    encoded, digest = encoded_in(found, values)
    statement = Statement(roster.group_id, attempt, frozenset(among), digest)
    signatures = tuple((one, simulated_signer(one).sign(statement.signed_bytes())) for one in signers)
    certificate = encode_certificate(roster, ResultCommit(attempt, frozenset(among), digest, signatures))
    return LoggedAverage(roster.holders[0].state, roster.group_id, certificate, encoded)


def expected(roster: Roster = ROSTER, **changes: Any) -> Expected:
    fields: dict[str, Any] = {
        "group_id": roster.group_id,
        "key": KEY,
        "codec": CODEC,
        "elements": ELEMENTS,
        "robust": False,
        "cutter": CUTTER,
        "trusts": lambda _member: True,
    }
    return Expected(**(fields | changes))


MANIFEST = logged().manifest()


def of_one(members: Sequence[int]) -> Roster:
    """Return the roster of an attempt in which the first member reduces everything."""
    found = ROSTER.among(5, members, CUTTER)
    whole = (((0, ELEMENTS),), *((),) * (len(members) - 1))
    return replace(found, shares=(ELEMENTS, *(0,) * (len(members) - 1)), divided=whole)


def test_a_genuine_average_is_proven_and_decodes() -> None:
    average = logged()
    proven = read_manifest(average.manifest(), expected())
    assert proven.state == average.state == STATE
    assert (proven.group_id, proven.certificate) == (average.group_id, average.certificate)
    assert proven.digests == average.encoded.digests
    assert proven.sizes == tuple(map(len, average.encoded.parts))
    assert proven.roster == ROSTER
    out = torch.empty(ELEMENTS)
    decode(proven, average.encoded.parts, CODEC, out)
    assert torch.equal(out, VALUES)
    assert average.nbytes >= sum(proven.sizes) + len(average.certificate)


@pytest.mark.parametrize(("robust", "loss"), [(False, 1e29 / 3), (True, 2.0)])
def test_a_replayed_round_has_the_metrics_of_its_members(robust: bool, loss: float) -> None:
    """With a robust rule they are medians, as in the round: no claim of one member moves them."""
    members = tuple(
        member(index, weight=1.0, metrics={"loss": claim}) for index, claim in enumerate((1, 2, 1e29))
    )
    roster = Roster(members=members, shares=CUTTER.cut(members), proposal=1)
    average = logged(roster, signers=(0, 1, 2))
    success = replayed_success(read_manifest(average.manifest(), expected(roster, robust=robust)), [])
    assert success.metrics["loss"] == pytest.approx(loss)


@pytest.mark.parametrize("members", [(0, 1, 2), (1, 3), (0, 1, 2, 3)])
def test_a_later_attempt_has_the_shares_of_its_members(members: tuple[int, ...]) -> None:
    average = logged(attempt=5, members=members, signers=members)
    proven = read_manifest(average.manifest(), expected())
    assert [one.peer_id for one in proven.roster.members] == [ROSTER.members[at].peer_id for at in members]
    out = torch.empty(ELEMENTS)
    decode(proven, average.encoded.parts, CODEC, out)
    assert torch.equal(out, VALUES)


def trusts(*positions: int) -> Callable[[Candidate], bool]:
    ids = {simulated_signer(position).peer_id for position in positions}
    return lambda one: one.peer_id in ids


def refused(data: bytes, match: str, **changes: Any) -> None:
    with pytest.raises((RemoteProtocolError, FewSignersError), match=match):
        read_manifest(data, expected(**changes))


def test_two_trusted_signers_are_needed() -> None:
    two = logged(signers=(0, 1)).manifest()
    read_manifest(two, expected(trusts=trusts(0, 1)))
    refused(two, "1 members of the run have signed", trusts=trusts(1, 2, 3))
    refused(MANIFEST, "0 members of the run have signed", trusts=trusts())
    refused(logged(signers=(0,)).manifest(), "1 members of the run have signed")


def test_an_average_of_another_group_run_schema_or_codec_is_refused() -> None:
    refused(MANIFEST, "another group", group_id=bytes(32))
    refused(logged(replace(ROSTER, proposal=2)).manifest(), "another group")
    refused(MANIFEST, "3000 elements", elements=ELEMENTS + 1)


def test_a_donor_of_a_group_that_was_asked_for_is_not_accused_of_other_tensors_rules_or_codecs() -> None:
    """An error of the protocol excludes the donor; this one ends the transfer."""
    other = roster_of(key=b"x" * 32)
    for data, changes, match in (
        (MANIFEST, {"key": b"x" * 32}, "other tensors or rules than this peer's"),
        (logged(other).manifest(), {"group_id": other.group_id}, "other tensors or rules than this peer's"),
        (MANIFEST, {"codec": resolve_codec("fp16")}, "the codec bf16, and this peer's is fp16"),
    ):
        with pytest.raises(StateError, match=match):
            read_manifest(data, expected(**cast(Any, changes)))


def test_a_leader_cannot_choose_the_shares_of_a_later_attempt() -> None:
    members = (0, 1, 2)
    average = logged(attempt=5, members=members, signers=members, cut=of_one(members))
    refused(average.manifest(), "other parts|digests of")


def test_shares_that_do_not_cover_the_vector_are_refused() -> None:
    for shares in ((ELEMENTS, 1, 0, 0), (1, 1, 1, 1), (2**62, 2**62, 0, 0)):
        strange = replace(ROSTER, shares=shares)
        statement = Statement(strange.group_id, 0, frozenset(range(4)), bytes(DIGEST_BYTES))
        signatures = tuple((one, simulated_signer(one).sign(statement.signed_bytes())) for one in range(4))
        commit = ResultCommit(0, frozenset(range(4)), bytes(DIGEST_BYTES), signatures)
        certificate = encode_certificate(strange, commit)
        data = manifest_of(certificate, b"", b"")
        refused(data, "elements", group_id=strange.group_id)


def _split() -> tuple[bytes, list[bytes]]:
    average = logged()
    return manifest_of(average.certificate, b"", b""), list(average.encoded.digests)


@pytest.mark.parametrize(
    "change",
    [
        lambda digests: digests[:-1],
        lambda digests: digests[1:],
        lambda _digests: [],
        lambda digests: [*digests, digests[0]],
        lambda digests: [digests[1], digests[0], *digests[2:]],
        lambda digests: [*digests[:-1], bytes(32)],
        lambda digests: [*digests[:-1], digests[-1][:-1]],
        lambda digests: [*digests, b"\0"],
    ],
    ids=["last missing", "first missing", "none", "one more", "swapped", "another", "short", "long"],
)
def test_other_digests_than_the_signed_ones_are_refused(change: Callable[[list[bytes]], list[bytes]]) -> None:
    head, digests = _split()
    refused(head + b"".join(change(digests)), "digests of")


def test_digests_that_move_between_shares_are_refused() -> None:
    """The digest of the result covers the shares' digests, not only the row of all parts."""
    average = logged(attempt=5, members=(0, 1), signers=(0, 1), cut=of_one((0, 1)))
    refused(average.manifest(), "digests of")


def test_a_part_that_does_not_decode_is_an_error_of_its_sender() -> None:
    average = logged()
    proven = read_manifest(average.manifest(), expected())
    with pytest.raises(RemoteProtocolError, match="does not decode"):
        decode(proven, [b"", *average.encoded.parts[1:]], CODEC, torch.empty(ELEMENTS))


@settings(max_examples=200)
@given(st.integers(0, len(MANIFEST) - 1), st.integers(1, 255))
def test_no_manifest_with_a_changed_byte_is_accepted(position: int, change: int) -> None:
    changed = bytearray(MANIFEST)
    changed[position] ^= change
    with pytest.raises(RemoteProtocolError):
        read_manifest(bytes(changed), expected())


@settings(max_examples=60)
@given(st.integers(0, len(MANIFEST) - 1), st.binary(max_size=40))
def test_no_manifest_that_is_cut_or_longer_is_accepted(length: int, more: bytes) -> None:
    for data in (MANIFEST[:length], MANIFEST[:length] + more, MANIFEST + b"\0" + more):
        if data != MANIFEST:
            with pytest.raises(RemoteProtocolError):
                read_manifest(data, expected())


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_manifest(data, expected())


def test_a_manifest_beyond_its_bound_is_not_read() -> None:
    refused(bytes(MAX_MANIFEST_BYTES + 1), "a manifest of")
    refused(struct.pack(">I", 2**32 - 1) + MANIFEST[4:], "ends too early")
    average = logged()
    numbers = bytes(MAX_NUMBERS_BYTES + 1)
    refused(manifest_of(average.certificate, numbers, b""), "hyperparameters of 65537 bytes")


def test_hyperparameters_come_with_an_average() -> None:
    given = (("lr", 0.1), ("betas", (0.9, 0.999)), ("fused of group 1", True))
    average = replace(logged(), numbers=pack_numbers(given))
    assert read_numbers(read_manifest(average.manifest(), expected()).numbers) == given
    for wrong in (b"", b"\x90", pack_numbers([])[:-1]):
        with pytest.raises(StateError):
            read_numbers(wrong)
    with pytest.raises(StateError, match="the most"):
        pack_numbers([("lr", "x" * MAX_NUMBERS_BYTES)])

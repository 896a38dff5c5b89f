"""Entries of a history: their bytes, their hashes, and proofs of single leaves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg.base.errors import StateError
from p2pavg.state.history.entries import (
    FRAME_BYTES,
    MAX_BODY_BYTES,
    Entry,
    HistoryNotice,
    Seal,
    SegmentBeginning,
    Snapshot,
    Update,
    credits_of,
    framed,
    hash_of,
    leaf_hash,
    merkle_proof,
    merkle_root,
    payload_size,
    proven_root,
    read_entry,
    read_frame,
    sealed,
)
from p2pavg.testing.simulation import simulated_signer

ARCHIVIST = simulated_signer(1)
HASH = bytes(range(32))
BEGINNING = SegmentBeginning(
    number=3,
    time=100.0,
    archivist=ARCHIVIST.peer_id,
    run_id="run",
    codec="fp32",
    aggregation="",
    shapes=((2, 3), ()),
    dtypes=("float32", "bfloat16"),
    names=("weight",),
)
ENTRIES: list[Entry] = [
    BEGINNING,
    Snapshot(time=100.0, epoch=0, state=HASH, root=HASH, size=7),
    Update(
        time=1.0,
        epoch=1,
        before=HASH,
        after=HASH,
        certificate=b"c",
        digests=HASH,
        numbers=b"n",
        digest=HASH,
        size=28,
    ),
    HistoryNotice(time=2.0, kind="revoked", digest=HASH, size=5),
    Seal(
        time=3.0,
        archivist=ARCHIVIST.peer_id,
        run_id="run",
        number=3,
        entries=4,
        root=HASH,
        credits=HASH,
        signature=bytes(64),
    ),
]
LEAVES = st.lists(st.binary(max_size=6), min_size=1, max_size=40)


def test_each_kind_of_entry_is_tested_here() -> None:
    assert {type(entry) for entry in ENTRIES} == set(get_args(Entry))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: type(entry).__name__)
def test_an_entry_is_read_as_it_was_written(entry: Entry) -> None:
    body = entry.encode()
    assert read_entry(body) == entry
    data = framed(HASH, body)
    assert read_frame(data[:FRAME_BYTES]) == (len(body), HASH)
    assert data[FRAME_BYTES:] == body
    for wrong in (body[:-1], body + b"\0", b"\xc1" + body[1:]):
        with pytest.raises(StateError):
            read_entry(wrong)


def test_the_format_stays() -> None:
    """Histories are kept for years. Another body needs another version of the format."""
    bodies = b"".join(entry.encode() for entry in ENTRIES)
    assert (
        hashlib.sha256(bodies).hexdigest()
        == "a3e3f23bc638143ff2e70eb8a76704773a6c5f3982bf4f29c8541d1f3441bb3a"
    )
    assert (
        hash_of(bytes(32), BEGINNING.encode()).hex()
        == "be1e6a54d296fc48e396acf977a2e2af3a1336111c931f6229950c14ee09ab4f"
    )


def test_payloads_follow_some_entries() -> None:
    assert [payload_size(entry) for entry in ENTRIES] == [0, 7, 28, 5, 0]


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_entry(data: bytes) -> None:
    with pytest.raises(StateError):
        read_entry(data)


@settings(max_examples=300)
@given(st.sampled_from(ENTRIES), st.data())
def test_a_changed_entry_is_refused_or_is_another_one(entry: Entry, data: st.DataObject) -> None:
    body = bytearray(entry.encode())
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] ^= data.draw(st.integers(1, 255))
    try:
        found = read_entry(bytes(body))
    except StateError:
        return
    assert found != entry
    assert found.encode() == body
    assert hash_of(HASH, bytes(body)) != hash_of(HASH, entry.encode())


@pytest.mark.parametrize("length", [0, MAX_BODY_BYTES + 1, 2**32 - 1])
def test_no_body_of_another_length_is_read(length: int) -> None:
    with pytest.raises(StateError, match="bytes"):
        read_frame(length.to_bytes(4, "big") + HASH)


def test_an_entry_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="shapes"):
        msgspec.structs.replace(BEGINNING, dtypes=())
    with pytest.raises(ValueError, match="authority"):
        msgspec.structs.replace(BEGINNING, authority=b"k")


def test_a_seal_signs_all_of_its_fields() -> None:
    seal, there = ENTRIES[-1], simulated_signer(2).peer_id
    assert isinstance(seal, Seal)
    other = Seal(
        time=4.0, archivist=there, run_id="other", number=4, entries=5, root=bytes(32), credits=bytes(32)
    )
    names = [name for name in Seal.__struct_fields__ if name != "signature"]
    signed = sealed(ARCHIVIST, seal)
    changed = {msgspec.structs.replace(signed, **{name: getattr(other, name)}).statement for name in names}
    assert len(changed) == len(names)
    assert signed.statement not in changed


# Merkle trees.


def reference_root(leaves: Sequence[bytes]) -> bytes:
    """Return the root by the definition in RFC 9162, section 2.1.1."""
    if len(leaves) == 1:
        return hashlib.sha256(b"\0" + leaves[0]).digest()
    half = 1
    while 2 * half < len(leaves):
        half *= 2
    return hashlib.sha256(b"\1" + reference_root(leaves[:half]) + reference_root(leaves[half:])).digest()


@given(LEAVES)
def test_the_root_is_that_of_the_standard(leaves: list[bytes]) -> None:
    assert merkle_root(leaves) == reference_root(leaves)


def test_the_root_of_nothing_is_that_of_the_standard() -> None:
    assert merkle_root([]) == hashlib.sha256(b"").digest()


@given(LEAVES, st.data())
def test_a_proof_leads_to_the_root_for_its_leaf_alone(leaves: list[bytes], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(leaves) - 1))
    proof = merkle_proof(leaves, index)
    assert proven_root(leaves[index], index, len(leaves), proof) == merkle_root(leaves)
    assert proven_root(leaves[index] + b"!", index, len(leaves), proof) != merkle_root(leaves)
    other = data.draw(st.integers(0, len(leaves) - 1))
    if leaves[other] != leaves[index]:
        with suppress(StateError):  # a leaf at that place may have a proof of another length
            assert proven_root(leaves[index], other, len(leaves), proof) != merkle_root(leaves)


@given(LEAVES, st.data())
def test_no_other_proof_is_of_a_leaf(leaves: list[bytes], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(leaves) - 1))
    proof = merkle_proof(leaves, index)
    for wrong in ((*proof, HASH), proof[1:]):
        if len(wrong) != len(proof):
            with pytest.raises(StateError, match="hashes"):
                proven_root(leaves[index], index, len(leaves), wrong)
    with pytest.raises(StateError, match="leaf"):
        proven_root(leaves[index], len(leaves), len(leaves), proof)


def test_a_leaf_is_no_node() -> None:
    """Else a node could be shown as a leaf that was never there."""
    left, right = leaf_hash(b"a"), leaf_hash(b"b")
    assert merkle_root([b"a", b"b"]) != leaf_hash(left + right)


# Credits.


def test_credits_are_summed_by_peer_and_day() -> None:
    one, other = ARCHIVIST.peer_id, simulated_signer(2).peer_id
    said: list[tuple[float, Mapping[str, float]]] = [
        (86399.0, {one: 2.0, other: 1.0}),
        (86400.0, {one: 4.0}),
        (86401.0, {one: 8.0}),
    ]
    found = credits_of(said)
    assert [credit.peer_id for credit in found] == sorted([one, other])
    by_peer = {
        credit.peer_id: [(day.day, day.updates, day.samples) for day in credit.days] for credit in found
    }
    assert by_peer == {one: [(0, 1, 2.0), (1, 2, 12.0)], other: [(0, 1, 1.0)]}

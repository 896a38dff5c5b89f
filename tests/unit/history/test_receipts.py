"""Receipts: what they prove, and that nothing else is proven. Statements of several identities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from p2pavg.base.errors import StateError
from p2pavg.state.history.entries import DayCredit
from p2pavg.state.history.receipts import (
    Receipt,
    SamePeers,
    read_receipt,
    read_same,
    receipt_part,
    same_peers,
)
from p2pavg.testing.simulation import simulated_signer
from p2pavg.tools.history.checking import CheckOptions, check_history
from scripts.fault_search.made_history import ARCHIVIST, MadeRun, record

PEER, OTHER = simulated_signer(2).peer_id, simulated_signer(3).peer_id


@pytest.fixture(scope="module")
def receipt(tmp_path_factory: pytest.TempPathFactory) -> Receipt:
    """Return a receipt of one peer from two segments."""
    directory = tmp_path_factory.mktemp("history")
    run = MadeRun()
    for _ in range(2):
        record(run, directory, 3)
    report = check_history(directory, CheckOptions(averages=False))
    parts = [receipt_part(each.seal, each.credited, PEER) for each in report.sealed]
    return Receipt(
        run_id=report.run_id,
        authority=report.authority,
        archivist=simulated_signer(ARCHIVIST).peer_id,
        certificate=run.certificate(ARCHIVIST),
        peer_id=PEER,
        parts=tuple(part for part in parts if part is not None),
    )


def test_it_proves_the_contributions_of_its_peer(receipt: Receipt) -> None:
    data = receipt.encode()
    found = read_receipt(data)
    assert sum(day.updates for part in found.parts for day in part.credit.days) == 6
    assert sum(day.samples for part in found.parts for day in part.credit.days) == 48.0
    assert len(data) < 2000


def test_a_peer_that_is_not_in_a_segment_has_no_part_of_it(receipt: Receipt) -> None:
    part = receipt.parts[0]
    assert receipt_part(part.seal, [part.credit], simulated_signer(9).peer_id) is None


def _part(receipt: Receipt, **changes: Any) -> Receipt:
    first = replace(receipt.parts[0], **changes)
    return replace(receipt, parts=(first, *receipt.parts[1:]))


def _more_samples(receipt: Receipt) -> Receipt:
    credit = receipt.parts[0].credit
    days = tuple(DayCredit(day.day, day.updates, day.samples + 1) for day in credit.days)
    return _part(receipt, credit=replace(credit, days=days))


def _other_seal(receipt: Receipt) -> Receipt:
    return _part(receipt, seal=replace(receipt.parts[0].seal, credits=bytes(32)))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_more_samples, "segment 0: the credit is not under the seal"),
        (lambda receipt: _part(receipt, proof=()), "a proof of 0 hashes"),
        (lambda receipt: _part(receipt, index=1), "the credit is not under the seal"),
        (_other_seal, "segment 0: the seal is forged"),
        (lambda receipt: replace(receipt, archivist=OTHER), "a seal of another archivist or run"),
        (lambda receipt: replace(receipt, peer_id=OTHER), "the credit of another peer"),
        (lambda receipt: replace(receipt, parts=(receipt.parts[0],) * 2), "stand twice"),
        (
            lambda receipt: replace(receipt, certificate=MadeRun().certificate(4)),
            "the archivist is no member of the run: its certificate is for another peer",
        ),
    ],
)
def test_what_was_changed_proves_nothing(
    receipt: Receipt, change: Callable[[Receipt], Receipt], match: str
) -> None:
    with pytest.raises(StateError, match=match):
        read_receipt(change(receipt).encode())


@settings(max_examples=150)
@given(data=st.data())
def test_no_changed_byte_is_accepted(receipt: Receipt, data: st.DataObject) -> None:
    changed = bytearray(receipt.encode())
    at = data.draw(st.integers(0, len(changed) - 1))
    changed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(StateError):
        read_receipt(bytes(changed))


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_no_receipt_and_no_statement(data: bytes) -> None:
    for read in (read_receipt, read_same):
        with pytest.raises(StateError):
            read(data)


# Several identities.


def test_several_identities_are_one() -> None:
    said = same_peers([simulated_signer(number) for number in (3, 1, 2)])
    assert read_same(said.encode()) == tuple(sorted(simulated_signer(number).peer_id for number in (1, 2, 3)))


def test_each_of_them_has_signed() -> None:
    said = same_peers([simulated_signer(number) for number in (1, 2)])
    victim = simulated_signer(3).peer_id
    for wrong in (
        SamePeers(peers=said.peers, signatures=said.signatures[:1]),
        SamePeers(peers=said.peers, signatures=said.signatures[::-1]),
        SamePeers(peers=tuple(sorted((said.peers[0], victim))), signatures=said.signatures),
    ):
        with pytest.raises(StateError, match="signed"):
            read_same(wrong.encode())
    with pytest.raises(StateError, match="2 to 64"):
        same_peers([simulated_signer(1)] * 2)
    with pytest.raises(ValueError, match="out of order"):
        SamePeers(peers=said.peers[::-1])

"""What a peer says of itself when it is ready, and what is refused although its signature is genuine."""

from __future__ import annotations

import math

import pytest

from p2pavg.config import MAX_CODEC_CHARS
from p2pavg.errors import RemoteProtocolError
from p2pavg.matchmaking.roster import (
    MAX_BANDWIDTH,
    MAX_WEIGHT,
    read_candidate,
    read_signed_candidate,
    ready_key,
    share_cutter,
)
from p2pavg_dht.record import pack as pack_record
from tests.unit.roster.samples import DEADLINE, KEY, SIGNERS, candidate, record_of, signed

ADDRESSES = ("/ip4/192.0.2.0/tcp/4001",)


def test_the_key_never_changes() -> None:
    assert (
        ready_key("albert-base", bytes(32)).hex()
        == "b2012804bc52ae7331cacbc69c27b18c1711056e2868a05eedb3f9b758072f68"
    )


def test_runs_schemas_and_buckets_have_different_keys() -> None:
    keys = {
        ready_key(run_id, schema, bucket)
        for run_id in ("run", "run2", "Run")
        for schema in (bytes(32), bytes(31) + b"\1")
        for bucket in (0, 1)
    }
    assert len(keys) == 12


def test_what_was_signed_is_what_is_read() -> None:
    me = candidate(3, weight=0.5, bandwidth=12.5, codec="int8:256", addresses=("/a/b", "/c"))
    again = read_signed_candidate(pack_record(me.record))
    assert again == me
    assert (again.peer_id, again.deadline, again.weight, again.bandwidth) == (
        SIGNERS[3].peer_id,
        DEADLINE + 3,
        0.5,
        12.5,
    )
    assert (again.codec, again.auxiliary, again.addresses) == ("int8:256", False, ("/a/b", "/c"))
    assert again.record.key == KEY


def test_a_later_attempt_takes_the_place_of_an_earlier_one() -> None:
    earlier, later = candidate(0, deadline=DEADLINE), candidate(0, deadline=DEADLINE + 1e-3)
    assert later.record.sequence > earlier.record.sequence


def test_auxiliaries_come_last_then_counts_the_deadline_then_the_id() -> None:
    late, early = candidate(0, deadline=DEADLINE + 9), candidate(1, deadline=DEADLINE)
    auxiliary = candidate(2, auxiliary=True, deadline=0.0)
    same_time = sorted((candidate(3, deadline=DEADLINE), early), key=lambda each: each.peer_id)
    ordered = sorted([auxiliary, late, *same_time], key=lambda each: each.order)
    assert ordered == [*same_time, late, auxiliary]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ((2, 1.0, 1.0, 1.0, "fp32", False, ADDRESSES), "readiness of version 2"),
        ((1, -1.0, 1.0, 1.0, "fp32", False, ADDRESSES), "deadline out of range"),
        ((1, math.nan, 1.0, 1.0, "fp32", False, ADDRESSES), "not finite"),
        ((1, math.inf, 1.0, 1.0, "fp32", False, ADDRESSES), "not finite"),
        ((1, 1.0, -1.0, 1.0, "fp32", False, ADDRESSES), "weight -1.0 of a contributor"),
        ((1, 1.0, 0.0, 1.0, "fp32", False, ADDRESSES), "weight 0.0 of a contributor"),
        ((1, 1.0, 1.0, 1.0, "fp32", True, ADDRESSES), "weight 1.0 of an auxiliary"),
        ((1, 1.0, MAX_WEIGHT * 1.01, 1.0, "fp32", False, ADDRESSES), "weight"),
        ((1, 1.0, math.nan, 1.0, "fp32", False, ADDRESSES), "not finite"),
        ((1, 1.0, 1, 1.0, "fp32", False, ADDRESSES), "field 2 is int"),
        ((1, 1.0, 1.0, 0.0, "fp32", False, ADDRESSES), "bandwidth"),
        ((1, 1.0, 1.0, -5.0, "fp32", False, ADDRESSES), "bandwidth"),
        ((1, 1.0, 1.0, MAX_BANDWIDTH * 1.01, "fp32", False, ADDRESSES), "bandwidth"),
        ((1, 1.0, 1.0, 1.0, "", False, ADDRESSES), "codec"),
        ((1, 1.0, 1.0, 1.0, "x" * (MAX_CODEC_CHARS + 1), False, ADDRESSES), "codec"),
        ((1, 1.0, 1.0, 1.0, "fp32\x1b[2J", False, ADDRESSES), "codec"),
        ((1, 1.0, 1.0, 1.0, "fp32", 0, ADDRESSES), "field 5 is int"),
        ((1, 1.0, 1.0, 1.0, "fp32", False, ("no address",)), "an address is printable ASCII"),
        ((1, 1.0, 1.0, 1.0, "fp32", False, ("/a b",)), "an address is printable ASCII"),
        ((1, 1.0, 1.0, 1.0, "fp32", False, (5,)), "an address is a text"),
        ((1, 1.0, 1.0, 1.0, "fp32", False, ("/a",) * 17), "at most 16 addresses"),
        ((1, 1.0, 1.0, 1.0, "fp32", False), "7 fields"),
        ((), "7 fields"),
    ],
)
def test_a_genuine_record_of_nonsense_is_refused(fields: tuple[object, ...], reason: str) -> None:
    record = record_of(0, *fields)
    with pytest.raises(RemoteProtocolError, match=reason):
        read_candidate(record)
    with pytest.raises(RemoteProtocolError, match=reason):
        read_signed_candidate(pack_record(record))


def test_a_withdrawn_record_is_no_candidate() -> None:
    with pytest.raises(RemoteProtocolError, match="not a message"):
        read_candidate(signed(0, b""))


def test_the_ends_of_the_ranges_are_allowed() -> None:
    most = read_candidate(record_of(0, 1, 0.0, MAX_WEIGHT, MAX_BANDWIDTH, "x" * MAX_CODEC_CHARS, False, ()))
    assert (most.weight, most.bandwidth, most.deadline, most.addresses) == (
        MAX_WEIGHT,
        MAX_BANDWIDTH,
        0.0,
        (),
    )
    least = read_candidate(record_of(0, 1, 0.0, 5e-324, 5e-324, "x", False, ()))
    assert (least.weight, least.bandwidth) == (5e-324, 5e-324)


def test_shares_follow_the_signed_bandwidths() -> None:
    members = [candidate(index, bandwidth=bandwidth) for index, bandwidth in enumerate([225.0, 100.0])]
    assert share_cutter(4096, 64)(members) == (2816, 1280)
    assert share_cutter(100, 64)(members) == (64, 36)


def test_shares_follow_who_contributes_and_who_can_be_dialled() -> None:
    members = [candidate(0), candidate(1), candidate(2), candidate(3, auxiliary=True)]
    assert share_cutter(1000, 1)(members) == (200, 200, 200, 400)
    members = [candidate(0, addresses=()), candidate(1), candidate(2)]
    assert share_cutter(1000, 1)(members) == (0, 500, 500)

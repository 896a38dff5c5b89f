"""Candidates of peers that are ready, and values that are refused despite a genuine signature."""

from __future__ import annotations

import math

import pytest

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import (
    MAX_BANDWIDTH,
    MAX_CERTIFICATE_BYTES,
    MAX_CODEC_CHARS,
    MAX_NORM,
    MAX_WEIGHT,
    MIN_BANDWIDTH,
)
from p2pavg.group.candidate import read_candidate, read_signed_candidate, ready_key
from p2pavg.group.reach import Reach
from p2pavg.group.roster import ShareCutter
from tests.unit.group.samples import DEADLINE, KEY, SIGNERS, candidate, record_of, signed

ADDRESSES = ("/ip4/192.0.2.0/tcp/4001",)


def test_the_key_never_changes() -> None:
    assert (
        ready_key("albert-base", bytes(32)).hex()
        == "2c0f4a332f3ead9d5770efd655bf919b8369dd20b57281a3cd532aa0bafeb00f"
    )


def test_runs_schemas_and_rules_have_different_keys() -> None:
    keys = {
        ready_key(run_id, schema, rule, aggregation)
        for run_id in ("run", "run2", "Run")
        for schema in (bytes(32), bytes(31) + b"\1")
        for rule in ("", "fraction")
        for aggregation in ("", "median", "fraction")
    }
    assert len(keys) == 36


def test_a_signed_candidate_is_read_back() -> None:
    me = candidate(3, weight=0.5, bandwidth=12.5, codec="int8:256", addresses=("/a/b", "/c"))
    again = read_signed_candidate(me.record)
    assert again == me
    assert (again.peer_id, again.deadline, again.weight, again.bandwidth) == (
        SIGNERS[3].peer_id,
        DEADLINE + 3,
        0.5,
        12.5,
    )
    assert (again.codec, again.auxiliary, again.addresses) == ("int8:256", False, ("/a/b", "/c"))
    assert again.record.key == KEY


def test_state_tags_and_metrics_are_read_back() -> None:
    me = candidate(3, state=b"step 7", tags=("gpu", "fp16"), metrics={"loss": 2.5, "accuracy": 1.0})
    again = read_signed_candidate(me.record)
    assert again == me
    assert (again.state, again.tags) == (b"step 7", ("gpu", "fp16"))
    assert again.metrics == (("accuracy", 1.0), ("loss", 2.5)), "names in order: one encoding"
    assert again.norm == 0.0
    assert read_signed_candidate(candidate(3, norm=2.5).record).norm == 2.5


def test_a_peer_without_a_weight_may_still_want_the_result() -> None:
    observer = candidate(3, weight=0.0)
    assert (observer.weight, observer.auxiliary) == (0.0, False)


def test_peers_of_one_state_fit_and_an_auxiliary_fits_all() -> None:
    me, same = (candidate(index, state=b"7") for index in (0, 1))
    other, none = candidate(2, state=b"8"), candidate(3)
    helper = candidate(4, auxiliary=True)
    assert me.fits(same)
    assert not me.fits(other)
    assert not me.fits(none)
    assert me.fits(helper)
    assert helper.fits(other)
    assert not me.fits(candidate(1, state=b"7", codec="fp32"))
    assert not me.fits(candidate(4, auxiliary=True, codec="fp32"))


def test_a_later_attempt_takes_the_place_of_an_earlier_one() -> None:
    earlier, later = candidate(0, deadline=DEADLINE), candidate(0, deadline=DEADLINE + 1e-3)
    assert later.record.sequence > earlier.record.sequence


def test_candidates_are_ordered_by_auxiliary_then_deadline_then_id() -> None:
    late, early = candidate(0, deadline=DEADLINE + 9), candidate(1, deadline=DEADLINE)
    auxiliary = candidate(2, auxiliary=True, deadline=0.0)
    same_time = sorted((candidate(3, deadline=DEADLINE), early), key=lambda each: each.peer_id)
    ordered = sorted([auxiliary, late, *same_time], key=lambda each: each.order)
    assert ordered == [*same_time, late, auxiliary]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ((4, 1.0, 1.0, 1.0, "fp32", False, ADDRESSES), "Readiness"),
        ((5, math.inf, 1.0, 1.0, "fp32", False, ADDRESSES), "Readiness"),
        ((5, 1.0, -1.0, 1.0, "fp32", False, ADDRESSES), "Readiness"),
        ((5, 1.0, 1.0, 1.0, "fp32", True, ADDRESSES), "weight 1.0 of an auxiliary"),
        ((5, 1.0, MAX_WEIGHT * 1.01, 1.0, "fp32", False, ADDRESSES), "Readiness"),
        ((5, 1.0, math.nan, 1.0, "fp32", False, ADDRESSES), "Readiness"),
        ((5, 1.0, 1.0, -5.0, "fp32", False, ADDRESSES), "Readiness"),
        ((5, 1.0, 1.0, MIN_BANDWIDTH * 0.99, "fp32", False, ADDRESSES), "a bandwidth of 0.099 Mbit/s"),
        ((5, 1.0, 1.0, MAX_BANDWIDTH * 1.01, "fp32", False, ADDRESSES), "Readiness"),
        ((5, 1.0, 1.0, 1.0, "", False, ADDRESSES), "codec"),
        ((5, 1.0, 1.0, 1.0, "x" * (MAX_CODEC_CHARS + 1), False, ADDRESSES), "Readiness"),
        ((5, 1.0, 1.0, 1.0, "fp32\x1b[2J", False, ADDRESSES), "codec"),
        ((5, 1.0, 1.0, 1.0, "fp32", False, ("no address",)), "an address is printable ASCII"),
        ((5, 1.0, 1.0, 1.0, "fp32", False, ("/a",) * 17), "Readiness"),
        ((5, 1.0, 1.0, 1.0, "fp32", False), "Readiness"),
        ((5, 1.0, 1.0, 1.0, "fp32", False, (), b"x" * 33, (), ()), "Readiness"),
        ((5, 1.0, 1.0, 1.0, "fp32", False, (), b"", ("x",) * 17, ()), "Readiness"),
        ((5, 1.0, 1.0, 1.0, "fp32", False, (), b"", ("x" * 33,), ()), "tags"),
        ((5, 1.0, 1.0, 1.0, "fp32", False, (), b"", ("",), ()), "tags"),
        ((5, 1.0, 1.0, 1.0, "fp32", False, (), b"", ("\x1b",), ()), "tags"),
        ((5, 1.0, 1.0, 1.0, "fp32", False, (), b"", (), (("x", 1.0),) * 17), "Readiness"),
        ((5, 1.0, 1.0, 1.0, "fp32", False, (), b"", (), (("x", 1.0),) * 2), "metrics whose names"),
        ((5, 1.0, 1.0, 1.0, "fp32", False, (), b"", (), (("y", 1.0), ("x", 1.0))), "metrics whose names"),
        ((5, 1.0, 1.0, 1.0, "fp32", False, (), b"", (), (("\x1b", 1.0),)), "metrics whose names"),
        ((5, 1.0, 1.0, 1.0, "fp32", False, (), b"", (), (("x", math.nan),)), "Readiness"),
        ((5, 1.0, 1.0, 1.0, "fp32", False, (), b"", (), (("x", 1.1e100),)), "Readiness"),
        ((5, 1.0, 1.0, 1.0, "fp32", False, (), b"", (), (("x" * 33, 1.0),)), "metrics whose names"),
        ((5, 1.0, 1.0, 1.0, "fp32", False, (), b"", (), (), b"", 0.0, 2, "", ()), "Readiness"),
        ((5, 1.0, 1.0, 1.0, "fp32", False, (), b"", (), (), b"", -1.0), "Readiness"),
        ((5, 1.0, 1.0, 1.0, "fp32", False, (), b"", (), (), b"", 2.0**119), "Readiness"),
        ((5, 1.0, 0.0, 1.0, "fp32", False, (), b"", (), (), b"", 1.0), "a norm of 1 of no contribution"),
        ((5, 1.0, 0.0, 1.0, "fp32", True, (), b"", (), (), b"", 1.0), "a norm of 1 of no contribution"),
        ((5, 1.0, 1.0, 1.0, "fp32", False, (), b"", (), (), b"", math.nan), "Readiness"),
        ((5, 1.0, 1.0, 1.0, "fp32", False, (), b"", (), (), b"x" * 641, 0.0), "Readiness"),
        ((5, 1.0, 1.0, 1.0, "fp32", False, ADDRESSES, b"", (), (), b"", 0.0, 3), "Readiness"),
        ((5, 1.0, 1.0, 1.0, "fp32", False, ADDRESSES, b"", (), (), b"", 0.0, -1), "Readiness"),
        ((5, 1.0, 1.0, 1.0, "fp32", False, (), b"", (), (), b"", 0.0, 0), "a reach of 0 with no addresses"),
        ((5, 1.0, 1.0, 1.0, "fp32", False, (), b"", (), (), b"", 0.0, 1), "a reach of 1 with no addresses"),
        (
            (5, 1.0, 1.0, 1.0, "fp32", False, (), b"", (), (), b"", 0.0, 2, "l" * 33),
            "site .* name is too long",
        ),
        (
            (5, 1.0, 1.0, 1.0, "fp32", False, (), b"", (), (), b"", 0.0, 2, "\n"),
            "name is too long or not print",
        ),
        ((5, 1.0, 0.0, 1.0, "fp32", True, (), b"", (), (), b"", 0.0, 2, "lab"), "a site of an auxiliary"),
        ((), "Readiness"),
    ],
)
def test_a_genuine_record_with_an_invalid_field_is_refused(fields: tuple[object, ...], reason: str) -> None:
    rest = (b"", (), (), b"", 0.0, 2, "")
    record = record_of(0, *fields, *(rest[len(fields) - 7 :] if len(fields) >= 7 else ()))
    with pytest.raises(RemoteProtocolError, match=reason):
        read_candidate(record)
    with pytest.raises(RemoteProtocolError, match=reason):
        read_signed_candidate(record)


def test_a_withdrawn_record_is_no_candidate() -> None:
    with pytest.raises(RemoteProtocolError, match="Readiness"):
        read_candidate(signed(0, b""))


def test_the_ends_of_the_ranges_are_allowed() -> None:
    measured = tuple((f"{index:032}", -1e100) for index in range(16))
    rest = (b"s" * 32, ("t" * 32,) * 16, measured, b"c" * MAX_CERTIFICATE_BYTES)
    most = read_candidate(
        record_of(
            0,
            5,
            0.0,
            MAX_WEIGHT,
            MAX_BANDWIDTH,
            "x" * MAX_CODEC_CHARS,
            False,
            (),
            *rest,
            MAX_NORM,
            2,
            "l" * 32,
        )
    )
    assert (most.state, most.tags, most.metrics, most.certificate) == rest
    assert most.norm == MAX_NORM
    assert most.site == "l" * 32
    assert (most.weight, most.bandwidth, most.deadline, most.addresses) == (
        MAX_WEIGHT,
        MAX_BANDWIDTH,
        0.0,
        (),
    )
    least = read_candidate(
        record_of(0, 5, 0.0, 5e-324, MIN_BANDWIDTH, "x", False, (), b"", (), (), b"", 0.0, 2, "")
    )
    assert (least.weight, least.bandwidth) == (5e-324, MIN_BANDWIDTH)


def test_peers_that_can_be_dialled_come_before_punchable_ones_and_these_before_relayed_ones() -> None:
    dialled, punched, relayed = (
        candidate(index, deadline=DEADLINE - index, reach=Reach(index)) for index in range(3)
    )
    unknown = candidate(3, deadline=0.0, addresses=())
    auxiliary = candidate(4, auxiliary=True, deadline=0.0)
    found = sorted([auxiliary, unknown, relayed, punched, dialled], key=lambda each: each.order)
    assert found == [dialled, punched, relayed, unknown, auxiliary]
    assert unknown.reach is Reach.RELAYED
    assert read_signed_candidate(punched.record).reach is Reach.PUNCHABLE


def test_a_peer_may_sign_that_it_does_not_know_its_bandwidth() -> None:
    unknown = candidate(0, bandwidth=0.0)
    assert (unknown.bandwidth, unknown.assumed_bandwidth) == (0.0, 100.0)
    assert candidate(1, bandwidth=7.5).assumed_bandwidth == 7.5


def test_a_newcomer_to_a_run_of_slow_links_gets_an_equal_share() -> None:
    """If it claimed 100 Mbit/s, it would get two equal shares, and every round would take longer."""
    members = [candidate(index, bandwidth=5.0) for index in range(3)]
    cut = ShareCutter(64_000, 64).cut
    assert cut([*members, candidate(3, bandwidth=0.0)]) == (16_000,) * 4
    assert cut([*members, candidate(3, bandwidth=100.0)])[3] == 32_000


def test_shares_follow_the_signed_bandwidths() -> None:
    members = [candidate(index, bandwidth=bandwidth) for index, bandwidth in enumerate([225.0, 100.0])]
    assert ShareCutter(4096, 64).cut(members) == (2816, 1280)
    assert ShareCutter(100, 64).cut(members) == (64, 36)


def test_shares_depend_on_contributing_and_on_reachability() -> None:
    members = [candidate(0), candidate(1), candidate(2), candidate(3, auxiliary=True)]
    assert ShareCutter(1000, 1).cut(members) == (200, 200, 200, 400)
    for unreachable in (candidate(0, addresses=()), candidate(0, reach=Reach.RELAYED)):
        assert ShareCutter(1000, 1).cut([unreachable, candidate(1), candidate(2)]) == (0, 500, 500)


def test_a_signed_bandwidth_buys_no_more_than_two_equal_shares() -> None:
    members = [candidate(0), candidate(1), candidate(2), candidate(3, auxiliary=True, bandwidth=1e5)]
    assert ShareCutter(1200, 1).cut(members) == (200, 200, 200, 600)

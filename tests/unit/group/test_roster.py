"""Rosters: impossible ones are refused, and each possible one has one id."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_METRIC, MAX_WEIGHT
from p2pavg.base.messages import pack
from p2pavg.group.candidate import Candidate
from p2pavg.group.places.gossip import COUNTS
from p2pavg.group.roster import Roster, ShareCutter, read_roster
from p2pavg_dht.record import pack as pack_record
from tests.unit.group.samples import DEADLINE, OTHER_KEY, candidate, roster

A, B, C = candidate(0), candidate(1), candidate(2)
AUXILIARY = candidate(3, auxiliary=True)
SILENT = candidate(4, weight=0.0)


def packed(members: list[Candidate], shares: object, proposal: object = 0, observing: object = ()) -> bytes:
    """Return the bytes of a roster that a leader may send without checking it."""
    return pack(tuple(pack_record(member.record) for member in members), shares, proposal, observing)


@pytest.mark.parametrize(
    "group",
    [
        roster([A, B, AUXILIARY], [100, 0, 900], proposal=7),
        roster([A, B, SILENT, AUXILIARY], observers=[SILENT, A]),
    ],
    ids=["all contribute", "two observe"],
)
def test_a_packed_roster_is_read_back(group: Roster) -> None:
    assert read_roster(group.pack()) == group
    assert read_roster(group.pack()).group_id == group.group_id


def test_the_group_id_never_changes() -> None:
    assert (
        roster([A, B, AUXILIARY], [100, 0, 900], proposal=7).group_id.hex()
        == "0a190e840b7ada9b2ab77d5045dce49dd5608642b1b7a966df63f17ea40ede94"
    )


def test_any_change_is_another_group() -> None:
    groups = [
        roster([A, B, C]),
        roster([A, C, B]),
        roster([B, A, C]),
        roster([A, B]),
        roster([A, B, C], proposal=1),
        roster([A, B, C], [1000, 1001, 999]),
        roster([A, B, C, AUXILIARY]),
        roster([A, B, C], observers=[C]),
        roster([A, B, C], observers=[B]),
        roster([A, B, C], observers=[B, C]),
        roster([A, B, candidate(2, weight=1.0)]),
        roster([A, B, candidate(2, bandwidth=1.0)]),
        roster([A, B, candidate(2, deadline=DEADLINE)]),
        roster([A, B, candidate(2, expiration_time=DEADLINE + 1e4)]),
        roster([A, B, candidate(2, addresses=())]),
        roster([A, B, candidate(2, tags=("gpu",))]),
        roster([A, B, candidate(2, metrics={"loss": 1.0})]),
        roster([candidate(index, codec="fp32") for index in range(3)]),
        roster([candidate(index, key=OTHER_KEY) for index in range(3)]),
        roster([candidate(index, state=b"7") for index in range(3)]),
    ]
    assert len({group.group_id for group in groups}) == len(groups)
    assert {len(group.group_id) for group in groups} == {32}


@pytest.mark.parametrize(
    ("members", "shares", "observing", "reason"),
    [
        pytest.param([], [], (), "a roster of 0 members", id="no members"),
        pytest.param([A], [1000], (), "a roster of 1 members", id="one"),
        pytest.param([A, B, A], [1, 1, 1], (), "names a peer twice", id="twice"),
        pytest.param(
            [A, B, candidate(0, deadline=DEADLINE + 5)], [1] * 3, (), "a peer twice", id="in two attempts"
        ),
        pytest.param([A, AUXILIARY], [1, 1], (), "fewer than two contributors", id="one contributor"),
        pytest.param([AUXILIARY, A, B], [1, 1, 1], (), "led by an auxiliary", id="an auxiliary leads"),
        pytest.param([A, candidate(1, key=OTHER_KEY)], [1, 1], (), "different runs", id="two runs"),
        pytest.param([A, candidate(1, codec="fp32")], [1, 1], (), "different codecs", id="two codecs"),
        pytest.param([A, candidate(1, state=b"\1")], [1, 1], (), "different states", id="two states"),
        pytest.param([A, B, C], [1, 1], (), "shares do not fit", id="a share too few"),
        pytest.param([A, B], [1, 1, 1], (), "shares do not fit", id="a share too many"),
        pytest.param([A, B, C], [2000, -1000, 0], (), "shares do not fit", id="a negative share"),
        pytest.param([A, B, AUXILIARY], [1] * 3, (2,), "observers do not fit", id="an auxiliary observes"),
        pytest.param([A, B, SILENT], [1] * 3, (), "observers do not fit", id="it contributes nothing"),
        pytest.param([A, B, SILENT], [1] * 3, (1,), "observers do not fit", id="another one observes"),
        pytest.param([A, B, SILENT], [1] * 3, (0, 1, 2), "without a contributor", id="all observe"),
        pytest.param([A, B, AUXILIARY], [1] * 3, (0, 1), "without a contributor", id="all but an auxiliary"),
    ],
)
def test_an_impossible_roster_is_refused(
    members: list[Candidate], shares: list[int], observing: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        roster(members, shares, observers=[members[index] for index in observing])
    with pytest.raises(RemoteProtocolError, match=reason):
        read_roster(packed(members, tuple(shares), 0, observing))


def test_a_peer_outside_the_roster_cannot_observe() -> None:
    with pytest.raises(RemoteProtocolError, match="observers do not fit"):
        roster([A, B], observers=[C])


@pytest.mark.parametrize("observing", [(1, 0), (0, 0), (0, 0, 1), (-1,), (3,), (0, 2**63)], ids=str)
def test_observers_have_one_encoding(observing: tuple[int, ...]) -> None:
    with pytest.raises(RemoteProtocolError, match="observers do not fit"):
        read_roster(packed([A, B, C], (1, 1, 1), 0, observing))


def test_weights_that_overflow_are_refused() -> None:
    """No signed weight is so large, but a roster of other candidates is checked too."""
    heavy = [dataclasses.replace(member, weight=1e308) for member in (A, B)]
    with pytest.raises(RemoteProtocolError, match="weights overflow"):
        roster(heavy)


@pytest.mark.parametrize(
    "change",
    [
        {"value": A.record.value[:-1] + b"9"},
        {"publisher": C.peer_id},
        {"expiration_time": A.record.expiration_time + 1},
        {"sequence": A.record.sequence + 1},
        {"key": OTHER_KEY},
        {"signature": B.record.signature},
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("place", [0, 1])
def test_a_member_that_did_not_sign_is_refused(change: dict[str, object], place: int) -> None:
    forged = dataclasses.replace(A, record=msgspec.structs.replace(A.record, **change))
    members = [B, C]
    members.insert(place, forged)
    with pytest.raises(RemoteProtocolError, match="forged"):
        read_roster(packed(members, (1, 1, 1)))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"", "truncated"),
        (packed([A, B], (1, True)), "got `bool`"),
        (packed([A, B], (1, 1.0)), "got `float`"),
        (packed([A, B], (1, "1")), "got `str`"),
        (packed([A, B], (1, 5)).replace(b"\x92\x01\x05", b"\x92\x01\xcc\x05"), "another way"),
        (packed([A, B], 2), "got `int`"),
        (packed([A, B], (1, 1), 1.0), "got `float`"),
        (packed([A, B], (1, 1), 0, 1), "got `int`"),
        (packed([A, B], (1, 1), 0, (True,)), "got `bool`"),
        (packed([A, B], (1, 1), 0, ("1",)), "got `str`"),
        (packed([A, B], (1, 1), 0, (1.0,)), "got `float`"),
        (packed([A, B], (1, 1), 0, ((),)), "got `array`"),
        (pack(((), ()), (1, 1), 0, ()), "length 6, got 0"),
        (pack((5, 6), (1, 1), 0, ()), "got `int`"),
        (pack((), (1, 1), 0), "length 4, got 3"),
        (packed([A] * 129, (1,) * 129), "length <= 128"),
    ],
)
def test_a_malformed_roster_is_refused(message: bytes, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        read_roster(message)


def test_contributors_holders_and_positions() -> None:
    group: Roster = roster([B, AUXILIARY, A])
    assert group.contributors == (B, A)
    assert group.total_weight == A.weight + B.weight
    assert [group.position(member.peer_id) for member in (B, AUXILIARY, A)] == [0, 1, 2]
    with pytest.raises(ValueError, match="not in"):
        group.position(C.peer_id)


def test_an_observer_holds_the_result_without_contributing() -> None:
    group = roster([A, SILENT, B, AUXILIARY, C], observers=[SILENT, C])
    assert group.contributors == (A, B)
    assert group.holders == (A, SILENT, B, C)
    assert group.total_weight == A.weight + B.weight


def test_one_contributor_and_one_observer_are_a_roster() -> None:
    group = roster([SILENT, A, AUXILIARY], observers=[SILENT])
    assert group.contributors == (A,)
    assert group.total_weight == A.weight


def test_an_auxiliary_helps_with_any_state() -> None:
    members = [candidate(index, state=b"7") for index in range(2)]
    assert roster([*members, AUXILIARY]).holders == tuple(members)


def test_the_remaining_members_contribute_or_observe_as_before() -> None:
    group = roster([A, SILENT, B, C], proposal=7, observers=[SILENT, C])

    def among(*positions: int) -> Roster:
        return group.among(5, positions, ShareCutter(sum(group.shares), 1))

    left = among(0, 3)
    assert left.members == (A, C)
    assert left.proposal == 7
    assert left.observers == {C.peer_id}
    assert among(0, 2).observers == frozenset()
    with pytest.raises(RemoteProtocolError, match="without a contributor"):
        among(1, 3)
    assert group.among(0, range(4), ShareCutter(0, 1)) is group
    with pytest.raises(RemoteProtocolError, match="first attempt"):
        group.among(0, range(3), ShareCutter(0, 1))


class TestMetrics:
    def measured(self, index: int, weight: float, **metrics: float) -> Candidate:
        return candidate(index, weight=weight, metrics=metrics)

    def test_a_metric_is_the_weighted_mean_of_members_that_have_it(self) -> None:
        group = roster(
            [self.measured(0, 1.0, loss=4.0, accuracy=0.5), self.measured(1, 3.0, loss=8.0), candidate(2)]
        )
        assert group.metrics == {"accuracy": 0.5, "loss": 7.0}

    def test_with_a_robust_rule_a_metric_is_the_median(self) -> None:
        """A liar that claims a loss of 4e29 and a large weight moves it no further than to another honest value."""
        honest = [self.measured(index, 1.0, loss=2.0 + index) for index in range(3)]
        group = roster([*honest, self.measured(3, 1e9, loss=4e29)])
        assert group.metrics["loss"] > 1e29
        assert group.metrics_by(robust=True) == {"loss": 3.0}

    @pytest.mark.parametrize("claim", [1e9, -1e9])
    @pytest.mark.parametrize("name", sorted(COUNTS))
    def test_a_count_of_rounds_is_a_median_in_every_run(self, name: str, claim: float) -> None:
        members = [self.measured(index, 1.0, **{name: 7.0}) for index in range(2)]
        assert roster([*members, self.measured(2, 1.0, **{name: claim})]).metrics == {name: 7.0}

    def test_a_pair_has_the_mean_of_its_counts(self) -> None:
        """So each of the two can tell the other one's number."""
        pair = [self.measured(0, 1.0, outer_step=4.0), self.measured(1, 3.0, outer_step=8.0)]
        assert roster(pair).metrics == {"outer_step": 6.0}

    def test_an_observers_metrics_do_not_count(self) -> None:
        observer = self.measured(1, 3.0, loss=8.0, accuracy=1.0)
        assert roster([self.measured(0, 1.0, loss=4.0), observer], observers=[observer]).metrics == {
            "loss": 4.0
        }

    def test_without_measurements_there_are_no_metrics(self) -> None:
        assert roster([A, B]).metrics == {}

    def test_values_of_any_size_have_a_mean(self) -> None:
        most = MAX_METRIC
        group = roster([self.measured(index, MAX_WEIGHT, loss=most) for index in range(3)])
        assert group.metrics["loss"] == pytest.approx(most)
        opposite = roster([self.measured(0, 1.0, loss=most), self.measured(1, 1.0, loss=-most)])
        assert opposite.metrics == {"loss": 0.0}

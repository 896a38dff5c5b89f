"""The agreed group: which ones cannot be, and the one name of each that can."""

from __future__ import annotations

import dataclasses

import pytest

from p2pavg.errors import RemoteProtocolError
from p2pavg.matchmaking.roster import Candidate, Roster, read_roster
from p2pavg.net.wire import pack
from p2pavg_dht.record import pack as pack_record
from tests.unit.roster.samples import DEADLINE, OTHER_KEY, candidate, roster

A, B, C = candidate(0), candidate(1), candidate(2)
AUXILIARY = candidate(3, auxiliary=True)


def packed(members: list[Candidate], shares: object, proposal: object = 0) -> bytes:
    """What a leader may send without having made a roster of it."""
    return pack(tuple(pack_record(member.record) for member in members), shares, proposal)


def test_it_comes_back() -> None:
    group = roster([A, B, AUXILIARY], [100, 0, 900], proposal=7)
    assert read_roster(group.pack()) == group
    assert read_roster(group.pack()).group_id == group.group_id


def test_the_group_id_never_changes() -> None:
    assert (
        roster([A, B, AUXILIARY], [100, 0, 900], proposal=7).group_id.hex()
        == "83aece0adb93d0feb0dd489d2752996aa1d6ca537a5be1b3d561fcfdddc42d62"
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
        roster([A, B, candidate(2, weight=1.0)]),
        roster([A, B, candidate(2, bandwidth=1.0)]),
        roster([A, B, candidate(2, deadline=DEADLINE)]),
        roster([A, B, candidate(2, expiration_time=DEADLINE + 1e4)]),
        roster([A, B, candidate(2, addresses=())]),
        roster([candidate(index, codec="fp32") for index in range(3)]),
        roster([candidate(index, key=OTHER_KEY) for index in range(3)]),
    ]
    assert len({group.group_id for group in groups}) == len(groups)
    assert {len(group.group_id) for group in groups} == {32}


IMPOSSIBLE: list[tuple[str, list[Candidate], list[int], str]] = [
    ("nobody", [], [], "a roster of 0 members"),
    ("one", [A], [1000], "a roster of 1 members"),
    ("twice", [A, B, A], [1, 1, 1], "names a peer twice"),
    ("twice in two attempts", [A, B, candidate(0, deadline=DEADLINE + 5)], [1, 1, 1], "names a peer twice"),
    ("one contributor", [A, AUXILIARY], [1, 1], "fewer than two contributors"),
    ("an auxiliary leads", [AUXILIARY, A, B], [1, 1, 1], "led by an auxiliary"),
    ("two runs", [A, candidate(1, key=OTHER_KEY)], [1, 1], "different runs"),
    ("two codecs", [A, candidate(1, codec="fp32")], [1, 1], "different codecs"),
    ("two block sizes", [A, candidate(1, codec="blockwise8:128")], [1, 1], "different codecs"),
    ("a share too few", [A, B, C], [1, 1], "shares do not fit"),
    ("a share too many", [A, B], [1, 1, 1], "shares do not fit"),
    ("a negative share", [A, B, C], [2000, -1000, 0], "shares do not fit"),
]


@pytest.mark.parametrize(
    ("members", "shares", "reason"), [case[1:] for case in IMPOSSIBLE], ids=[case[0] for case in IMPOSSIBLE]
)
def test_an_impossible_roster(members: list[Candidate], shares: list[int], reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        roster(members, shares)
    with pytest.raises(RemoteProtocolError, match=reason):
        read_roster(packed(members, tuple(shares)))


def test_weights_that_overflow() -> None:
    """No signed weight is that large; whoever makes candidates otherwise is told as well."""
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
    forged = dataclasses.replace(A, record=dataclasses.replace(A.record, **change))  # type: ignore[arg-type]
    members = [B, C]
    members.insert(place, forged)
    with pytest.raises(RemoteProtocolError, match="forged"):
        read_roster(packed(members, (1, 1, 1)))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"", "not a message"),
        (packed([A, B], (1, True)), "field 1 is bool"),
        (packed([A, B], (1, 1.0)), "field 1 is float"),
        (packed([A, B], (1, "1")), "field 1 is str"),
        (packed([A, B], 2), "field 1 is int"),
        (packed([A, B], (1, 1), 1.0), "field 2 is float"),
        (pack(((), ()), (1, 1), 0), "6 fields"),
        (pack((5, 6), (1, 1), 0), "6 fields"),
        (pack((), (1, 1)), "3 fields"),
        (packed([A] * 129, (1,) * 129), "a roster of 129 members"),
    ],
)
def test_what_is_no_roster(message: bytes, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        read_roster(message)


def test_who_contributes_and_where_everybody_stands() -> None:
    group: Roster = roster([B, AUXILIARY, A])
    assert group.contributors == (B, A)
    assert group.total_weight == A.weight + B.weight
    assert [group.position(member.peer_id) for member in (B, AUXILIARY, A)] == [0, 1, 2]
    with pytest.raises(ValueError, match="not in"):
        group.position(C.peer_id)


def test_a_roster_never_changes() -> None:
    group = roster([A, B])
    with pytest.raises(dataclasses.FrozenInstanceError):
        group.proposal = 5  # type: ignore[misc]

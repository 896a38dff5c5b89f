"""Matchmaking's decoders with untrusted bytes: a message of genuine records, or RemoteProtocolError.

Any bytes are in test_message_structs.py: what is signed, and the bodies of most kinds, are read as such structs.
"""

from __future__ import annotations

from typing import Any

import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.group.candidate import Candidate
from p2pavg.group.roster import Roster, read_roster
from p2pavg.matchmaking.messages import (
    Accept,
    Declined,
    Disband,
    GroupCommit,
    GroupProposal,
    Joined,
    JoinRequest,
    LeaderStatus,
    Message,
    Nudge,
    Refuse,
    decode,
    encode,
)
from p2pavg_dht import verify
from p2pavg_dht.record import pack as pack_record
from tests.properties.changes import changed, replaced
from tests.unit.group.samples import SIGNERS, candidate, roster, signed

ME, OTHER, AUXILIARY = candidate(0), candidate(1), candidate(2, auxiliary=True)
VALUE = msgpack.unpackb(ME.record.value)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=70)
    | st.sampled_from(
        [SIGNERS[0].peer_id, SIGNERS[1].peer_id, SIGNERS[1].peer_id + " ", "/ip4/192.0.2.1/tcp/1"]
    )
)
objects = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4), max_leaves=10)

candidates = st.builds(
    candidate,
    st.integers(0, 7),
    deadline=st.floats(0, 2e9),
    weight=st.floats(1e-9, 1e15),
    bandwidth=st.floats(0.1, 1e5),
    codec=st.sampled_from(["fp32", "int8:64"]),
)
reasons = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), max_size=300)
group_ids = st.binary(min_size=32, max_size=32)
peer_ids = st.lists(st.sampled_from([signer.peer_id for signer in SIGNERS]), max_size=8).map(tuple)


@st.composite
def rosters(draw: st.DrawFn) -> Roster:
    indices = draw(st.permutations(range(8)))[: draw(st.integers(2, 8))]
    members = [candidate(index, weight=draw(st.floats(1e-9, 1e15))) for index in indices]
    shares = draw(st.lists(st.integers(0, 2**40), min_size=len(members), max_size=len(members)))
    return roster(members, shares, draw(st.integers(0, 1000)))


messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(JoinRequest, candidates),
    st.builds(Nudge, candidates),
    st.builds(Joined, candidates),
    st.builds(Declined, reasons, st.none() | candidates, peer_ids, st.booleans()),
    st.builds(LeaderStatus, st.integers(1, 64), st.booleans()),
    st.builds(GroupProposal, rosters()),
    st.builds(Accept, group_ids),
    st.builds(Refuse, group_ids, reasons),
    st.builds(GroupCommit, group_ids),
    st.builds(Disband, reasons, st.none() | candidates),
)


def candidates_in(message: Message) -> list[Candidate]:
    match message:
        case JoinRequest(me) | Nudge(me) | Joined(me):
            return [me]
        case Declined(leader=Candidate() as leader) | Disband(leader=Candidate() as leader):
            return [leader]
        case GroupProposal(group):
            return list(group.members)
    return []


def check(data: bytes) -> Message | None:
    """Decode bytes as a peer does, and check that every record in the message is genuine."""
    try:
        message = decode(data)
    except RemoteProtocolError:
        return None
    for each in candidates_in(message):
        verify(each.record)
        assert each.record.publisher == each.peer_id
    assert decode(encode(message)) == message
    return message


@settings(deadline=None)
@given(messages)
def test_every_message_survives_the_wire(message: Message) -> None:
    assert check(encode(message)) == message


@settings(deadline=None)
@given(st.integers(0, 12), st.lists(objects, max_size=5))
def test_arbitrary_fields(kind: int, fields: list[Any]) -> None:
    check(bytes([kind]) + msgpack.packb(fields))


@settings(deadline=None)
@given(changed(messages.map(encode)))
def test_changed_bytes(data: bytes) -> None:
    check(data)


@settings(deadline=None)
@given(messages, st.lists(st.integers(0, 200), min_size=1, max_size=3), objects)
def test_one_part_of_another_type(message: Message, path: list[int], value: object) -> None:
    data = encode(message)
    check(data[:1] + msgpack.packb(replaced(msgpack.unpackb(data[1:]), path, value)))


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=2), objects)
def test_signed_values_may_be_anything(path: list[int], value: object) -> None:
    """The signature is genuine, so only the content of the record is left to check, in each kind of message."""
    record = pack_record(signed(0, msgpack.packb(replaced(VALUE, path, value))))
    for kind in range(3):
        check(bytes([kind]) + msgpack.packb([record]))
    check(b"\x03" + msgpack.packb(["full", record, [], False]))
    check(b"\x09" + msgpack.packb(["full", record]))
    check(b"\x05" + msgpack.packb([[pack_record(OTHER.record), record], [1, 1], 0]))


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([ME, OTHER, AUXILIARY, candidate(3, codec="fp32")]), max_size=5),
    st.lists(st.integers(-2, 2**40) | objects, max_size=5),
    st.integers(-(2**63), 2**64 - 1) | objects,
)
def test_a_leader_may_propose_anything(members: list[Candidate], shares: list[Any], proposal: object) -> None:
    data = msgpack.packb([[pack_record(member.record) for member in members], shares, proposal])
    try:
        group = read_roster(data)
    except RemoteProtocolError:
        return
    assert len(group.members) == len(group.shares) == len({member.peer_id for member in group.members})
    assert len(group.contributors) >= 2
    assert not group.members[0].auxiliary
    assert min(group.shares) >= 0
    assert group.total_weight > 0
    assert len(group.group_id) == 32
    assert read_roster(group.pack()).group_id == group.group_id

"""Untrusted votes: decoding gives a vote that a member of this group could cast, or RemoteProtocolError.

Any bytes and fields are in test_message_structs.py; these tests begin with votes that are cast.
"""

from __future__ import annotations

import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.consensus.votes import (
    DIGEST_BYTES,
    MAX_BALLOT,
    MAX_REASON_CHARS,
    MAX_VOTE_BYTES,
    OUTPUT_BYTES,
    SIGNATURE_BYTES,
    Accepted,
    Begin,
    Complete,
    Gather,
    Left,
    MemberPing,
    Members,
    Promise,
    ReceivedUpTo,
    Rest,
    ResultCommit,
    ResultHeld,
    SignedOutput,
    StaleBallot,
    Trouble,
    Unknown,
    Vote,
    decode_vote,
)
from tests.properties.changes import replaced

SIZE = 8

ballots = st.integers(0, 40) | st.integers(0, MAX_BALLOT)
positions = st.integers(0, SIZE - 1)
members = st.frozensets(positions, max_size=SIZE)
some_members = st.frozensets(positions, min_size=1, max_size=SIZE)
reasons = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), max_size=MAX_REASON_CHARS)
digests = st.lists(st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES), max_size=SIZE).map(tuple)
one_digest = st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)
outputs = st.binary(min_size=OUTPUT_BYTES, max_size=OUTPUT_BYTES)
signatures = st.binary(min_size=SIGNATURE_BYTES, max_size=SIGNATURE_BYTES)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-2, SIZE + 1)
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=40)
)
objects = st.recursive(scalars, lambda inner: st.lists(inner, max_size=5), max_leaves=12)


@st.composite
def two_ballots(draw: st.DrawFn) -> tuple[int, int]:
    """Draw a ballot, and an attempt that is not newer."""
    ballot = draw(ballots)
    return ballot, draw(st.just(ballot) | st.integers(0, ballot))


@st.composite
def promises(draw: st.DrawFn) -> Promise:
    """Draw a promise: all that it names is older than its ballot, and its hostile members are among ``apart``."""
    ballot, apart = draw(st.integers(1, MAX_BALLOT)), draw(members)
    older = st.integers(0, ballot - 1)
    last, complete = draw(older), draw(st.none() | st.builds(Complete, older, members))
    accepted = st.builds(Accepted, st.just(last), st.integers(0, last), members, members, st.booleans())
    return Promise(
        ballot,
        draw(older),
        draw(st.none() | accepted),
        complete,
        apart,
        draw(st.frozensets(st.sampled_from(sorted(apart)))) if apart else frozenset(),
        b"" if complete is None else draw(st.just(b"") | one_digest),
    )


@st.composite
def begins(draw: st.DrawFn) -> Begin:
    """Draw a ballot's value: a new attempt of its whole view, or an older result with a source that has it."""
    ballot, attempt = draw(two_ballots())
    view = draw(some_members)
    source = draw(st.sampled_from(sorted(view)))
    if attempt == ballot:
        return Begin(ballot, attempt, view, view, source, frozenset())
    all_members = draw(some_members)
    lacking = draw(members) & view & all_members - {source}
    return Begin(ballot, attempt, all_members, view, source, lacking, draw(st.booleans()))


@st.composite
def holdings(draw: st.DrawFn) -> ResultHeld:
    """Draw the vote of a member that holds a result, which it signs, or that needs none."""
    found = draw(digests)
    return ResultHeld(draw(ballots), found, draw(signatures) if found else b"")


@st.composite
def commits(draw: st.DrawFn) -> ResultCommit:
    """Draw a commit that some of its members have signed."""
    all_of_it = draw(members)
    signers = sorted(draw(members) & all_of_it)
    digest = draw(st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)) if signers else b""
    return ResultCommit(
        draw(ballots), all_of_it, digest, tuple((position, draw(signatures)) for position in signers)
    )


votes: st.SearchStrategy[Vote] = st.one_of(
    st.tuples(ballots, ballots).map(lambda two: Gather(max(*two, 1), min(*two, max(*two, 1) - 1))),
    promises(),
    st.builds(StaleBallot, ballots),
    begins(),
    holdings(),
    st.builds(SignedOutput, ballots, positions, one_digest, outputs),
    commits(),
    st.builds(Trouble, positions, st.booleans(), reasons),
    st.builds(Left, st.just(-1) | ballots, reasons),
    st.just(Unknown()),
    st.just(MemberPing()),
    st.just(Rest()),
    st.builds(ReceivedUpTo, ballots, ballots, ballots),
)


def members_in(vote: Vote) -> Members:
    """Return all members that a vote names."""
    match vote:
        case Promise(_, _, first, second, apart, hostile):
            named = apart | hostile
            if first is not None:
                named |= first.members | first.view
            return named | second.members if second is not None else named
        case Begin(members=all_of_it, view=view, source=source, lacking=lacking):
            return all_of_it | view | lacking | {source}
        case ResultCommit(members=all_of_it):
            return all_of_it | vote.signers
        case Trouble(peer=peer) | SignedOutput(reducer=peer):
            return frozenset({peer})
    return frozenset()


def ballots_in(vote: Vote) -> list[int]:
    """Return all ballots that a vote names."""
    match vote:
        case Gather(ballot, attempt):
            return [ballot, attempt, ballot - attempt]
        case StaleBallot(ballot) | ResultHeld(ballot) | SignedOutput(ballot) | ResultCommit(ballot):
            return [ballot]
        case Left(ballot):
            return [max(ballot, 0)]
        case Promise(ballot, attempt, first, second):
            found = [ballot, attempt]
            found += [] if first is None else [first.ballot, first.attempt, first.ballot - first.attempt]
            return found if second is None else [*found, second.attempt]
        case Begin(ballot, attempt):
            return [ballot, attempt, ballot - attempt]
    return []


def check(data: bytes, size: int = SIZE) -> Vote | None:
    """Decode bytes as a member does; a vote must name members of the group only, and must encode again."""
    try:
        vote = decode_vote(data, size)
    except RemoteProtocolError:
        return None
    assert isinstance(vote, Vote)
    assert members_in(vote) <= frozenset(range(size))
    assert all(0 <= ballot <= MAX_BALLOT for ballot in ballots_in(vote))
    hash(vote)
    assert decode_vote(vote.encode(), size) == vote
    return vote


@settings(deadline=None)
@given(votes)
def test_every_vote_comes_back(vote: Vote) -> None:
    message = vote.encode()
    assert check(message) == vote
    assert len(message) <= MAX_VOTE_BYTES


@settings(deadline=None)
@given(votes, st.integers(1, SIZE))
def test_a_vote_of_a_larger_group_names_members_only_or_is_refused(vote: Vote, size: int) -> None:
    found = check(vote.encode(), size)
    assert found in (None, vote)
    assert found is None or members_in(vote) <= frozenset(range(size))


@settings(deadline=None)
@given(votes, st.lists(st.integers(0, 20), min_size=1, max_size=3), objects)
def test_a_field_of_another_kind_is_read_or_refused(vote: Vote, path: list[int], value: object) -> None:
    check(msgpack.packb(replaced(msgpack.unpackb(vote.encode()), path, value)))

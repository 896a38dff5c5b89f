"""Votes as bytes, and the messages that are refused."""

from __future__ import annotations

import pytest
from msgspec import inspect

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_GROUP_SIZE, MAX_MEMBERS
from p2pavg.base.messages import pack
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
from tests.unit.base.encoding.test_message_structs import parts
from tests.unit.consensus.answers import ALL, SIZE, some

NO_MEMBERS: Members = frozenset()
DIGESTS = tuple(bytes([share]) * DIGEST_BYTES for share in range(SIZE))


VOTES: dict[str, tuple[Vote, str]] = {
    "gather": (Gather(5, 3), "93a66761746865720503"),
    "promise of one that holds nothing": (
        Promise(5, 0, None, None, NO_MEMBERS, NO_MEMBERS),
        "98a770726f6d6973650500c0c09090c400",
    ),
    "promise of one that holds a result": (
        Promise(9, 4, Accepted(4, 4, some(0, 1, 3), some(0, 3), True), None, some(2), NO_MEMBERS),
        "98a770726f6d697365090495040493000103920003c3c0910290c400",
    ),
    "promise of one that has everything": (
        Promise(9, 4, None, Complete(4, ALL), some(1, 2), some(2), DIGESTS[1]),
        "98a770726f6d6973650904c0920494000102039201029102c420" + "01" * 32,
    ),
    "behind": (StaleBallot(MAX_BALLOT), "92a6626568696e64ce80000000"),
    "begin": (
        Begin(5, 5, some(1, 2, 3), some(1, 2, 3), 1, NO_MEMBERS),
        "98a5626567696e050593010203930102030190c2",
    ),
    "begin with an older result": (
        Begin(5, 0, ALL, some(1, 2, 3), 2, some(3), must=True),
        "98a5626567696e0500940001020393010203029103c3",
    ),
    "held": (
        ResultHeld(5, DIGESTS[:2], b"s" * SIGNATURE_BYTES),
        "94a468656c640592c420" + "00" * 32 + "c420" + "01" * 32 + "c440" + "73" * 64,
    ),
    "shown": (
        SignedOutput(5, 2, DIGESTS[3], b"o" * OUTPUT_BYTES),
        "95a573686f776e0502c420" + "03" * 32 + "c460" + "6f" * 96,
    ),
    "held by one that needs nothing": (ResultHeld(0, ()), "94a468656c640090c400"),
    "commit": (
        ResultCommit(5, some(1, 2), DIGESTS[3], ((1, b"s" * SIGNATURE_BYTES), (2, b"t" * SIGNATURE_BYTES))),
        "95a6636f6d6d697405920102c420" + "03" * 32 + "929201c440" + "73" * 64 + "9202c440" + "74" * 64,
    ),
    "commit of a result that no member that is left needs": (
        ResultCommit(5, some(1, 2)),
        "95a6636f6d6d697405920102c40090",
    ),
    "trouble": (Trouble(3, True, "two averages"), "94a774726f75626c6503c3ac74776f206176657261676573"),
    "left": (Left(-1, "out of time"), "93a46c656674ffab6f7574206f662074696d65"),
    "left after it had accepted": (Left(6, ""), "93a46c65667406a0"),
    "unknown": (Unknown(), "91a7756e6b6e6f776e"),
    "ping": (MemberPing(), "91a470696e67"),
    "rest": (Rest(), "91a472657374"),
    "came": (ReceivedUpTo(3, 2, 200), "94a463616d650302ccc8"),
}


@pytest.mark.parametrize(("vote", "golden"), VOTES.values(), ids=VOTES)
def test_the_bytes_never_change(vote: Vote, golden: str) -> None:
    assert vote.encode().hex() == golden
    assert decode_vote(bytes.fromhex(golden), SIZE) == vote


def test_all_kinds_are_here() -> None:
    assert {type(vote) for vote, _ in VOTES.values()} == set(Vote.__args__)


def test_the_longest_votes_of_the_largest_group_may_be_sent() -> None:
    all_members = frozenset(range(MAX_MEMBERS))
    last, others = MAX_BALLOT - 1, all_members - {MAX_MEMBERS - 1}
    accepted = Accepted(last, last, all_members, all_members, True)
    longest: list[Vote] = [
        Promise(
            MAX_BALLOT,
            last,
            accepted,
            Complete(MAX_BALLOT, all_members),
            all_members,
            all_members,
            b"d" * DIGEST_BYTES,
        ),
        SignedOutput(MAX_BALLOT, MAX_MEMBERS - 1, b"d" * DIGEST_BYTES, b"o" * OUTPUT_BYTES),
        Begin(MAX_BALLOT, last, all_members, all_members, MAX_MEMBERS - 1, others, True),
        ResultHeld(MAX_BALLOT, (b"\xff" * DIGEST_BYTES,) * MAX_MEMBERS, b"s" * SIGNATURE_BYTES),
        ResultCommit(
            MAX_BALLOT,
            all_members,
            b"d" * DIGEST_BYTES,
            tuple((position, b"s" * SIGNATURE_BYTES) for position in range(MAX_MEMBERS)),
        ),
        Trouble(MAX_MEMBERS - 1, True, "ü" * MAX_REASON_CHARS),
        Left(MAX_BALLOT, "\U0001f980" * MAX_REASON_CHARS),
    ]
    for vote in longest:
        message = vote.encode()
        assert len(message) <= MAX_VOTE_BYTES
        assert decode_vote(message, MAX_MEMBERS) == vote


SIGNED = b"s" * SIGNATURE_BYTES
HELD = (4, 4, (0, 1), (0, 1), False)


def promise(
    *,
    ballot: object = 5,
    attempt: object = 0,
    accepted: object = None,
    complete: object = None,
    apart: object = (),
    hostile: object = (),
    digest: bytes = b"",
) -> tuple[object, ...]:
    """Return the fields of a promise, of which some may be wrong."""
    return ("promise", ballot, attempt, accepted, complete, apart, hostile, digest)


# Wrong types, lengths and numbers of fields are those of test_message_structs.py.
MALFORMED: dict[str, tuple[object, ...]] = {
    "a question that is older than its leader's attempt": ("gather", 5, 5),
    "a promise in an attempt of the future": promise(attempt=5),
    "a promise that accepted an attempt of the future": promise(accepted=(4, 5, (0,), (0,), False)),
    "a promise that accepted strangers": promise(accepted=(4, 4, (0, SIZE), (0,), False)),
    "a promise that accepted a view of strangers": promise(accepted=(4, 4, (0,), (SIZE,), False)),
    "a promise that accepted its own ballot": promise(accepted=(5, 0, (0,), (0,), False)),
    "a promise that has a result of strangers": promise(complete=(0, (SIZE,))),
    "a promise apart from strangers": promise(apart=(SIZE,)),
    "a promise that accuses strangers": promise(hostile=(SIZE,)),
    "a promise that accuses a member that it goes on with": promise(apart=(1,), hostile=(2,)),
    "a promise with a digest of another length": promise(complete=(0, (0, 1)), digest=b"short"),
    "a promise with the digest of no result": promise(digest=bytes(DIGEST_BYTES)),
    "a share of a stranger": ("shown", 0, SIZE, bytes(DIGEST_BYTES), bytes(OUTPUT_BYTES)),
    "a share with a digest of another length": ("shown", 0, 0, b"short", bytes(OUTPUT_BYTES)),
    "a share with a signature of another length": ("shown", 0, 0, bytes(DIGEST_BYTES), SIGNED),
    "beginning an attempt of the future": ("begin", 5, 6, (0, 1), (0, 1), 0, (), False),
    "beginning without members": ("begin", 5, 5, (), (0, 1), 0, (), False),
    "beginning without a view": ("begin", 5, 5, (0, 1), (), 0, (), False),
    "beginning with strangers": ("begin", 5, 5, (0, SIZE), (0, 1), 0, (), False),
    "beginning in a view of strangers": ("begin", 5, 5, (0, 1), (0, SIZE), 0, (), False),
    "beginning from a stranger": ("begin", 5, 5, (0, 1), (0, 1), SIZE, (), False),
    "beginning for strangers": ("begin", 5, 0, (0, 1), (0, 1), 0, (SIZE,), False),
    "beginning with more members than there are": ("begin", 5, 5, (0, 1, 2, 3, 3), (0, 1), 0, (), False),
    "beginning anew among others than the view": ("begin", 5, 5, (0, 1), (0, 1, 2), 0, (), False),
    "beginning anew with what is passed on": ("begin", 5, 5, (0, 1), (0, 1), 0, (1,), False),
    "beginning anew what may be committed": ("begin", 5, 5, (0, 1), (0, 1), 0, (), True),
    "beginning for a member outside the view": ("begin", 5, 0, (0, 1, 2), (0, 1), 0, (2,), False),
    "beginning for a member outside the attempt": ("begin", 5, 0, (0, 1), (0, 1, 2), 0, (2,), False),
    "beginning from a member outside the view": ("begin", 5, 0, (0, 1, 2), (0, 1), 2, (), False),
    "beginning from a member that lacks it": ("begin", 5, 0, (0, 1), (0, 1), 1, (1,), False),
    "holding by a short digest": ("held", 5, (b"x" * 31,), SIGNED),
    "holding by a long digest": ("held", 5, (b"x" * 33,), SIGNED),
    "holding more shares than there are reducers": ("held", 5, (b"x" * 32,) * (SIZE + 1), SIGNED),
    "holding without a signature": ("held", 5, (b"x" * 32,), b""),
    "holding by a short signature": ("held", 5, (b"x" * 32,), SIGNED[1:]),
    "holding nothing by a signature": ("held", 5, (), SIGNED),
    "committing strangers": ("commit", 0, (0, SIZE), b"", ()),
    "committing by a short digest": ("commit", 0, (0, 1), b"x" * 31, ((0, SIGNED),)),
    "committing no result by a signature": ("commit", 0, (0, 1), b"", ((0, SIGNED),)),
    "committing a result without a signature": ("commit", 0, (0, 1), b"x" * 32, ()),
    "committing by a short signature": ("commit", 0, (0, 1), b"x" * 32, ((0, SIGNED[1:]),)),
    "committing by a stranger": ("commit", 0, (0, 1), b"x" * 32, ((SIZE, SIGNED),)),
    "committing by a member of another attempt": ("commit", 0, (0, 1), b"x" * 32, ((2, SIGNED),)),
    "committing by a member twice": ("commit", 0, (0, 1), b"x" * 32, ((0, SIGNED), (0, SIGNED))),
    "committing by signers out of order": ("commit", 0, (0, 1), b"x" * 32, ((1, SIGNED), (0, SIGNED))),
    "trouble with a stranger": ("trouble", SIZE, False, "silent"),
    "trouble for a reason that is too long to read": ("trouble", 1, False, "x" * 4097),
}


@pytest.mark.parametrize("kind", Vote.__args__)
def test_every_number_in_a_vote_has_two_bounds(kind: type[Vote]) -> None:
    for each in parts(inspect.type_info(kind)):
        if isinstance(each, inspect.IntType):
            assert (each.ge, each.gt) != (None, None)
            assert (each.le, each.lt) != (None, None)


@pytest.mark.parametrize("name", MALFORMED)
def test_an_impossible_vote_is_refused(name: str) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_vote(pack(*MALFORMED[name]), SIZE)


def test_every_member_up_to_the_last_may_be_named() -> None:
    for size in (1, 2, SIZE, MAX_GROUP_SIZE):
        assert decode_vote(Trouble(size - 1, False, "").encode(), size) == Trouble(size - 1, False, "")
        with pytest.raises(RemoteProtocolError, match=f"a member that a group of {size} does not have"):
            decode_vote(Trouble(size, False, "").encode(), size)


def test_a_reason_is_short_and_printable() -> None:
    long, cut = "x" * 1000, "x" * MAX_REASON_CHARS
    assert decode_vote(Trouble(1, False, long).encode(), SIZE) == Trouble(1, False, cut)
    assert decode_vote(Left(1, "red \x1b[31m and\nnew\u202e line").encode(), SIZE) == Left(
        1, "red ?[31m and?new? line"
    )
    for reason in (long, "red \x1b[31m"):
        with pytest.raises(RemoteProtocolError, match="another way"):
            decode_vote(pack("left", 1, reason), SIZE)

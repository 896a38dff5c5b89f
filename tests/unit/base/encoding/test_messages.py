"""Messages of matchmaking and headers of the exchange: their bytes, and well-formed ones that are refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec import structs

from p2pavg.allreduce.messages import MAX_HEADER_BYTES, Lane, LaneHeader, part_frame
from p2pavg.allreduce.movers.reuse import ResumeMark
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import DecodedWords, decoded_all, pack
from p2pavg.consensus.votes import MAX_BALLOT
from p2pavg.matchmaking.messages import (
    MAX_REASON_CHARS,
    OF_FOLLOWERS,
    OF_LEADERS,
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
from p2pavg.optim.coordination.ending import LastWord
from p2pavg_dht.record import pack as pack_record
from tests.unit.group.samples import KEY, SIGNERS, candidate, roster

ME, OTHER = candidate(0), candidate(1)
IDS = tuple(signer.peer_id for signer in SIGNERS[:3])

MESSAGES: dict[str, Message] = {
    "ask": JoinRequest(ME),
    "nudge": Nudge(ME),
    "joined": Joined(OTHER),
    "declined": Declined("full"),
    "declined with a leader": Declined("I follow", OTHER, IDS, over=True),
    "status": LeaderStatus(3, decided=False),
    "propose": GroupProposal(roster([ME, OTHER], [1000, 24], proposal=2)),
    "propose with a observer": GroupProposal(roster([ME, OTHER], [1000, 24], proposal=2, observers=[OTHER])),
    "accept": Accept(b"\x07" * 32),
    "refuse": Refuse(b"\x07" * 32, "another group"),
    "commit": GroupCommit(b"\x07" * 32),
    "disband": Disband("somebody earlier leads", ME),
    "disband for nobody": Disband("the end"),
}
GOLDEN: dict[str, list[str]] = json.loads(Path(__file__).with_name("golden_messages.json").read_text())


@pytest.mark.parametrize("name", MESSAGES)
def test_the_bytes_never_change(name: str) -> None:
    assert encode(MESSAGES[name]).hex() == "".join(GOLDEN[name])


def test_every_kind_is_covered() -> None:
    kinds = {encode(message)[0] for message in MESSAGES.values()}
    assert kinds == set(range(10))
    # A kind that neither side of a stream sends, and that begins none, would be refused wherever it came.
    assert {type(message) for message in MESSAGES.values()} == {
        JoinRequest,
        Nudge,
        *OF_LEADERS,
        *OF_FOLLOWERS,
    }
    for kind in range(10, 256):
        with pytest.raises(RemoteProtocolError, match="unknown kind"):
            decode(bytes([kind]) + pack(b"\x07" * 32))


@pytest.mark.parametrize("name", ["ask", "nudge", "joined", "declined with a leader", "propose", "disband"])
def test_a_forged_record_is_refused(name: str) -> None:
    """The record of another peer with its last byte changed."""
    record = ME.record
    forged = dataclasses.replace(ME, record=structs.replace(record, value=record.value[:-1] + b"9"))
    messages: dict[str, Message] = {
        "ask": JoinRequest(forged),
        "nudge": Nudge(forged),
        "joined": Joined(forged),
        "declined with a leader": Declined("I follow", forged),
        "propose": GroupProposal(roster([forged, OTHER])),
        "disband": Disband("somebody earlier leads", forged),
    }
    with pytest.raises(RemoteProtocolError, match="forged"):
        decode(encode(messages[name]))


def test_a_record_under_another_name_is_refused() -> None:
    stolen = structs.replace(ME.record, publisher=OTHER.peer_id)
    with pytest.raises(RemoteProtocolError, match="forged"):
        decode(encode(JoinRequest(dataclasses.replace(ME, record=stolen))))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "unknown kind"),
        (b"\x00", "truncated"),
        (b"\x00" + pack(()), "at least length 6, got 0"),
        (b"\x00" + pack(pack_record(ME.record)[:5]), "at least length 6, got 5"),
        (b"\x03" + pack("full", (), ("nobody",), False), "peer id"),
        (b"\x03" + pack("full", (), (5,), False), "got `int`"),
        (b"\x03" + pack("full", (), (IDS,), False), "got `array`"),
        (b"\x03" + pack("full", (), (IDS[0] + " ",), False), "peer id"),
        (b"\x03" + pack("x" * (MAX_REASON_CHARS + 1), (), (), False), "length <= 300"),
        (b"\x03" + pack("full", (1,), (), False), "at least length 6, got 1"),
        (b"\x03" + pack("full", (), ()), "length 4, got 3"),
        (b"\x03" + pack("full", (), IDS * 43, False), "length <= 128"),
        (b"\x03" + pack("full", b"", (), False), "got `bytes`"),
        (
            b"\x03\x94\xa4full\xdc\x00\x00\x90\xc2",
            "length 6, got 0",
        ),  # an empty list in more bytes than it needs
        (b"\x04" + pack(0, False), ">= 1"),
        (b"\x04" + pack(66, False), "<= 65"),
        (b"\x04" + pack(-1, False), ">= 1"),
        (b"\x04" + pack(True, False), "got `bool`"),
        (b"\x04" + pack(2, 0), "got `int`"),
        (b"\x06" + pack(b"\x07" * 31), "length >= 32"),
        (b"\x07" + pack(b"\x07" * 33, "no"), "length <= 32"),
        (b"\x07" + pack(b"\x07" * 32, "x" * 301), "length <= 300"),
        (b"\x08" + pack(b""), "length >= 32"),
        (b"\x09" + pack("x" * 301, ()), "length <= 300"),
    ],
)
def test_malformed_messages_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        decode(data)


def test_a_long_reason_is_cut_by_its_sender() -> None:
    assert decode(encode(Disband("x" * 1000))) == Disband("x" * MAX_REASON_CHARS)
    assert decode(encode(Declined("ü" * 1000))) == Declined("ü" * MAX_REASON_CHARS)
    assert decode(encode(Refuse(KEY, "x" * 1000))) == Refuse(KEY, "x" * MAX_REASON_CHARS)


@pytest.mark.parametrize(
    ("header", "fields"),
    [
        (LaneHeader(b"\x07" * 32, Lane.AVERAGES), "010000c400920000"),
        (LaneHeader(b"\x07" * 32, Lane.CONTRIBUTIONS, attempt=200), "00ccc800c400920000"),
        (LaneHeader(b"\x07" * 32, Lane.PASSED_ON, attempt=3, reducer=5), "020305c400920000"),
        (LaneHeader(b"\x07" * 32, Lane.CONTROL), "030000c400920000"),
        (LaneHeader(b"\x07" * 32, Lane.PARTS, 9, members=b"\x08" * 16), "050900c410" + "08" * 16 + "920000"),
        (LaneHeader(b"\x07" * 32, Lane.PARTS, 9, begin=ResumeMark(3, 200)), "050900c4009203ccc8"),
        (
            LaneHeader(
                b"\x07" * 32, Lane.PARTS, MAX_BALLOT, 255, b"\x08" * 16, ResumeMark(2**31 - 1, 2**31 - 1)
            ),
            "05ce80000000ccffc410" + "08" * 16 + "92" + "ce7fffffff" * 2,
        ),
        (LaneHeader(b"\x07" * 32, Lane.ASK), "040000c400920000"),
        (LaneHeader(b"\x07" * 32, Lane.PASSED_ON, MAX_BALLOT, 255), "02ce80000000ccffc400920000"),
    ],
)
def test_the_header_of_a_lane(header: LaneHeader, fields: str) -> None:
    assert header.encode().hex() == "96c420" + "07" * 32 + fields
    assert LaneHeader.decode(header.encode()) == header
    assert len(header.encode()) <= MAX_HEADER_BYTES


@pytest.mark.parametrize(
    "fields",
    [
        (b"\x07" * 31, 0, 0, 0, b"", (0, 0)),
        (b"\x07" * 33, 0, 0, 0, b"", (0, 0)),
        (b"\x07" * 32, len(Lane), 0, 0, b"", (0, 0)),
        (b"\x07" * 32, -1, 0, 0, b"", (0, 0)),
        (b"\x07" * 32, 0, -1, 0, b"", (0, 0)),
        (b"\x07" * 32, 0, MAX_BALLOT + 1, 0, b"", (0, 0)),
        (b"\x07" * 32, 0, 0, -1, b"", (0, 0)),
        (b"\x07" * 32, 0, 0, 256, b"", (0, 0)),
        (b"\x07" * 32, 0, 0, 0, 0, b"", (0, 0)),
        (b"\x07" * 32, 0, 0, 0, b"\x08" * 15, (0, 0)),
        (b"\x07" * 32, 0, 0, 0, b""),
        (b"\x07" * 32, 0, 9, 0, b"", (-1, 0)),
        (b"\x07" * 32, 0, 9, 0, b"", (0, -1)),
        (b"\x07" * 32, 0, 9, 0, b"", (2**31, 0)),
        (b"\x07" * 32, 0, 9, 0, b"", (0, 2**31)),
        # Nothing came before the first attempt.
        (b"\x07" * 32, 0, 0, 0, b"", (1, 0)),
        (b"\x07" * 32, 0, 0, 0, b"", (0, 1)),
    ],
    ids=str,
)
def test_a_malformed_lane_header_is_refused(fields: tuple[object, ...]) -> None:
    with pytest.raises(RemoteProtocolError):
        LaneHeader.decode(pack(*fields))


@pytest.mark.parametrize(("index", "frame"), [(0, "00000000"), (1, "00000001"), (2**32 - 1, "ffffffff")])
def test_the_frame_of_a_part(index: int, frame: str) -> None:
    assert part_frame(index).hex() == frame


def test_words_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A board may have a thousand words, and is read at each step."""
    decoded: list[set[str]] = []

    def note(said: Mapping[str, bytes], kind: type[LastWord]) -> dict[str, LastWord]:
        decoded.append(set(said))
        return decoded_all(said, kind)

    monkeypatch.setattr("p2pavg.base.messages.decoded_all", note)
    first = {
        "a": LastWord(1, bytes(32)).encode(),
        "b": LastWord(2, bytes(32)).encode(),
        "c": b"\xff",
        "d": b"",
    }
    words = DecodedWords(LastWord)
    assert words.of(first).keys() == words.of(first).keys() == {"a", "b"}
    assert words.of({"b": LastWord(3, bytes(32)).encode(), "c": b"\xff"})["b"].epoch == 3
    assert [each for each in decoded if each] == [{"a", "b", "c", "d"}, {"b"}]

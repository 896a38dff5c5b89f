"""Messages of a punch: their bytes, and well-formed ones that are refused."""

import pytest

from p2pavg.base.encoding import pack
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.net.nat.punch.messages import (
    MAX_BUSY_SECONDS,
    DialMe,
    PunchAnswer,
    PunchProposal,
    PunchVerdict,
    Sync,
    decode_request,
)
from p2pavg.net.nat.punch.plan import Endpoint

FOUR, SIX = Endpoint("203.0.113.1", 4001), Endpoint("2001:db8::1", 4001)
Any_ = PunchProposal | PunchAnswer | Sync | PunchVerdict | DialMe


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (PunchProposal(1, (FOUR,)), ("propose", 1, [("203.0.113.1", 4001)])),
        (PunchProposal(3, (FOUR, SIX)), ("propose", 3, [("203.0.113.1", 4001), ("2001:db8::1", 4001)])),
        (PunchAnswer("", SIX, 0.5), ("answer", "", ("2001:db8::1", 4001), 0.5)),
        (PunchAnswer("no"), ("answer", "no", (), 0.0)),
        (Sync(), ("sync",)),
        (PunchVerdict(), ("verdict", "")),
        (PunchVerdict("no answer"), ("verdict", "no answer")),
        (DialMe(("/ip4/203.0.113.1/tcp/1",)), ("dial me", ["/ip4/203.0.113.1/tcp/1"])),
    ],
    ids=str,
)
def test_the_bytes_never_change(message: Any_, fields: tuple[object, ...]) -> None:
    assert message.encode() == pack(*fields)
    assert type(message).decode(message.encode()) == message


@pytest.mark.parametrize("message", [PunchProposal(1, (FOUR,)), DialMe(("/ip4/203.0.113.1/tcp/1",))], ids=str)
def test_a_request_is_recognised_by_its_kind(message: PunchProposal | DialMe) -> None:
    assert decode_request(message.encode()) == message


@pytest.mark.parametrize("message", [Sync(), PunchVerdict(), PunchAnswer("no")], ids=str)
def test_other_messages_are_no_requests(message: Any_) -> None:
    with pytest.raises(RemoteProtocolError, match="instead of a request"):
        decode_request(message.encode())


HOST_AND_PORT = ("203.0.113.1", 4001)


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        (PunchProposal, ("answer", 1, [HOST_AND_PORT]), "instead of 'propose'"),
        (PunchProposal, ("propose", 0, [HOST_AND_PORT]), "try 0"),
        (PunchProposal, ("propose", 4, [HOST_AND_PORT]), "try 4"),
        (PunchProposal, ("propose", 1, []), "0 endpoints"),
        (PunchProposal, ("propose", 1, [HOST_AND_PORT] * 3), "3 endpoints"),
        (PunchProposal, ("propose", 1, [HOST_AND_PORT, ("203.0.113.2", 4001)]), "of one version"),
        (PunchProposal, ("propose", 1, [("example.org", 4001)]), "not an endpoint"),
        (PunchProposal, ("propose", 1, [("203.0.113.1", 80)]), "not an endpoint"),
        (PunchProposal, ("propose", 1, [("203.0.113.1", True)]), "a host and a port"),
        (PunchProposal, ("propose", 1, [("203.0.113.1",)]), "a host and a port"),
        (PunchProposal, ("propose", 1, ["203.0.113.1"]), "a host and a port"),
        (PunchProposal, ("propose", 1, [("1" * 300, 4001)]), "a host and a port"),
        (PunchAnswer, ("answer", "", (), 0.0), "a host and a port"),
        (PunchAnswer, ("answer", "", HOST_AND_PORT, -0.1), "took -0.1 s"),
        (PunchAnswer, ("answer", "", HOST_AND_PORT, MAX_BUSY_SECONDS * 2), "took 20.0 s"),
        (PunchAnswer, ("answer", "", HOST_AND_PORT, float("nan")), "not finite"),
        (PunchAnswer, ("answer", "x" * 501, (), 0.0), "501 characters"),
        (Sync, ("verdict",), "instead of 'sync'"),
        (PunchVerdict, ("verdict", "x" * 501), "501 characters"),
        (DialMe, ("dial me", []), "0 addresses"),
        (DialMe, ("dial me", ["/ip4/203.0.113.1/tcp/1"] * 7), "7 addresses"),
        (DialMe, ("dial me", [""]), "empty, too long or not text"),
        (DialMe, ("dial me", ["x" * 257]), "empty, too long or not text"),
        (DialMe, ("dial me", [7]), "empty, too long or not text"),
    ],
    ids=str,
)
def test_malformed_messages_are_refused(kind: type[Any_], fields: tuple[object, ...], reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        kind.decode(pack(*fields))


def test_reasons_of_strangers_are_printable() -> None:
    assert PunchVerdict.decode(pack("verdict", "red \x1b[31m")).reason == "red ?[31m"


def test_a_sender_cuts_a_long_reason_and_a_long_time() -> None:
    assert len(PunchVerdict.decode(PunchVerdict("x" * 1000).encode()).reason) == 500
    assert len(PunchAnswer.decode(PunchAnswer("x" * 1000).encode()).refusal) == 500
    assert PunchAnswer.decode(PunchAnswer("", FOUR, 99.0).encode()).busy == MAX_BUSY_SECONDS

"""Messages of a punch: their bytes, and well-formed ones that are refused."""

import pytest

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import pack
from p2pavg.net.nat.punch.plan import (
    MAX_BUSY_SECONDS,
    DialMe,
    Endpoint,
    PunchAnswer,
    PunchProposal,
    PunchVerdict,
    Sync,
    decode_request,
)

FOUR, SIX = Endpoint("203.0.113.1", 4001), Endpoint("2001:db8::1", 4001)
Any_ = PunchProposal | PunchAnswer | Sync | PunchVerdict | DialMe


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (PunchProposal(1, (FOUR,)), ("propose", 1, [("203.0.113.1", 4001)])),
        (PunchProposal(3, (FOUR, SIX)), ("propose", 3, [("203.0.113.1", 4001), ("2001:db8::1", 4001)])),
        (PunchAnswer("", SIX, 0.5), ("answer", "", ("2001:db8::1", 4001), 0.5)),
        (PunchAnswer("no"), ("answer", "no", None, 0.0)),
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
    with pytest.raises(RemoteProtocolError, match="Invalid value"):
        decode_request(message.encode())


HOST_AND_PORT = ("203.0.113.1", 4001)


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        (PunchProposal, ("answer", 1, [HOST_AND_PORT]), "no PunchProposal: Invalid value 'answer'"),
        (PunchProposal, ("propose", 0, [HOST_AND_PORT]), ">= 1"),
        (PunchProposal, ("propose", 4, [HOST_AND_PORT]), "<= 3"),
        (PunchProposal, ("propose", True, [HOST_AND_PORT]), "got `bool`"),
        (PunchProposal, ("propose", 1, []), "length >= 1"),
        (PunchProposal, ("propose", 1, [HOST_AND_PORT] * 3), "length <= 2"),
        (PunchProposal, ("propose", 1, [HOST_AND_PORT, ("203.0.113.2", 4001)]), "of one version"),
        (PunchProposal, ("propose", 1, [("example.org", 4001)]), "not an IP address"),
        (PunchProposal, ("propose", 1, [("203.0.113.1", 80)]), "not a port"),
        (PunchProposal, ("propose", 1, [("203.0.113.1", True)]), "got `bool`"),
        (PunchProposal, ("propose", 1, [("203.0.113.1",)]), "length 2"),
        (PunchProposal, ("propose", 1, [(*HOST_AND_PORT, 1)]), "length 2"),
        (PunchProposal, ("propose", 1, ["203.0.113.1"]), "got `str`"),
        (PunchProposal, ("propose", 1, [("1" * 300, 4001)]), "length <= 45"),
        (PunchAnswer, ("answer", "", None, 0.0), "either an endpoint or a refusal"),
        (PunchAnswer, ("answer", "no", HOST_AND_PORT, 0.0), "either an endpoint or a refusal"),
        (PunchAnswer, ("answer", "", HOST_AND_PORT, -0.1), ">= 0.0"),
        (PunchAnswer, ("answer", "", HOST_AND_PORT, MAX_BUSY_SECONDS * 2), "<= 10.0"),
        (PunchAnswer, ("answer", "", HOST_AND_PORT, float("nan")), ">= 0.0"),
        (PunchAnswer, ("answer", "", HOST_AND_PORT, 1), "another way"),
        (PunchAnswer, ("answer", "x" * 501, None, 0.0), "another way"),
        (PunchVerdict, ("verdict",), "another way"),
        (Sync, ("verdict",), "no Sync"),
        (PunchVerdict, ("verdict", "x" * 501), "another way"),
        (PunchVerdict, ("verdict", "red \x1b[31m"), "another way"),
        (DialMe, ("dial me", []), "length >= 1"),
        (DialMe, ("dial me", ["/ip4/203.0.113.1/tcp/1"] * 7), "length <= 6"),
        (DialMe, ("dial me", [""]), "length >= 1"),
        (DialMe, ("dial me", ["x" * 257]), "length <= 256"),
        (DialMe, ("dial me", [7]), "got `int`"),
    ],
    ids=str,
)
def test_malformed_messages_are_refused(kind: type[Any_], fields: tuple[object, ...], reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        kind.decode(pack(*fields))


def test_reasons_are_printable_and_short() -> None:
    assert PunchVerdict.decode(PunchVerdict("red \x1b[31m").encode()).reason == "red ?[31m"
    assert len(PunchVerdict.decode(PunchVerdict("x" * 1000).encode()).reason) == 500
    assert len(PunchAnswer.decode(PunchAnswer("x" * 1000).encode()).refusal) == 500

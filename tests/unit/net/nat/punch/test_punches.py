"""Punches: their messages, their rules, and the limits of tries that other peers ask for."""

from contextlib import ExitStack
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import pack
from p2pavg.net.nat.punch.meeting import (
    ALL_AT_ONCE,
    ALL_TRIES,
    PEER_AT_ONCE,
    PEER_TRIES,
    PEER_TRIES_PER_SECOND,
    Puncher,
    RefusedPunchError,
)
from p2pavg.net.nat.punch.plan import (
    LONGEST_ROUND_TRIP,
    DialMe,
    Endpoint,
    PunchAnswer,
    PunchProposal,
    PunchVerdict,
    Sync,
    begin_of_asker,
    choose,
    decode_request,
    hosts_to_propose,
    refusal,
    round_trip,
)
from p2pavg.net.nat.reach.reachability import Kind, Reachability

# -- messages

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
        (PunchProposal, ("propose", 1, []), "length >= 1"),
        (PunchProposal, ("propose", 1, [HOST_AND_PORT] * 3), "length <= 2"),
        (PunchProposal, ("propose", 1, [HOST_AND_PORT, ("203.0.113.2", 4001)]), "of one version"),
        (PunchProposal, ("propose", 1, [("example.org", 4001)]), "not an IP address"),
        (PunchProposal, ("propose", 1, [("203.0.113.1", 80)]), "not a port"),
        (PunchProposal, ("propose", 1, [("1" * 300, 4001)]), "length <= 45"),
        (PunchAnswer, ("answer", "", None, 0.0), "either an endpoint or a refusal"),
        (PunchAnswer, ("answer", "no", HOST_AND_PORT, 0.0), "either an endpoint or a refusal"),
        (PunchAnswer, ("answer", "", HOST_AND_PORT, -0.1), ">= 0.0"),
        (PunchAnswer, ("answer", "", HOST_AND_PORT, 20.0), "<= 10.0"),
        (PunchAnswer, ("answer", "", HOST_AND_PORT, float("nan")), ">= 0.0"),
        (PunchAnswer, ("answer", "x" * 501, None, 0.0), "another way"),
        (PunchVerdict, ("verdict", "x" * 501), "another way"),
        (PunchVerdict, ("verdict", "red \x1b[31m"), "another way"),
        (DialMe, ("dial me", []), "length >= 1"),
        (DialMe, ("dial me", ["/ip4/203.0.113.1/tcp/1"] * 7), "length <= 6"),
        (DialMe, ("dial me", [""]), "length >= 1"),
        (DialMe, ("dial me", ["x" * 257]), "length <= 256"),
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


# -- rules

HERE = Reachability(
    kind=Kind.PUNCHABLE, sentence="", punch_hosts=("203.0.113.1", "2001:db8::1", "203.0.113.9")
)


@pytest.mark.parametrize(
    "own",
    [
        Reachability(kind=Kind.RELAYED, sentence="the reason"),
        Reachability(kind=Kind.PUBLIC, sentence="the reason", punch_hosts=("203.0.113.1",)),
        Reachability(kind=Kind.UNKNOWN, sentence="the reason"),
    ],
    ids=lambda own: str(own.kind),
)
def test_a_peer_that_takes_part_in_no_punch_has_a_reason(own: Reachability) -> None:
    assert refusal(HERE) == ""
    assert "(the reason)" in refusal(own)


class TestEndpoints:
    def test_one_host_of_each_version_is_proposed(self) -> None:
        assert hosts_to_propose(HERE) == {4: "203.0.113.1", 6: "2001:db8::1"}

    @pytest.mark.parametrize(
        ("host", "port"),
        [
            ("203.0.113.1", 1023),
            ("203.0.113.1", 22),
            ("203.0.113.1", 0),
            ("203.0.113.1", -1),
            ("203.0.113.1", 65536),
            ("example.org", 4001),
            ("", 4001),
            ("::ffff:203.0.113.1", 4001),
            ("2001:DB8::1", 4001),
            ("fe80::1%eth0", 4001),
            ("203.0.113.01", 4001),
        ],
    )
    def test_other_hosts_and_ports_of_services_are_no_endpoints(self, host: str, port: int) -> None:
        with pytest.raises(ValueError, match="is not"):
            Endpoint(host, port)

    def test_an_endpoint_is_an_address_of_a_peer(self) -> None:
        assert Endpoint("203.0.113.1", 4001).address_of("X") == "/ip4/203.0.113.1/tcp/4001/p2p/X"
        assert Endpoint("2001:db8::1", 4001).address_of("X") == "/ip6/2001:db8::1/tcp/4001/p2p/X"


class TestChoice:
    FOUR, SIX = Endpoint("203.0.113.2", 4002), Endpoint("2001:db8::2", 4002)

    def test_ipv6_comes_first_and_the_next_try_takes_the_other_version(self) -> None:
        chosen = [choose(attempt, HERE, [self.FOUR, self.SIX]) for attempt in (1, 2, 3)]
        six, four = ("2001:db8::1", self.SIX), ("203.0.113.1", self.FOUR)
        assert chosen == [six, four, six]

    def test_only_a_common_version_is_taken(self) -> None:
        assert [choose(attempt, HERE, [self.FOUR]) for attempt in (1, 2)] == [("203.0.113.1", self.FOUR)] * 2


class TestTimes:
    def test_the_asker_begins_half_a_round_trip_after_its_signal(self) -> None:
        assert begin_of_asker(100.0, 0.3) == pytest.approx(100.15)

    def test_the_other_peers_own_work_is_no_part_of_the_round_trip(self) -> None:
        assert round_trip(sent=10.0, answered=11.5, busy=1.2) == pytest.approx(0.3)

    @pytest.mark.parametrize(("busy", "found"), [(50.0, 0.0), (0.0, LONGEST_ROUND_TRIP)])
    def test_a_lie_about_it_shifts_the_begin_by_a_second_at_most(self, busy: float, found: float) -> None:
        assert round_trip(sent=0.0, answered=30.0, busy=busy) == found


# -- limits


def puncher() -> Puncher:
    return Puncher(*cast(Any, (None, None, None)))


def refused(limits: Puncher, peer_id: str) -> str:
    """Carry out a try. Return the reason if it is not allowed."""
    try:
        with limits.counted(peer_id):
            return ""
    except RefusedPunchError as error:
        return str(error)


async def test_a_peer_has_a_burst_and_then_a_rate(autojump_clock: MockClock) -> None:
    limits = puncher()
    assert [refused(limits, "A") for _ in range(PEER_TRIES)] == [""] * PEER_TRIES
    assert "has asked for too many" in refused(limits, "A")
    assert refused(limits, "B") == "", "another peer pays nothing for it"
    await trio.sleep(1.0 / PEER_TRIES_PER_SECOND)
    assert refused(limits, "A") == ""


async def test_all_peers_together_have_a_rate(autojump_clock: MockClock) -> None:
    limits = puncher()
    assert [refused(limits, str(number)) for number in range(ALL_TRIES)] == [""] * ALL_TRIES
    assert "other peers" in refused(limits, "A")
    await trio.sleep(1.0)
    assert refused(limits, "A") == ""


async def test_tries_under_way_are_limited_for_each_peer_and_in_all(autojump_clock: MockClock) -> None:
    limits = puncher()
    with ExitStack() as mine, ExitStack() as others:
        for _ in range(PEER_AT_ONCE):
            mine.enter_context(limits.counted("A"))
        assert "under way" in refused(limits, "A")
        for number in range(ALL_AT_ONCE - PEER_AT_ONCE):
            others.enter_context(limits.counted(str(number)))
        assert "under way" in refused(limits, "B")
        mine.close()
        assert refused(limits, "B") == refused(limits, "A") == ""


async def test_a_try_that_fails_is_no_longer_under_way(autojump_clock: MockClock) -> None:
    limits = puncher()
    for _ in range(2 * PEER_AT_ONCE):
        with pytest.raises(ValueError, match="of the try"), limits.counted("A"):
            raise ValueError("of the try")

"""Conclusions from other peers' clocks and versions, for any answers."""

from __future__ import annotations

import pytest

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import pack
from p2pavg.runs.records.hello import (
    MAX_CLOCK,
    MAX_PROTOCOL_CHARS,
    MAX_PROTOCOLS,
    MAX_RUNS,
    PROTOCOL,
    QUESTION,
    HelloAnswer,
    PeerHello,
    compare,
    no_peer_of_the_run,
    other_versions,
    wrong_clock,
)

NOW = 1_800_000_000.0


def hello(clock: float = NOW, *protocols: str, runs: int = 0) -> PeerHello:
    return PeerHello(clock=clock, protocols=protocols, runs=runs)


def ahead(*seconds: float) -> list[HelloAnswer]:
    return [HelloAnswer(hello(), each) for each in seconds]


def test_the_protocol_never_changes() -> None:
    """Peers of all versions need to understand it."""
    assert PROTOCOL == "/p2pavg/hello/1"
    assert QUESTION == b"\x91\x01"
    said = hello(1.5, "/p2pavg/match/2.0.0", runs=3).encode()
    assert said == b"\x94\x01\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00\x91\xb3/p2pavg/match/2.0.0\x03"
    assert PeerHello.decode(said) == hello(1.5, "/p2pavg/match/2.0.0", runs=3)


def test_the_ends_of_the_ranges_are_allowed() -> None:
    most = hello(MAX_CLOCK, *["x" * MAX_PROTOCOL_CHARS] * MAX_PROTOCOLS, runs=MAX_RUNS)
    assert PeerHello.decode(most.encode()) == most


@pytest.mark.parametrize(
    "said",
    [
        b"",
        pack(2, NOW, (), 0),
        pack(1, float("nan"), (), 0),
        pack(1, -1.0, (), 0),
        pack(1, 1.1e11, (), 0),
        pack(1, NOW, (), -1),
        pack(1, NOW, (), MAX_RUNS + 1),
        pack(1, NOW, (5,), 0),
        pack(1, NOW, ("x" * (MAX_PROTOCOL_CHARS + 1),), 0),
        pack(1, NOW, ("x",) * (MAX_PROTOCOLS + 1), 0),
        pack(1, int(NOW), (), 0),
    ],
)
def test_malformed_hello_is_refused(said: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        PeerHello.decode(said)


@pytest.mark.parametrize(
    ("clock", "found"),
    [(NOW + 1.0, 0.0), (NOW + 122.0, 120.0), (NOW - 120.0, -120.0), (NOW, 0.0), (NOW + 2.0, 0.0)],
)
def test_answer_time_does_not_count_as_clock_error(clock: float, found: float) -> None:
    assert compare(hello(clock), NOW, NOW + 2.0).ahead == found


@pytest.mark.parametrize(
    ("seconds", "sentence"),
    [
        ([], ""),
        ([118.0, 118.2, 118.4], "your clock is 118 s behind 3 peers; set it"),
        ([-118.0, -118.0], "your clock is 118 s ahead of 2 peers; set it"),
        ([7.0], "your clock is 7 s behind 1 peer; set it"),
        ([5.0, -5.0, 4.0], ""),
        # One liar of three, two of five, or one of two cannot cause a false report.
        ([1e9, 0.0, 0.1], ""),
        ([1e9, -1e9, 0.0, 0.0, 0.1], ""),
        ([1e9, 0.0], ""),
        ([60.0, 60.0, 0.0], "your clock is 60 s behind 2 of 3 peers; set it"),
    ],
)
def test_the_median_of_the_clocks_counts(seconds: list[float], sentence: str) -> None:
    assert wrong_clock(ahead(*seconds)) == sentence


def test_another_version_is_named() -> None:
    mine = ("/p2pavg/match/1.0.0", "/p2pavg/exchange/1.0.0")
    new = HelloAnswer(hello(NOW, "/p2pavg/match/2.0.0", "/p2pavg/exchange/1.0.0"), 0.0)
    old = HelloAnswer(hello(NOW, *mine), 0.0)
    assert other_versions(mine, [old, new]) == "1 peer speaks match/2.0.0, this one match/1.0.0"
    assert other_versions(mine, [new, new]) == "2 peers speak match/2.0.0, this one match/1.0.0"
    assert other_versions(mine, [old]) == ""
    newest = HelloAnswer(hello(NOW, "/p2pavg/match/9.0.0", "/p2pavg/match/10.0.0"), 0.0)
    assert other_versions(mine, [newest]) == "1 peer speaks match/10.0.0, this one match/1.0.0"


@pytest.mark.parametrize(
    "protocol", ["/p2pavg/match/\x1b[2J", "/p2pavg/match/", "/other/match/2", "", "/p2pavg//2"]
)
def test_malformed_version_is_not_repeated(protocol: str) -> None:
    assert other_versions(("/p2pavg/match/1.0.0",), [HelloAnswer(hello(NOW, protocol), 0.0)]) == ""


def test_network_without_the_run_is_described() -> None:
    heard = [HelloAnswer(hello(runs=runs), 0.0) for runs in (1, 2, 0, 1)]
    assert (
        no_peer_of_the_run("x", known=4, heard=heard, addresses=())
        == "4 other peers are in this network; none of them takes part in run 'x'; 3 of 4 asked take part in other runs"
    )
    assert (
        no_peer_of_the_run("x", known=1, heard=heard[2:3], addresses=())
        == "1 other peer is in this network; it does not take part in run 'x'"
    )
    alone = no_peer_of_the_run("x", known=0, heard=[], addresses=["/ip4/192.0.2.1/tcp/1/p2p/Q"])
    assert (
        alone == "no other peer is in this network; others join with bootstrap=['/ip4/192.0.2.1/tcp/1/p2p/Q']"
    )
    assert "cannot be dialled" in no_peer_of_the_run("x", known=0, heard=[], addresses=())

"""Sentences about peers that did not come together: each way to a peer is named with the reason for which it failed."""

from __future__ import annotations

from p2pavg.base.errors import UnreachableError
from p2pavg.group.reach import Reach
from p2pavg.matchmaking.reasons import short, unreached_peers
from p2pavg.matchmaking.rules import Matchmaking
from p2pavg.matchmaking.timing import LEADER_SILENCE_SECONDS
from p2pavg.net.dialling import timed_out
from tests.unit.matchmaking.bus import EPOCH, MATCH_TIMEOUT, SIGNERS, candidate, settings

ME, OTHER, RELAY = (signer.peer_id for signer in SIGNERS[:3])
DIRECT = f"/ip4/10.0.0.1/tcp/1/p2p/{OTHER}"
CIRCUIT = f"/ip4/10.0.0.2/tcp/1/p2p/{RELAY}/p2p-circuit/p2p/{OTHER}"
other = candidate(1, EPOCH, addresses=(DIRECT, CIRCUIT), reach=Reach.PUNCHABLE)


def said(error: Exception) -> str:
    return unreached_peers([(other, str(error))])


def test_each_way_has_its_own_reason() -> None:
    failed = f"{DIRECT}: connection refused; {CIRCUIT}: the relay gives no circuit: no such reservation"
    assert said(UnreachableError(f"no connection to {OTHER}: {failed}")) == (
        f"saw 1 other peer and could not reach it: {short(OTHER)} (directly at /ip4/10.0.0.1/tcp/1: connection refused;"
        f" through relay {short(RELAY)}: the relay gives no circuit: no such reservation)"
    )


def test_the_reasons_may_come_in_any_order() -> None:
    text = said(UnreachableError(f"no connection to {OTHER}: {CIRCUIT}: it is full; {DIRECT}: refused"))
    assert "directly at /ip4/10.0.0.1/tcp/1: refused; through" in text
    assert text.endswith(": it is full)")


def test_ways_that_had_not_failed_in_time_are_named_too() -> None:
    text = said(timed_out(f"stream to {OTHER}", 5.0, [f"{DIRECT}: refused"]))
    assert f"directly at /ip4/10.0.0.1/tcp/1: refused; through relay {short(RELAY)}: timed out" in text


def test_a_reason_for_all_ways() -> None:
    text = said(UnreachableError(f"{OTHER} opened no stream: it does not serve it"))
    assert text.count("it does not serve it") == 2


def test_a_peer_without_an_address_has_no_relay_either() -> None:
    nowhere = candidate(1, EPOCH, addresses=())
    assert "(it announces no address, neither its own nor one of a relay)" in unreached_peers([(nowhere, "")])


def test_a_peer_that_does_not_answer_is_named() -> None:
    """It was ready: the reason is not that no other peer was."""
    me, early = candidate(0, EPOCH + MATCH_TIMEOUT), candidate(1, EPOCH + 1)
    rules = Matchmaking(me, settings(), EPOCH)
    rules.discovered([early], EPOCH)
    rules.tick(EPOCH + LEADER_SILENCE_SECONDS)
    assert f"1 other peer did not answer: {short(OTHER)}" in rules.waits_for()

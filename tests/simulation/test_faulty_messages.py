"""A message on which a rule raises excludes its sender; an exception without a message is raised."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import trio

import p2pavg
from p2pavg.matchmaking import link
from p2pavg.matchmaking.attempt_state import AttemptState, Memory
from p2pavg.matchmaking.rules import Matchmaking
from p2pavg.peer.peer import Peer
from p2pavg.testing import MemoryNetwork, simulated_peers
from p2pavg.testing.simulation import simulated_signer
from tests.simulation.swarm import LAN, config, step_each

HOSTILE = simulated_signer(0).peer_id  # the first to announce, or the last


def raises_for_the_hostile(method: Callable[..., Any], sender_of: Callable[..., str]) -> Callable[..., Any]:
    def replaced(self: Any, *given: Any, **named: Any) -> Any:
        if sender_of(self, *given) == HOSTILE:
            raise KeyError("a rule that a message broke")
        return method(self, *given, **named)

    return replaced


async def average(peers: Sequence[Peer], delays: Sequence[float]) -> dict[str, p2pavg.RoundResult]:
    how = config(group_size=3, match_timeout=5.0, exchange_timeout=8.0, compression="blockwise8")
    return (await step_each(peers, how, delays)).results


@pytest.mark.parametrize(
    ("rule", "first", "sender_of"),
    [
        ("asked", False, lambda _self, candidate, _now: candidate.peer_id),
        ("nudged", True, lambda _self, candidate, _now: candidate.peer_id),
        ("learn", True, lambda _self, candidate, _now: candidate.peer_id),
        ("told", False, lambda _self, peer_id, *_: peer_id),
        ("told_by_leader", True, lambda _self, peer_id, *_: peer_id),
    ],
)
async def test_message_that_raises_excludes_its_sender(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rule: str,
    first: bool,
    sender_of: Callable[..., str],
) -> None:
    """In version 0.1 the exception left the averager and ended the training program."""
    banned, ban = set[str](), Memory.ban

    def note(self: Memory, peer_id: str, reason: str, until: float) -> None:
        assert until > trio.current_time() + 60.0, "it would send the same in the next attempt"
        banned.add(peer_id)
        ban(self, peer_id, reason, until)

    monkeypatch.setattr(Memory, "ban", note)
    handler = AttemptState if rule == "learn" else Matchmaking
    monkeypatch.setattr(handler, rule, raises_for_the_hostile(getattr(handler, rule), sender_of))
    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers:
        results = await average(peers, [0.0 if first else 0.3, 0.1, 0.2])
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    for record in errors:
        assert HOSTILE in record.getMessage()
        assert record.exc_info is not None
    assert errors
    assert banned == {HOSTILE}
    for peer_id in results.keys() - {HOSTILE}:
        result = results[peer_id]
        assert isinstance(result, p2pavg.Success), result
        assert HOSTILE not in result.peers


async def test_message_that_raises_on_reading_excludes_its_sender(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def decode(*_arguments: object) -> None:
        raise OverflowError("a decoder's bug")

    monkeypatch.setattr(link, "decode", decode)
    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers:
        results = await average(peers, [0.0, 0.1, 0.2])
    assert len(results) == 3, "no averager ended by an exception"
    assert "OverflowError" in caplog.text


async def test_attempt_ends_with_a_reason_when_reporting_the_loss_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sender_of = lambda _self, peer_id, *_: peer_id  # noqa: E731 - as above
    for rule in ("told_by_leader", "expel"):
        monkeypatch.setattr(Matchmaking, rule, raises_for_the_hostile(getattr(Matchmaking, rule), sender_of))
    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers:
        results = await average(peers, [0.0, 0.1, 0.2])
    for peer_id in results.keys() - {HOSTILE}:
        result = results[peer_id]
        assert isinstance(result, p2pavg.NoPeers)
        assert "raised KeyError here" in result.reason
        assert result.code is p2pavg.NoPeersCode.NO_GROUP


async def test_exception_without_a_message_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def tick(_self: Matchmaking, _now: float, _answering: object) -> None:
        raise KeyError("a bug of ours")

    monkeypatch.setattr(Matchmaking, "tick", tick)
    with pytest.raises((KeyError, ExceptionGroup)) as caught:
        async with simulated_peers(MemoryNetwork(latency=LAN), 1) as peers:
            await average(peers, [0.0])
    assert "a bug of ours" in "".join(traceback.format_exception(caught.value))

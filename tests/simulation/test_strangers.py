"""Attacks by strangers on a run with an authority. They know the run's secret and have no genuine certificate.

Each of these attacks changed results or ended rounds in version 0.1. The numbers are those of
``docs/explanation/security-of-connections.md``'s
sources: a stranger that reduces, invented records, invented progress, invented run entries.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import trio

import p2pavg
from p2pavg.base.messages import pack
from p2pavg.group.candidate import sign_candidate
from p2pavg.peer.auxiliary import assist
from p2pavg.peer.peer import Peer
from p2pavg.runs.membership.certificate import Role
from p2pavg.runs.membership.sealing import seal, sealed_key
from p2pavg.runs.records.board import board_key
from p2pavg.runs.records.run_entry import RunEntry, read_entries, run_key
from p2pavg.testing import MemoryNetwork, simulate, simulated_peers
from p2pavg.testing.simulation import EPOCH, simulated_clock, simulated_signer
from p2pavg_dht import MAX_VALUE_BYTES, Ed25519Signer, sign_record
from p2pavg_dht.messages import Store, encode
from tests.simulation.swarm import LAN, config, values
from tests.unit.runs.membership.runs import SECRET, Authority

RUN, STRANGER = Authority(), Authority(b"s" * 32)
HONEST = 3
HOSTILE = HONEST  # the index of the stranger's peer
ROUNDS = 1
INVENTED = [Ed25519Signer(bytes([number]) * 32) for number in range(1, 65)]

Attack = Callable[[Sequence[Peer], bytes], Awaitable[None]]


def forged(signer: Ed25519Signer, *roles: Role) -> bytes:
    """Return a certificate that the stranger has signed itself."""
    return RUN.certify(
        signer.peer_id,
        sign=STRANGER.sign,
        roles=roles or [Role.CONTRIBUTOR],
        not_before=EPOCH,
        expires=EPOCH + 86400.0,
    ).data


def of_run(index: int, certificate: bytes | None = None) -> p2pavg.AveragingConfig:
    access = RUN.access(simulated_signer(index), not_before=EPOCH, expires=EPOCH + 86400.0)
    if certificate is not None:
        object.__setattr__(access, "certificate", certificate)  # a program of its own checks nothing
    return config(access=access, group_size=HONEST)


async def nothing(peers: Sequence[Peer], key: bytes) -> None:
    await trio.sleep_forever()


async def reduce_a_share(peers: Sequence[Peer], key: bytes) -> None:
    """Join as an auxiliary with the largest bandwidth (2 and 3)."""
    access = of_run(HOSTILE, forged(simulated_signer(HOSTILE), Role.AUXILIARY)).access
    await assist(peers[HOSTILE], "sim", access=access, bandwidth=100_000.0)


async def contribute(peers: Sequence[Peer], key: bytes) -> None:
    """Join as a contributor with a huge weight (3)."""
    async with peers[HOSTILE].averager(of_run(HOSTILE, forged(simulated_signer(HOSTILE)))) as averager:
        while True:
            averager.accumulate([1e6 * values(HOSTILE)], weight=1e15)
            await averager.step(wait=None)
            averager.clear()


async def flood(peers: Sequence[Peer], key: bytes) -> None:
    """Store records of 64 invented publishers under each of the run's keys, again and again (6, 8 and 17)."""
    entry = RunEntry(
        schema_hash=b"\7" * 32, tensors=1, elements=1, codec="fp32", group_size=2, rule="", aggregation=""
    )
    number = 0
    while True:
        number += 1
        for signer in INVENTED:
            candidate = sign_candidate(
                signer,
                key=key,
                deadline=simulated_clock() + 1.0,
                expiration_time=simulated_clock() + 600.0,
                weight=1.0,
                bandwidth=1e5,
                codec="fp32",
                auxiliary=False,
                addresses=("/memory/nowhere",),
                certificate=forged(signer),
            )
            for known, value in (
                (key, candidate.record.value),
                (run_key("sim"), entry.encode()),
                (board_key("sim", "topic"), b"invented".ljust(MAX_VALUE_BYTES - 400, b".")),
            ):
                stored = sealed_key(SECRET, known)
                sealed = seal(SECRET, stored, signer.peer_id, pack(forged(signer), value), bytes(12))
                record = sign_record(
                    signer,
                    key=stored,
                    sequence=number,
                    expiration_time=simulated_clock() + 40.0,
                    value=sealed,
                )
                for peer in peers[:HONEST]:
                    peer.records.answer(signer.peer_id, encode(Store((), (record,))))
        await trio.sleep(5.0)


async def rounds_under(attack: Attack) -> tuple[list[p2pavg.Success], dict[str, Any]]:
    """Run rounds of three members during an attack. Return their results and what the members read of each other."""
    found: list[p2pavg.Success] = []
    read: dict[str, Any] = {}

    async def step(averager: p2pavg.DecentralizedAverager, index: int) -> None:
        averager.accumulate([values(index)])
        result = await averager.step(wait=None)
        assert isinstance(result, p2pavg.Success), result
        found.append(result)

    async with (
        simulated_peers(MemoryNetwork(latency=LAN), HONEST + 1) as peers,
        peers[0].averager(of_run(0)) as first,
        peers[1].averager(of_run(1)) as second,
        peers[2].averager(of_run(2)) as third,
        trio.open_nursery() as nursery,
    ):
        averagers = [first, second, third]
        for number in range(ROUNDS + 1):
            async with trio.open_nursery() as steps:
                for index, averager in enumerate(averagers):
                    steps.start_soon(step, averager, index)
            if number == 0:  # the attacker has seen one round
                assert first._rounds is not None
                nursery.start_soon(attack, peers, first._rounds.matchmaker.key)
                found.clear()
            for index, averager in enumerate(averagers):
                (await averager.board("topic")).publish(b"member %d" % index, now=True)
            await trio.sleep(20.0)
        board = await first.board("topic")
        read["board"] = sorted(entry.value for entry in board.entries.values())
        read["run"] = set(read_entries(await first._run.records.find(run_key("sim"))))
        nursery.cancel_scope.cancel()
    return found, read


@cache
def calm_seconds() -> float:
    """Return the duration of the longest round without an attack."""
    found, _ = simulate(partial(rounds_under, nothing))
    return max(result.duration for result in found)


@pytest.mark.parametrize("attack", [reduce_a_share, contribute, flood], ids=lambda attack: attack.__name__)
def test_a_stranger_changes_no_result_and_no_time(attack: Attack) -> None:
    found, read = simulate(partial(rounds_under, attack))
    members = {simulated_signer(index).peer_id for index in range(HONEST)}
    assert len(found) == HONEST * ROUNDS
    for result in found:
        assert set(result.peers) == members
        assert result.auxiliaries == ()
        assert result.lost == {}
    assert max(result.duration for result in found) < calm_seconds() + 0.5
    assert read == {"board": [b"member 1", b"member 2"], "run": members}

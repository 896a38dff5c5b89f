"""Runs with an authority: strangers, expired and revoked members are refused by name, and the rest is undisturbed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio

import p2pavg
from p2pavg.base.limits import SPREAD_LOOK_SECONDS
from p2pavg.peer.auxiliary import assist
from p2pavg.peer.peer import Peer
from p2pavg.runs.membership.certificate import Role, read_certificate
from p2pavg.runs.membership.membership import Membership
from p2pavg.runs.membership.revocation import RevocationList, revoke
from p2pavg.runs.membership.sealing import sealed_key
from p2pavg.runs.records.notices import revocations_of, spread
from p2pavg.runs.records.run_entry import run_key
from p2pavg.runs.records.run_records import RunRecords
from p2pavg.testing import MemoryNetwork, simulated_peers
from p2pavg.testing.simulation import EPOCH, simulated_clock, simulated_signer
from p2pavg_dht import Ed25519Signer, Record, sign_record
from tests.simulation.swarm import LAN, Swarm, config, step_each, values
from tests.unit.runs.membership.runs import SECRET, Authority

RUN = Authority()


def certified(index: int, **changed: Any) -> p2pavg.RunAccess:
    """Return the access of the ``index``-th simulated peer; its certificate holds for a day."""
    fields: dict[str, Any] = {"not_before": EPOCH, "expires": EPOCH + 86400.0}
    return RUN.access(simulated_signer(index), **(fields | changed))


def of_run(index: int, access: p2pavg.RunAccess | None = None, **changed: Any) -> p2pavg.AveragingConfig:
    return config(access=access or certified(index), **changed)


def result_of(swarm: Swarm, index: int) -> p2pavg.RoundResult:
    return swarm.results[simulated_signer(index).peer_id]


@pytest.mark.parametrize(
    ("access", "reason", "outsider"),
    [
        (
            lambda index: certified(index, expires=EPOCH + 0.5),
            "certificate expired on 2027-01-15 08:00:00 UTC",
            0,
        ),
        (
            lambda index: certified(index, not_before=EPOCH + 3600.0),
            "certificate begins on 2027-01-15 09:00:00 UTC",
            2,
        ),
        (lambda index: certified(index, roles=[Role.OBSERVER]), "grants observer and not contributor", 0),
        (lambda index: certified(index, roles=[Role.AUXILIARY]), "grants auxiliary and not contributor", 2),
    ],
    ids=["expired, comes first", "not yet valid, comes last", "observer", "auxiliary"],
)
async def test_a_peer_whose_certificate_does_not_hold_is_refused_by_name(
    access: Any, reason: str, outsider: int
) -> None:
    """The others form a group without it, and it hears why."""
    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers:
        how = [
            of_run(index, access(index) if index == outsider else None, group_size=2) for index in range(3)
        ]
        after = [1.0 + 0.2 * index for index in range(3)]
        swarm = await step_each(peers, how, after)
    refused = result_of(swarm, outsider)
    assert isinstance(refused, p2pavg.NoPeers)
    assert refused.code is p2pavg.NoPeersCode.NOT_ADMITTED
    assert "this peer is not admitted to the run" in refused.reason
    assert reason in refused.reason
    for index in {0, 1, 2} - {outsider}:
        result = result_of(swarm, index)
        assert isinstance(result, p2pavg.Success)
        assert simulated_signer(outsider).peer_id not in result.peers
        assert swarm.ended[result.peers[0]] - max(swarm.began.values()) < 2.0


def self_signed(index: int) -> Any:
    """Return the access of a stranger that knows the secret: it signs a certificate, which its own program accepts."""
    stranger = Authority(b"s" * 32)
    peer_id = simulated_signer(index).peer_id
    forged = RUN.certify(peer_id, sign=stranger.sign, not_before=EPOCH, expires=EPOCH + 3600.0)
    access = certified(0)
    object.__setattr__(access, "certificate", forged.data)
    return access


async def test_a_stranger_with_the_secret_but_no_certificate_is_no_member() -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers:
        how = [of_run(0, group_size=2), of_run(1, group_size=2), of_run(2, self_signed(2), group_size=2)]
        swarm = await step_each(peers, how)
    assert isinstance(result_of(swarm, 2), p2pavg.NoPeers)
    for index in (0, 1):
        assert isinstance(result_of(swarm, index), p2pavg.Success)


async def test_members_read_no_record_of_a_stranger_with_the_secret_but_no_certificate() -> None:
    """A member that was revoked still knows the secret."""
    key = run_key("sim")
    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers:
        known = [
            RunRecords(peer.records, Membership(access, peer.id), simulated_clock)
            for peer, access in zip(peers, (certified(0), certified(1), self_signed(2)), strict=True)
        ]
        for records in known[1:]:
            await records.publish(key, b"word", ttl=60.0)
        assert {record.publisher for record in await known[0].find(key)} == {peers[1].id}


async def test_peers_of_an_open_run_of_the_same_name_do_not_meet_the_members() -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 4) as peers:
        how = [of_run(0), of_run(1), config(), config()]
        swarm = await step_each(peers, [replace(each, group_size=2) for each in how])
    ids = [simulated_signer(index).peer_id for index in range(4)]
    groups = {frozenset(success.peers) for success in swarm.successes()}
    assert groups == {frozenset(ids[:2]), frozenset(ids[2:])}


async def test_an_auxiliary_helps_if_its_certificate_says_so() -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 4) as peers, trio.open_nursery() as nursery:
        for index, role in ((2, Role.AUXILIARY), (3, Role.CONTRIBUTOR)):
            access = certified(index, roles=[role])

            async def help_out(helper: Peer = peers[index], access: p2pavg.RunAccess = access) -> None:
                await assist(helper, "sim", access=access)

            nursery.start_soon(help_out)
        async with (
            peers[0].averager(of_run(0, group_size=2)) as one,
            peers[1].averager(of_run(1, group_size=2)) as other,
        ):
            helpers = set()
            for _ in range(4):
                await trio.sleep(6.0)
                found: list[p2pavg.RoundResult] = []

                async def step(averager: p2pavg.DecentralizedAverager) -> None:
                    averager.accumulate([values(0)])
                    found.append(await averager.step(wait=None))  # noqa: B023 - awaited below

                async with trio.open_nursery() as steps:
                    steps.start_soon(step, one)
                    steps.start_soon(step, other)
                for result in found:
                    assert isinstance(result, p2pavg.Success), result
                    helpers |= set(result.auxiliaries)
        nursery.cancel_scope.cancel()
    assert helpers == {simulated_signer(2).peer_id}


async def test_a_contribution_weighs_no_more_than_the_certificate_grants() -> None:
    access = [certified(0, max_weight=2.0), certified(1)]
    async with simulated_peers(MemoryNetwork(latency=LAN), 2) as peers:
        swarm, done = Swarm(), trio.Event()
        async with trio.open_nursery() as nursery:
            for index, peer in enumerate(peers):
                how = of_run(index, access[index], group_size=2)
                nursery.start_soon(
                    lambda p=peer, i=index, h=how: swarm.step_once(p, i, h, weight=50.0, done=done)
                )
            while len(swarm.results) < 2:
                await trio.sleep(0.1)
            done.set()
    weights = swarm.successes()[0].weights
    assert weights == {simulated_signer(0).peer_id: 2.0, simulated_signer(1).peer_id: 50.0}


async def test_a_revocation_takes_effect_in_a_running_swarm_within_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The authority tells one member, and the others hear of it. The revoked peer is in no later group."""
    caplog.set_level(logging.INFO)
    revoked = certified(2)
    identifiers = [read_certificate(revoked.certificate).identifier]
    members: dict[int, set[str]] = {}
    told = trio.Event()
    told_at = 0.0

    async def live(peer: Peer, index: int) -> None:
        access = revoked if index == 2 else None
        async with peer.averager(of_run(index, access, group_size=3, match_timeout=2.0)) as averager:
            for number in range(40):
                averager.accumulate([values(index)])
                result = await averager.step(wait=None)
                if isinstance(result, p2pavg.Success) and index == 0:
                    members[number] = set(result.peers)
                    if told.is_set() and trio.current_time() > told_at + 60.0:
                        late.append(set(result.peers))
                if index == 2 and isinstance(result, p2pavg.NoPeers):
                    heard.append(result.reason)
                await trio.sleep(2.0)

    late: list[set[str]] = []
    heard: list[str] = []
    async with simulated_peers(MemoryNetwork(latency=LAN), 4) as peers, trio.open_nursery() as nursery:
        for index in range(3):
            nursery.start_soon(live, peers[index], index)
        await trio.sleep(20.0)
        newer = revoke(RUN.sign, authority=RUN.public, number=1, identifiers=identifiers)
        access = certified(3, roles=[Role.OBSERVER])
        tells = RunRecords(peers[3].records, Membership(access, peers[3].id), simulated_clock)
        membership = tells.membership
        assert membership is not None
        assert await hand_over(tells, membership, newer, 60.0) >= 1
        told_at = trio.current_time()
        told.set()
        with trio.move_on_after(200.0):
            while len(late) < 3:
                await trio.sleep(1.0)
        nursery.cancel_scope.cancel()
    assert SPREAD_LOOK_SECONDS < 60.0
    everyone = {simulated_signer(index).peer_id for index in range(3)}
    assert everyone in members.values(), "the peer was a member before"
    assert late
    assert all(simulated_signer(2).peer_id not in group for group in late)
    assert any("its certificate was revoked" in reason for reason in heard)


async def test_a_follower_that_is_revoked_while_it_waits_is_dropped() -> None:
    """The group of three waits for its last member, so no new attempt would check the follower again."""
    revoked = certified(1)
    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers, trio.open_nursery() as nursery:
        how = [of_run(0, group_size=3, min_group_size=3, match_timeout=120.0)]
        how.append(replace(how[0], access=revoked))
        swarm = Swarm()
        for index in (0, 1):
            nursery.start_soon(lambda i=index: swarm.step_once(peers[i], i, how[i], after=0.1 * i))
        await trio.sleep(5.0)
        leader = swarm.averagers[peers[0].id]
        assert leader._rounds is not None
        attempt = leader._rounds.matchmaker._attempt
        assert attempt is not None
        assert set(attempt.rules.group.followers) == {peers[1].id}
        serial = read_certificate(revoked.certificate).identifier
        newer = revoke(RUN.sign, authority=RUN.public, number=1, identifiers=[serial])
        membership = Membership(certified(2, roles=[Role.OBSERVER]), peers[2].id)
        tells = RunRecords(peers[2].records, membership, simulated_clock)
        assert await hand_over(tells, membership, newer, 60.0) >= 1
        await trio.sleep(SPREAD_LOOK_SECONDS)
        assert leader._rounds.matchmaker._attempt is attempt, "the same attempt"
        assert attempt.rules.group.followers == {}
        nursery.cancel_scope.cancel()


async def test_an_auxiliary_leaves_a_leader_that_is_revoked_while_its_group_waits() -> None:
    """Otherwise it would help no other group for as long as that one waits."""
    how = of_run(3, group_size=3, match_timeout=5.0)
    async with (
        simulated_peers(MemoryNetwork(latency=LAN), 5) as peers,
        peers[3].averager(how) as one,
        peers[4].averager(replace(how, access=certified(4))) as other,
        trio.open_nursery() as nursery,
    ):

        async def average() -> list[p2pavg.RoundResult]:
            results: list[p2pavg.RoundResult] = []

            async def step(averager: p2pavg.DecentralizedAverager) -> None:
                averager.accumulate([values(0)])
                results.append(await averager.step(wait=None))

            async with trio.open_nursery() as steps:
                steps.start_soon(step, one)
                steps.start_soon(step, other)
            return results

        await average()  # the run has other peers all the time
        nursery.start_soon(partial(assist, peers[1], "sim", access=certified(1, roles=[Role.AUXILIARY])))
        revoked = certified(0)
        waits = replace(how, access=revoked, min_group_size=3, match_timeout=300.0)
        nursery.start_soon(Swarm().step_once, peers[0], 0, waits)
        await trio.sleep(20.0)
        identifiers = [read_certificate(revoked.certificate).identifier]
        newer = revoke(RUN.sign, authority=RUN.public, number=1, identifiers=identifiers)
        with telling(peers[2]) as (records, membership):
            assert await hand_over(records, membership, newer, 60.0) >= 1
        await trio.sleep(SPREAD_LOOK_SECONDS)
        results = await average()
        nursery.cancel_scope.cancel()
    for result in results:
        assert isinstance(result, p2pavg.Success), result
        assert result.auxiliaries == (peers[1].id,)


@contextmanager
def telling(peer: Peer) -> Iterator[tuple[RunRecords, Membership]]:
    """Return the records of the authority's runs, as a peer of the authority has them."""
    membership = Membership(certified(2, roles=[Role.OBSERVER]), peer.id)
    with closing(RunRecords(peer.records, membership, simulated_clock)) as records:
        yield records, membership


async def hand_over(
    records: RunRecords, membership: Membership, revocations: RevocationList, timeout: float
) -> int:
    membership.known.learn(revocations)
    return await spread(records, revocations_of(RUN.public), revocations, timeout=timeout)


def list_of(number: int) -> RevocationList:
    return revoke(RUN.sign, authority=RUN.public, number=number, identifiers=[bytes([number]) * 16])


async def test_a_revocation_reaches_every_run_of_the_authority_and_those_that_come_later() -> None:
    """Such as the run of each shard, whose id is made from the run's."""
    async with (
        simulated_peers(MemoryNetwork(latency=LAN), 4) as peers,
        peers[0].averager(of_run(0)) as one,
        peers[1].averager(of_run(1, run_id="sim/shard 1 of 2")) as other,
    ):
        with telling(peers[2]) as (records, membership):
            assert await hand_over(records, membership, list_of(1), 60.0) >= 1
        await trio.sleep(SPREAD_LOOK_SECONDS)
        async with peers[3].averager(of_run(3)) as late:
            await trio.sleep(SPREAD_LOOK_SECONDS)
            for averager in (one, other, late):
                assert averager._run.membership is not None
                assert averager._run.membership.known.newest == list_of(1)


async def test_a_list_stays_published_while_the_peer_has_a_user_of_it() -> None:
    ends = 0
    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers, trio.open_nursery() as nursery:
        ended = trio.Event(), trio.Event()

        async def use(until: trio.Event) -> None:
            async with peers[0].averager(of_run(0)):
                await until.wait()

        for event in ended:
            nursery.start_soon(use, event)
            await trio.sleep(1.0)
        with telling(peers[2]) as (records, membership):
            assert await hand_over(records, membership, list_of(1), 60.0) == 1
            ended[ends].set()
            await trio.sleep(SPREAD_LOOK_SECONDS / 2)
            found = await records.find(revocations_of(RUN.public).key)
            assert peers[0].id in {each.publisher for each in found}
            within = SPREAD_LOOK_SECONDS / 2  # it watches the key again
            assert await hand_over(records, membership, list_of(2), within) == 1
        nursery.cancel_scope.cancel()


class TestKeepers:
    """Limits of strangers that keep a run's records."""

    async def test_those_who_store_records_learn_neither_run_nor_shapes(self) -> None:
        async with (
            simulated_peers(MemoryNetwork(latency=LAN), 3) as peers,
            peers[1].averager(of_run(1)) as averager,
        ):
            averager.accumulate([values(1)])
            await averager.step(wait=0)
            await trio.sleep(3.0)
            kept = stored_at(peers[0])
            assert kept
            for record in kept:
                for known in (b"sim", b"fp32", b"/memory", RUN.public):
                    assert known not in record.value
            assert averager._rounds is not None
            open_keys = {averager._rounds.matchmaker.key, run_key("sim"), revocations_of(RUN.public).key}
            assert not open_keys & {record.key for record in kept}

    async def test_a_member_stores_no_strangers_records_under_the_runs_keys(self) -> None:
        stranger = Ed25519Signer(b"x" * 32)
        async with (
            simulated_peers(MemoryNetwork(latency=LAN), 2) as peers,
            peers[0].averager(of_run(0)) as averager,
        ):
            averager.accumulate([values(0)])
            await averager.step(wait=0)
            await trio.sleep(1.0)
            assert averager._rounds is not None
            key = sealed_key(SECRET, averager._rounds.matchmaker.key)
            for value in (b"noise", b""):
                record = sign_record(
                    stranger, key=key, sequence=1, expiration_time=simulated_clock() + 60.0, value=value
                )
                refusal = peers[0].records._store.put(record, sender=stranger.peer_id, now=simulated_clock())
                assert refusal is not None, value
            assert all(r.publisher != stranger.peer_id for r in peers[0].records.held(key))


def stored_at(peer: Peer) -> list[Record]:
    store = peer.records._store
    return [entry.record for entries in store._keys.values() for entry in entries.values()]

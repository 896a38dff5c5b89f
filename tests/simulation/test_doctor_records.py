"""The doctor reads a run with an authority: records of members count, and all others are counted with the reason."""

from __future__ import annotations

import secrets
from typing import Any

from p2pavg.base.messages import pack
from p2pavg.group.candidate import ready_key, sign_candidate
from p2pavg.peer.peer import Peer
from p2pavg.runs.membership.certificate import Certificate
from p2pavg.runs.membership.revocation import revoke
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.runs.membership.sealing import NONCE_BYTES, seal, sealed_key
from p2pavg.runs.records.notices import revocations_of
from p2pavg.runs.records.run_entry import RunEntry, run_key
from p2pavg.testing import MemoryNetwork, simulated_peers
from p2pavg.testing.simulation import EPOCH, simulated_signer
from p2pavg.tools.doctor.probes import run as probes
from p2pavg.tools.doctor.probes.run import RunReader, unreached
from tests.unit.runs.membership.runs import SECRET, Authority

AUTHORITY = Authority()
FILE = RunFile(run_id="lab", authority=AUTHORITY.public, secret=SECRET, compression="fp32")
ENTRY = RunEntry(
    schema_hash=bytes(32), tensors=1, elements=9, codec="fp32", group_size=4, rule="", aggregation=""
)


async def publish(
    peer: Peer, certificate: Certificate, key: bytes, value: bytes, secret: bytes = SECRET
) -> None:
    """Publish a record of the run, as a member does."""
    stored = sealed_key(SECRET, key)
    content = pack(certificate.data, value)
    sealed = seal(secret, stored, peer.id, content, secrets.token_bytes(NONCE_BYTES))
    await peer.records.publish(stored, sealed, ttl=600.0)


async def test_only_members_count() -> None:
    good, expired, revoked, stolen, blind = (simulated_signer(index).peer_id for index in range(1, 6))
    certificates: dict[str, Certificate] = {
        good: AUTHORITY.certify(good),
        expired: AUTHORITY.certify(expired, not_before=EPOCH - 20.0, expires=EPOCH - 10.0),
        revoked: AUTHORITY.certify(revoked),
        stolen: AUTHORITY.certify(good),
        blind: AUTHORITY.certify(blind),
    }
    lists = [
        revoke(AUTHORITY.sign, authority=AUTHORITY.public, number=number, identifiers=identifiers)
        for number, identifiers in ((1, []), (2, [certificates[revoked].identifier]))
    ]
    async with simulated_peers(MemoryNetwork(), 6) as (doctor, *others):
        for peer in others:
            secret = bytes(32) if peer.id == blind else SECRET
            await publish(peer, certificates[peer.id], run_key("lab"), ENTRY.encode(), secret)
        first, _, second, *_ = others  # the second one's own certificate is on the list
        await publish(first, certificates[good], revocations_of(AUTHORITY.public).key, lists[1].encode())
        await publish(second, certificates[revoked], revocations_of(AUTHORITY.public).key, lists[0].encode())
        reader = RunReader(doctor, "lab", FILE)
        found = await reader.read()
    assert found.entries == {good: ENTRY}
    assert reader.revocations is not None
    assert reader.revocations.number == 2
    assert {peer_id: why.partition(" on ")[0] for peer_id, why in found.refused.items()} == {
        expired: "its certificate expired",
        revoked: "its certificate was revoked",
        stolen: "its certificate is for another peer",
        blind: "a record that is not encrypted to this run",
    }
    assert (found.codec, found.aggregation is None, found.sealed) == ("fp32", False, True)


async def test_a_run_without_revocations_and_records() -> None:
    async with simulated_peers(MemoryNetwork(), 2) as (_, doctor):
        reader = RunReader(doctor, "lab", FILE)
        found = await reader.read()
    assert (dict(found.entries), dict(found.refused), found.known) == ({}, {}, 1)
    assert reader.revocations is not None
    assert reader.revocations.number == 0


def ready(peer: Peer, **changes: Any) -> tuple[bytes, bytes]:
    """Return key and value of a peer's readiness."""
    key = ready_key("open", ENTRY.schema_hash)
    fields: dict[str, Any] = {
        "deadline": EPOCH + 60.0,
        "expiration_time": EPOCH + 120.0,
        "weight": 1.0,
        "bandwidth": 10.0,
        "codec": "fp32",
        "auxiliary": False,
        "addresses": peer.addresses,
    }
    return key, sign_candidate(peer.context.signer, key=key, **(fields | changes)).record.value


async def test_ready_peers_are_dialled() -> None:
    network = MemoryNetwork()
    async with simulated_peers(network, 4) as (doctor, *others):
        for peer in others:
            await peer.records.publish(run_key("open"), ENTRY.encode(), ttl=600.0)
            await peer.records.publish(*ready(peer), ttl=120.0)
        found = await RunReader(doctor, "open", None).read()
        assert {each.peer_id for each in found.ready} == {peer.id for peer in others}
        gone, own, _ = others
        network.crash(gone.id)
        network.crash(own.id)
        transport = doctor.context.transport
        assert [each.peer_id for each, _ in await unreached(transport, found.ready, own.id)] == [gone.id]
    assert not found.sealed


async def test_records_of_one_key_are_limited(monkeypatch: Any) -> None:
    monkeypatch.setattr(probes, "MAX_RECORDS", 2)
    async with simulated_peers(MemoryNetwork(), 5) as (doctor, *others):
        for peer in others:
            await peer.records.publish(run_key("open"), ENTRY.encode(), ttl=600.0)
        found = await RunReader(doctor, "open", None).read()
    assert len(found.entries) == 2

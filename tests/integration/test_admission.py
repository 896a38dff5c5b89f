"""A run with an authority among real processes: peers that are no members are refused by name, and rounds go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2pavg.peer.peer import open_peer
from p2pavg.runs.membership.certificate import Certificate, Role, issue, read_certificate
from p2pavg.runs.membership.membership import Membership, RunAccess
from p2pavg.runs.membership.revocation import revoke
from p2pavg.runs.records.identity import load_or_make_seed
from p2pavg.runs.records.notices import revocations_of, spread
from p2pavg.runs.records.run_records import RunRecords
from p2pavg.testing import LocalSwarm
from p2pavg.testing.swarm import SwarmProcess
from p2pavg_dht import Ed25519Signer

SECRET = b"s" * 32
AUTHORITY = Ed25519PrivateKey.generate()
PUBLIC = AUTHORITY.public_key().public_bytes_raw()
DAY = 86400.0
PATIENCE = 90.0  # seconds until a process has reported what a test waits for


def certify(
    peer_id: str, number: int, sign: Callable[[bytes], bytes] = AUTHORITY.sign, **changed: Any
) -> Certificate:
    fields: dict[str, Any] = {
        "authority": PUBLIC,
        "peer_id": peer_id,
        "roles": [Role.CONTRIBUTOR],
        "max_weight": 10.0,
        "not_before": time.time() - 1.0,
        "expires": time.time() + DAY,
        "serial": number.to_bytes(16, "big"),
    }
    return issue(sign, **(fields | changed))


def arguments(folder: Path, number: int, *, match_timeout: float = 6.0, **changed: Any) -> dict[str, Any]:
    """Return the arguments of a process with an identity and a certificate of its own."""
    identity = folder / f"peer{number}.key"
    signer = Ed25519Signer(load_or_make_seed(identity))
    certificate = certify(signer.peer_id, number, **changed)
    access = {"authority": PUBLIC.hex(), "secret": SECRET.hex(), "certificate": certificate.data.hex()}
    return {"identity": str(identity), "access": access, "match_timeout": match_timeout}


def report_of(process: SwarmProcess, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the next report of a process that is wanted."""
    end = time.monotonic() + PATIENCE
    seen: list[dict[str, Any]] = []
    while time.monotonic() < end:
        seen.append(process.event(PATIENCE))
        if wanted(seen[-1]):
            return seen[-1]
    raise AssertionError(f"nothing of that kind was reported: {seen[-3:]}")


async def hand_over(revoked: bytes, bootstrap: list[str], folder: Path) -> int:
    """Hand the authority's list to the members, as a peer that the authority has certified for a moment."""
    identity = folder / "authority-peer.key"
    signer = Ed25519Signer(load_or_make_seed(identity))
    certificate = certify(signer.peer_id, 99, roles=[Role.OBSERVER], expires=time.time() + 600.0)
    access = RunAccess(authority=PUBLIC, secret=SECRET, certificate=certificate.data)
    newest = revoke(AUTHORITY.sign, authority=PUBLIC, number=1, identifiers=[revoked])
    async with open_peer(listen=["/ip4/127.0.0.1/tcp/0"], bootstrap=bootstrap, identity=identity) as peer:
        membership = Membership(access, peer.id)
        records = RunRecords(peer.records, membership, time.time)
        membership.known.learn(newest)
        return await spread(records, revocations_of(PUBLIC), newest, timeout=60.0)


@pytest.mark.long
def test_only_members_take_part_among_real_processes(tmp_path: Path) -> None:
    """Two members average throughout. A third one is revoked on the way."""
    members = [arguments(tmp_path, number) for number in (1, 2, 3)]
    with LocalSwarm("tests.integration.admission_work:run_rounds", peers=1, arguments=members[0]) as swarm:
        swarm.start()
        first = swarm.processes[0]
        second, third = (swarm.add(arguments=each) for each in members[1:])
        whole = report_of(first, lambda report: len(report.get("peers", ())) == 3)
        assert set(whole["peers"]) == {first.peer_id, second.peer_id, third.peer_id}

        stranger = Ed25519PrivateKey.generate()
        late = swarm.add(arguments=arguments(tmp_path, 6) | {"clock": -300.0})
        heard = report_of(late, lambda report: "your clock is 300 s behind" in report.get("reason", ""))
        assert heard["result"] == "NoPeers", heard

        # A stranger's program refuses to open with a certificate that it has signed itself, so it shows nothing.
        forged = arguments(tmp_path, 5, sign=stranger.sign)
        unopened = swarm.add(arguments=forged, wait=False)
        assert unopened.process.wait(60.0) != 0

        serial = read_certificate(bytes.fromhex(members[2]["access"]["certificate"])).identifier
        told_at = time.time()
        assert trio.run(hand_over, serial, [first.address], tmp_path) >= 1
        heard = report_of(third, lambda report: "its certificate was revoked" in report.get("reason", ""))
        assert heard["at"] < told_at + 60.0
        after = report_of(first, lambda report: report["at"] > heard["at"] and report["result"] == "Success")
        assert set(after["peers"]) == {first.peer_id, second.peer_id}

"""The handing over of an authority's list of revoked certificates to the members of its run."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import trio

from p2pavg.base.errors import ConfigError
from p2pavg.net.nat.reach.options import ONLY_ASKS
from p2pavg.peer.peer import peer_over
from p2pavg.runs.membership.access import RunAccess
from p2pavg.runs.membership.certificate import SERIAL_BYTES, Role, issue
from p2pavg.runs.membership.files import read_revocations_file
from p2pavg.runs.membership.membership import Membership
from p2pavg.runs.membership.revocation import RevocationList
from p2pavg.runs.records.identity import SEED_BYTES
from p2pavg.runs.records.revocations import spread
from p2pavg.runs.records.run_records import RunRecords
from p2pavg.tools.cli.authority import Authority
from p2pavg_dht import Ed25519Signer

PUBLISH_LIST_SECONDS = 60.0
_CERTIFICATE_SECONDS = 600.0


def publish(authority: Authority, bootstrap: Sequence[str]) -> list[str]:
    """Hand the newest list to the members of the run, as a peer that the authority admits for some minutes.

    Args:
        bootstrap: addresses of peers, besides those in the run file.

    Raises:
        ConfigError: there is no list, or no address of a peer.
        BootstrapError: no peer could be reached.
    """
    if not authority.revoked_file.exists():
        raise ConfigError(f"{authority.revoked_file} does not exist: no certificate was revoked yet")
    addresses = [*bootstrap, *authority.run.bootstrap]
    if not addresses:
        raise ConfigError(
            "the run file has no bootstrap address; name a peer of the run with --bootstrap ADDR"
        )
    newest = read_revocations_file(authority.revoked_file, authority.run.authority)
    told = trio.run(_publish, authority, newest, addresses)
    if not told:
        return [
            f"no member took list {newest.number} within {PUBLISH_LIST_SECONDS:.0f} s. When the run is up again:",
            "  p2pavg run publish NAME.run",
        ]
    return [
        f"list {newest.number} is published by {told} member{'s' if told > 1 else ''}; "
        "the others get it within a minute"
    ]


async def _publish(authority: Authority, newest: RevocationList, addresses: Sequence[str]) -> int:
    # libp2p takes 0.4 s to import.
    from p2pavg.net.libp2p.transport import open_libp2p_transport

    seed = secrets.token_bytes(SEED_BYTES)
    signer = Ed25519Signer(seed)
    certificate = issue(
        authority.key.sign,
        authority=authority.run.authority,
        peer_id=signer.peer_id,
        roles=[Role.OBSERVER],
        max_weight=1.0,
        not_before=time.time(),
        expires=time.time() + _CERTIFICATE_SECONDS,
        serial=secrets.token_bytes(SERIAL_BYTES),
    )
    access = RunAccess(
        authority=authority.run.authority, secret=authority.run.secret, certificate=certificate.data
    )
    async with (
        open_libp2p_transport(seed=seed, listen=["/ip4/0.0.0.0/tcp/0"], options=ONLY_ASKS) as transport,
        peer_over(transport, signer, bootstrap=addresses) as peer,
    ):
        membership = Membership(access, peer.id)
        records = RunRecords(peer.records, membership, time.time)
        return await spread(records, membership, newest, timeout=PUBLISH_LIST_SECONDS)

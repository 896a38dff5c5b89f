"""Certificates and lists of revoked ones for the fuzz test, with serials that rogue delegates chose.

Each message is a certificate, or a list. A delegate copies the serials of the authority's certificates and of other
delegates', also across lists that follow each other. A list shuts out the certificates that it means, those that their
holders have admitted as delegates, and no other one.
"""

from __future__ import annotations

import random
from collections import Counter

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.runs.membership.certificate import Certificate, Role, issue, refusal
from p2pavg.runs.membership.revocation import RevocationList, read_revocations, revoke
from p2pavg_dht import Ed25519Signer

NOW = 1_800_000_000.0
SERIALS = [bytes([number]) * 16 for number in range(3)]
PEERS = [Ed25519Signer(bytes([number]) * 32) for number in range(1, 5)]
DELEGATES = [Ed25519Signer(bytes([number]) * 32) for number in range(11, 14)]
KEY = Ed25519PrivateKey.from_private_bytes(b"a" * 32)
AUTHORITY = KEY.public_key().public_bytes_raw()

Meant = tuple[str, str, bytes]
"""The issuer (empty for the authority), the peer and the serial of a certificate that a list means."""


def some_certificate(dice: random.Random, peer_id: str, issuer: Certificate | None) -> Certificate:
    """Issue a certificate of the authority or of a delegate, with a serial that others have too."""
    signers = {delegate.peer_id: delegate.sign for delegate in DELEGATES}
    return issue(
        KEY.sign if issuer is None else signers[issuer.peer_id],
        authority=AUTHORITY,
        peer_id=peer_id,
        roles=[Role.CONTRIBUTOR] if peer_id not in signers else [Role.CONTRIBUTOR, Role.DELEGATE],
        max_weight=1.0 if issuer is not None else 10.0,
        not_before=NOW,
        expires=NOW + dice.choice([3600.0, 7200.0] if issuer is None else [60.0, 1800.0]),
        serial=dice.choice(SERIALS),
        issuer=issuer,
    )


def meant_by(certificate: Certificate) -> Meant:
    """Return what a list means if it has the identifier of this certificate."""
    issuer = certificate.issuer
    return "" if issuer is None else issuer.peer_id, certificate.peer_id, certificate.serial


def damaged(dice: random.Random, data: bytes) -> bytes:
    """Return the bytes with one of them changed."""
    at = dice.randrange(len(data))
    return data[:at] + bytes([data[at] ^ dice.randint(1, 255)]) + data[at + 1 :]


def received(dice: random.Random, sent: RevocationList) -> frozenset[bytes]:
    """Read a list as a peer of the run does, and one with a changed byte, which it must refuse."""
    try:
        read_revocations(damaged(dice, sent.encode()), AUTHORITY)
    except RemoteProtocolError:
        return read_revocations(sent.encode(), AUTHORITY).identifiers
    raise AssertionError("a list that the authority has not signed was believed")


def search(dice: random.Random, count: int) -> Counter[str]:
    """Let a peer judge certificates by lists, ``count`` of both together; return how many it admitted and refused.

    Raises:
        AssertionError: a list has shut out another certificate than it means, or let one in that it means.
    """
    tally: Counter[str] = Counter()
    sent = number = 0
    while sent < count:
        delegations = [some_certificate(dice, delegate.peer_id, None) for delegate in DELEGATES]
        found = [
            some_certificate(dice, dice.choice(PEERS).peer_id, dice.choice([None, *delegations]))
            for _ in range(8)
        ]
        revoked = dice.sample([*delegations, *found], dice.randint(1, 3))
        number += 1
        identifiers = received(
            dice,
            revoke(
                KEY.sign, authority=AUTHORITY, number=number, identifiers=[one.identifier for one in revoked]
            ),
        )
        meant = {meant_by(one) for one in revoked}
        for certificate in (*delegations, *found):
            chain = [certificate] if certificate.issuer is None else [certificate, certificate.issuer]
            shut_out = any(meant_by(one) in meant for one in chain)
            why = refusal(
                certificate.data,
                authority=AUTHORITY,
                peer_id=certificate.peer_id,
                now=NOW + 1.0,
                revoked=identifiers,
            )
            assert (why is not None) == shut_out, f"{meant_by(certificate)} by {sorted(meant)}: {why}"
            tally["certificates revoked" if shut_out else "certificates admitted"] += 1
        sent += len(delegations) + len(found) + 1
    return tally

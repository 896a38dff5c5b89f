"""Invitation links, behind ``p2pavg run link``."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from p2pavg.base.errors import ConfigError
from p2pavg.net.addresses import parse_peer_address
from p2pavg.peer.joining.finding import files_in
from p2pavg.peer.joining.home import Home
from p2pavg.peer.joining.links import open_delegate
from p2pavg.runs.membership.certificate import SERIAL_BYTES, MemberCertificateError, Role, read_certificate
from p2pavg.runs.membership.tokens import InvitationLink, Token, certify, make_token, token_key
from p2pavg.runs.records.invitations import Delegate
from p2pavg.tools.cli.authority import parse_roles, seconds_of
from p2pavg_dht import Ed25519Signer

MAX_LINKS = 1000


def delegate_of(run: Path, certificate: Path | None, identity: Path | None) -> Delegate:
    """Read the files of a delegate, given its folder, or a run file with a certificate and an identity."""
    if run.is_dir():
        files = files_in(run, certificate=certificate, identity=identity)
        return open_delegate(files.run_file, files.certificate, files.identity)
    if certificate is None or identity is None:
        raise ConfigError(f"--certificate FILE and --identity FILE are needed: {run} is no folder of a peer")
    return open_delegate(run, certificate, identity)


def make_links(
    delegate: Delegate,
    *,
    address: str | None,
    count: int,
    days: float,
    certificate_days: float | None,
    roles: Sequence[str],
    max_weight: float | None,
) -> list[str]:
    """Return links of a delegate, each for one peer.

    Args:
        address: of the delegate; ``None``: the one that its folder has.
        days: for which the links can be used.
        certificate_days: for which the certificates are valid from now; ``None``: as long as the delegate's own one.
        roles: that a link grants; empty: all that the delegate may grant.
        max_weight: ``None``: as much as the delegate may grant.
    """
    now = time.time()
    own = read_certificate(delegate.membership.access.certificate)
    if (wrong := delegate.membership.own_refusal(now)) is not None:
        raise ConfigError(f"this delegate admits no peer: {wrong}")
    if address is None:
        addresses = Home(delegate.used_file.parent).addresses
        if not addresses:
            raise ConfigError(
                "--address ADDR is needed: the delegate's folder does not have the file of its addresses"
            )
        address = addresses[0]
    _, named = parse_peer_address(address)
    if named != own.peer_id:
        raise ConfigError(f"--address must be an address of the delegate, and end in /p2p/{own.peer_id}")
    if not 0 < count <= MAX_LINKS:
        raise ConfigError(f"--count must be from 1 to {MAX_LINKS}, got {count}")
    granted = frozenset(parse_roles(roles)) or own.roles - {Role.DELEGATE}
    ends = own.expires
    if certificate_days is not None:
        ends = min(ends, now + seconds_of(certificate_days, "--certificate-days"))
    expires = min(now + seconds_of(days), ends)
    key = token_key(delegate.seed, delegate.run.authority)
    links = []
    for _ in range(count):
        token = Token(
            serial=secrets.token_bytes(SERIAL_BYTES),
            roles=granted,
            max_weight=own.max_weight if max_weight is None else max_weight,
            begins=now,
            expires=expires,
            certificate_expires=ends,
        )
        try:  # what the delegate may not grant is a mistake now, not when the link is used
            certify(token, own.peer_id, own, Ed25519Signer(delegate.seed).sign)
        except MemberCertificateError as error:
            raise ConfigError(f"the link cannot be made: {error}") from None
        links.append(InvitationLink(address, make_token(key, token)).text)
    return links

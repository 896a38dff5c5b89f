"""Invitation links, behind ``p2pavg run link`` and ``p2pavg run join``."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import trio

from p2pavg.base.errors import ConfigError
from p2pavg.base.files import PRIVATE, PUBLIC, read_text
from p2pavg.base.threads.exceptions import bare_exceptions
from p2pavg.net.addresses import parse_peer_address
from p2pavg.net.nat.reach.options import ONLY_ASKS
from p2pavg.peer.joining.home import file_name
from p2pavg.records.identity import load_or_make_seed, load_seed
from p2pavg.runs.membership.armour import certificate_text
from p2pavg.runs.membership.certificate import (
    SERIAL_BYTES,
    Certificate,
    MemberCertificateError,
    Role,
    date_of,
    read_certificate,
)
from p2pavg.runs.membership.files import read_access, read_run_file
from p2pavg.runs.membership.membership import Membership
from p2pavg.runs.membership.run_file import MAX_EDITED_BYTES, RunFile
from p2pavg.runs.membership.tokens import Link, Token, certify, make_token, parse_link, token_key
from p2pavg.runs.records.invitations import Delegate, redeem
from p2pavg.tools.cli.authority import parse_roles, seconds_of, write_new
from p2pavg_dht import Ed25519Signer

MAX_LINKS = 1000


def open_delegate(run_file: Path, certificate: Path, identity: Path) -> Delegate:
    """Read a delegate's files.

    Raises:
        ConfigError, IdentityError: a file cannot be read, the certificate is for another peer, or it does not have the
            role ``delegate``.
    """
    run = read_run_file(run_file)
    seed = load_seed(identity)
    membership = Membership(read_access(run, certificate), Ed25519Signer(seed).peer_id)
    return Delegate(run, membership, seed, identity.with_name(f"{identity.name}.used"))


def make_links(
    delegate: Delegate,
    *,
    address: str,
    count: int,
    days: float,
    certificate_days: float | None,
    roles: Sequence[str],
    max_weight: float | None,
) -> list[str]:
    """Return links of a delegate, each for one peer.

    Args:
        days: for which the links can be used.
        certificate_days: for which the certificates are valid from now; ``None``: as long as the delegate's own one.
        roles: that a link grants; empty: all that the delegate may grant.
        max_weight: ``None``: as much as the delegate may grant.
    """
    now = time.time()
    own = read_certificate(delegate.membership.access.certificate)
    if (wrong := delegate.membership.own_refusal(now)) is not None:
        raise ConfigError(f"this delegate admits no peer: {wrong}")
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
        links.append(Link(address, make_token(key, token)).text)
    return links


def join(text: str, *, identity: Path, directory: Path) -> list[str]:
    """Redeem a link; write the run file and the certificate."""
    link = parse_link(text)
    if not directory.is_dir():
        raise ConfigError(f"{directory} is no folder; make it first")
    run, certificate = trio.run(redeem_link, link, load_or_make_seed(identity))
    name = file_name(run.run_id)
    run_file, certificate_file = directory / f"{name}.run", directory / f"{name}.cert"
    _write_same(run_file, run.text, PRIVATE)
    _write_same(certificate_file, certificate_text(certificate), PUBLIC)
    roles = ", ".join(sorted(certificate.roles))
    return [
        f"made {run_file}: the run {run.run_id!r}. It holds the run's secret: keep it to yourself.",
        f"made {certificate_file}: {roles} until {date_of(certificate.expires)}",
        f"Next: open the peer with the identity {identity}, and configure it with",
        f"  AveragingConfig.from_run({str(run_file)!r}, certificate={str(certificate_file)!r})",
    ]


async def redeem_link(link: Link, seed: bytes) -> tuple[RunFile, Certificate]:
    """Ask the delegate of a link for the run file and a certificate.

    Raises:
        InvitationError: the delegate did not admit this peer, or did not answer.
    """
    from p2pavg.net.libp2p.transport import open_libp2p_transport

    with bare_exceptions():
        async with open_libp2p_transport(seed=seed, listen=[], options=ONLY_ASKS) as transport:
            return await redeem(transport, link, now=time.time())


def _write_same(file: Path, text: str, mode: int) -> None:
    """Write a file, or accept one with the same text, because a link may be redeemed again by the same peer."""
    if not file.exists() or read_text(file, "earlier file", max_bytes=MAX_EDITED_BYTES) != text:
        write_new(file, text, mode=mode)

"""Invitation links: a delegate makes them, and each admits one peer. No I/O, no clock, no random source.

A link has the address of the delegate and a *token*: what the link grants, authenticated with a key that only the
delegate has. The key follows from the delegate's identity and the run's authority by HKDF (RFC 5869), so links can be
made without asking the running delegate. Any peer that has the link can use it. Until then the link is as secret as
the run file.

The certificate follows from the token, the peer's id and the delegate's own certificate alone. The same peer gets the
same certificate again if it asks again.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from p2pavg.base.errors import ConfigError, RemoteProtocolError
from p2pavg.base.messages import checked, pack, unpack
from p2pavg.runs.membership.certificate import SERIAL_BYTES, Certificate, Role, issue
from p2pavg.runs.membership.peer_addresses import MAX_ADDRESS_CHARS, is_peer_address

MAC_BYTES = 16
MAX_TOKEN_BYTES = 160
MAX_LINK_CHARS = 640
SCHEME = "p2pavg:"
_VERSION = 1
_ASK_AGAIN = "copy the whole link from the message that brought it, or ask the run's owner for a new one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """The rights that a link grants. Times are wall clock, seconds since 1970."""

    serial: bytes
    """16 random bytes that name the token. The certificate has them as its serial."""
    roles: frozenset[Role]
    max_weight: float
    begins: float
    """Time at which the link was made, and at which the certificate begins."""
    expires: float
    """Time at which the link ends."""
    certificate_expires: float
    """Time at which the certificate ends."""


@dataclass(frozen=True, slots=True)
class InvitationLink:
    """An invitation link."""

    address: str
    """Address of the delegate; ends in ``/p2p/<peer id>``."""
    token: bytes = field(repr=False)

    @property
    def delegate(self) -> str:
        """The delegate's peer id."""
        return self.address.rpartition("/")[2]

    @property
    def text(self) -> str:
        """The link as text. :func:`parse_link` reads it back."""
        packed = pack(_VERSION, self.address, self.token)
        return SCHEME + base64.urlsafe_b64encode(packed).decode("ascii").rstrip("=")


def parse_link(text: str) -> InvitationLink:
    """Read a link. Only its delegate can say whether its token is genuine.

    Raises:
        ConfigError: the text is no link.
    """
    if not text.startswith(SCHEME) or len(text) > MAX_LINK_CHARS:
        raise ConfigError(
            f"an invitation link begins with {SCHEME} and has at most {MAX_LINK_CHARS} characters",
            remedy=_ASK_AGAIN,
        )
    encoded = text[len(SCHEME) :]
    try:
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        version, address, token = unpack(data, int, str, bytes)
    except (binascii.Error, ValueError, RemoteProtocolError):
        raise _damaged() from None
    if version != _VERSION:
        raise ConfigError(f"the link has version {version}; this p2pavg reads version {_VERSION}")
    if len(address) > MAX_ADDRESS_CHARS or not is_peer_address(address) or len(token) > MAX_TOKEN_BYTES:
        raise _damaged()
    return InvitationLink(address, token)


def _damaged() -> ConfigError:
    return ConfigError("the link is damaged; copy all of it", remedy=_ASK_AGAIN)


def token_key(seed: bytes, authority: bytes) -> bytes:
    """Return the key of a delegate's tokens.

    Args:
        seed: private key of the delegate's identity, 32 bytes.
        authority: public key of the run's authority.
    """
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=b"p2pavg/invitations/1/" + authority).derive(
        seed
    )


def make_token(key: bytes, token: Token) -> bytes:
    """Return a token as bytes, at most :data:`MAX_TOKEN_BYTES`."""
    body = pack(
        _VERSION,
        token.serial,
        tuple(sorted(token.roles)),
        float(token.max_weight),
        float(token.begins),
        float(token.expires),
        float(token.certificate_expires),
    )
    return _mac(key, body) + body


def read_token(key: bytes, data: bytes) -> Token:
    """Read a token that a peer has sent.

    Raises:
        RemoteProtocolError: the bytes are no token that was made with this key.
    """
    mac, body = data[:MAC_BYTES], data[MAC_BYTES:]
    if len(data) > MAX_TOKEN_BYTES or not hmac.compare_digest(mac, _mac(key, body)):
        raise RemoteProtocolError("no token of this delegate")
    version, serial, names, weight, begins, expires, certificate_expires = unpack(
        body, int, bytes, tuple, float, float, float, float
    )
    if (
        version != _VERSION
        or len(serial) != SERIAL_BYTES
        or not set(checked(names, (str,) * len(names))) <= set(Role)
    ):
        raise RemoteProtocolError("a token of another version")
    return Token(
        serial=serial,
        roles=frozenset(map(Role, names)),
        max_weight=weight,
        begins=begins,
        expires=expires,
        certificate_expires=certificate_expires,
    )


def certify(token: Token, peer_id: str, delegate: Certificate, sign: Callable[[bytes], bytes]) -> Certificate:
    """Return the certificate that a token grants to a peer.

    Args:
        delegate: the delegate's own certificate. The result ends with it at the latest.
        sign: returns the delegate's signature.

    Raises:
        MemberCertificateError: the delegate's certificate does not grant as much.
    """
    return issue(
        sign,
        authority=delegate.authority,
        peer_id=peer_id,
        roles=token.roles,
        max_weight=token.max_weight,
        not_before=max(token.begins, delegate.not_before),
        expires=min(token.certificate_expires, delegate.expires),
        serial=token.serial,
        issuer=delegate,
    )


def _mac(key: bytes, body: bytes) -> bytes:
    return hmac.new(key, body, hashlib.sha256).digest()[:MAC_BYTES]

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
from typing import Annotated

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import Meta

from p2pavg.base.errors import ConfigError, RemoteProtocolError
from p2pavg.base.limits import MAX_WEIGHT
from p2pavg.base.messages import Message
from p2pavg.runs.membership.certificate import MAX_TIME, SERIAL_BYTES, Certificate, Role, issue
from p2pavg.runs.membership.peer_addresses import MAX_ADDRESS_CHARS, is_peer_address

MAC_BYTES = 16
MAX_TOKEN_BYTES = 160
MAX_LINK_CHARS = 640
SCHEME = "p2pavg:"
_VERSION = 1
_ASK_AGAIN = "copy the whole link from the message that brought it, or ask the run's owner for a new one"


_Time = Annotated[float, Meta(ge=0.0, le=MAX_TIME)]


class Token(Message, frozen=True, kw_only=True, tag=_VERSION):
    """The rights that a link grants. Times are wall clock, seconds since 1970."""

    serial: Annotated[bytes, Meta(min_length=SERIAL_BYTES, max_length=SERIAL_BYTES)]
    """Random bytes that name the token. The certificate has them as its serial."""
    roles: Annotated[frozenset[Role], Meta(max_length=len(Role))]
    max_weight: Annotated[float, Meta(ge=0.0, le=MAX_WEIGHT)]
    begins: _Time
    """Time at which the link was made, and at which the certificate begins."""
    expires: _Time
    """Time at which the link ends."""
    certificate_expires: _Time
    """Time at which the certificate ends."""


class InvitationLink(Message, frozen=True, tag=_VERSION):
    """An invitation link."""

    address: Annotated[str, Meta(max_length=MAX_ADDRESS_CHARS)]
    """Address of the delegate; ends in ``/p2p/<peer id>``."""
    token: Annotated[bytes, Meta(max_length=MAX_TOKEN_BYTES)]

    def __post_init__(self) -> None:
        if not is_peer_address(self.address):
            raise ValueError("a link without the address of a peer")

    def __repr__(self) -> str:
        return f"InvitationLink({self.address!r})"  # the token is a secret, which no log shows

    @property
    def delegate(self) -> str:
        """The delegate's peer id."""
        return self.address.rpartition("/")[2]

    @property
    def text(self) -> str:
        """The link as text. :func:`parse_link` reads it back."""
        return SCHEME + base64.urlsafe_b64encode(self.encode()).decode("ascii").rstrip("=")


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
        return InvitationLink.decode(data)
    except (binascii.Error, ValueError, RemoteProtocolError):
        raise ConfigError(
            "the link is damaged, or of another version of p2pavg; copy all of it", remedy=_ASK_AGAIN
        ) from None


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
    body = token.normalised().encode()  # with whole numbers as floats, as its reader demands
    return _mac(key, body) + body


def read_token(key: bytes, data: bytes) -> Token:
    """Read a token that a peer has sent.

    Raises:
        RemoteProtocolError: the bytes are no token that was made with this key.
    """
    mac, body = data[:MAC_BYTES], data[MAC_BYTES:]
    if len(data) > MAX_TOKEN_BYTES or not hmac.compare_digest(mac, _mac(key, body)):
        raise RemoteProtocolError("no token of this delegate")
    return Token.decode(body)


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

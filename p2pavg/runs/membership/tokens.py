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
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import Meta

from p2pavg.base.errors import ConfigError, RemoteProtocolError
from p2pavg.base.limits import DAY_SECONDS, MAX_WEIGHT
from p2pavg.base.messages import Message
from p2pavg.runs.membership.certificate import MAX_TIME, SERIAL_BYTES, Certificate, Role, date_of, issue
from p2pavg_dht import PeerIdError, public_key_of

# Addresses of peers in run files and invitation links, as texts.
#
# It imports little: a damaged link is told from a whole one before libraries are loaded that take seconds.

MAX_ADDRESS_CHARS = 256


def is_peer_address(text: str) -> bool:
    """Return whether a text looks like an address of a peer. Dialling it checks the rest."""
    start, _, peer_id = text.rpartition("/p2p/")
    return _is_peer_id(peer_id) and start.startswith("/") and start.isascii() and start.isprintable()


def _is_peer_id(text: str) -> bool:
    try:
        public_key_of(text)
    except PeerIdError:
        return False
    return True


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


# The tokens that were used, and by which peers: each admits one peer.

MAX_USED = 4096
MAX_USED_BYTES = 1024 * 1024
COMMENT = "# p2pavg: invitation links that were used: serial, when the link expires, peer"
_LINE = re.compile(r"([0-9a-f]{32}) ([0-9]{1,12}(?:\.[0-9]{1,20})?) ([1-9A-Za-z]+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a token."""

    peer_id: str
    expires: float


class UsedTokens:
    """The used tokens of one delegate.

    Args:
        uses: by serial, as :func:`parse_used_tokens` reads them.
    """

    def __init__(self, uses: dict[bytes, Use] | None = None) -> None:
        self._uses = dict(uses or {})

    def refusal(self, token: Token, peer_id: str, now: float) -> str | None:
        """Return the reason for which a peer may not use a token, or ``None``."""
        if now >= token.expires:
            return f"this link expired on {date_of(token.expires)}"
        use = self._uses.get(token.serial)
        if use is not None and use.peer_id != peer_id:
            return "this link was used already by another peer"
        if use is None and len(self._kept(now)) >= MAX_USED:
            return f"the delegate has admitted {MAX_USED} peers whose links have not expired; try again later"
        return None

    def use(self, token: Token, peer_id: str, now: float) -> bool:
        """Note that a peer uses a token which :meth:`refusal` has allowed. Return whether anything has changed."""
        if token.serial in self._uses:
            return False
        self._uses = self._kept(now)
        self._uses[token.serial] = Use(peer_id, token.expires)
        return True

    @property
    def text(self) -> str:
        """The uses as text. :func:`parse_used_tokens` reads them back."""
        lines = (f"{serial.hex()} {use.expires:.3f} {use.peer_id}" for serial, use in self._uses.items())
        return "\n".join([COMMENT, *lines, ""])

    def _kept(self, now: float) -> dict[bytes, Use]:
        # A day longer than its link, in case the clock is set back.
        return {serial: use for serial, use in self._uses.items() if now < use.expires + DAY_SECONDS}


def parse_used_tokens(text: str) -> UsedTokens:
    """Read the used tokens.

    Raises:
        ConfigError: a line is damaged; the message has its number. Without that line a link could be used twice.
    """
    uses = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#") or not line:
            continue
        found = _LINE.fullmatch(line)
        if found is None or not _is_peer_id(found[3]):
            raise ConfigError(f"line {number} is damaged; restore the file from a copy")
        uses[bytes.fromhex(found[1])] = Use(found[3], float(found[2]))
    if len(uses) > MAX_USED:
        raise ConfigError(f"it has {len(uses)} links; a delegate keeps {MAX_USED}")
    return UsedTokens(uses)

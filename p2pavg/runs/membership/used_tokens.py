"""The tokens that were used, and by which peers: each admits one peer. No I/O, no clock, no random source."""

from __future__ import annotations

import re
from dataclasses import dataclass

from p2pavg.base.errors import ConfigError
from p2pavg.runs.membership.certificate import date_of
from p2pavg.runs.membership.tokens import Token
from p2pavg_dht import PeerIdError, public_key_of

MAX_USED = 4096
KEEP_TOKEN_SECONDS = 86400.0
"""A used token is remembered this long after its link has expired, in case the clock is set back."""
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
        return {serial: use for serial, use in self._uses.items() if now < use.expires + KEEP_TOKEN_SECONDS}


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


def _is_peer_id(text: str) -> bool:
    try:
        public_key_of(text)
    except PeerIdError:
        return False
    return True

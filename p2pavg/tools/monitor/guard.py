"""Access to the monitor's pages: the token, and the headers that keep the page to itself. No I/O, no clock."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

COOKIE = "p2pavg_monitor"
HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of every answer. The page loads nothing from elsewhere and runs no script but its own."""
MIN_TOKEN_CHARS = 16


def is_token(given: str | None, token: str) -> bool:
    """Return whether a request has the token, in a time that does not depend on how much of it is right."""
    return given is not None and hmac.compare_digest(given.encode(), token.encode())


def bearer(header: str | None) -> str | None:
    """Return the token of an ``Authorization`` header, if it has one."""
    kind, _, value = (header or "").partition(" ")
    return value.strip() if kind.lower() == "bearer" else None

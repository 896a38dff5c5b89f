"""Text of peers that is safe to show. No I/O, no clock.

Terminals obey control characters, and text that changes its direction can hide what it says. Neither is printable.
"""

from __future__ import annotations

import hashlib

KEY_BYTES = 8
"""Bytes that stand for a peer's id in other peers' records."""


def is_printable(text: str, most: int) -> bool:
    """Return whether a text has at most ``most`` characters, all of them printable; it may be empty."""
    return len(text) <= most and (not text or text.isprintable())


def harmless(text: str, most: int) -> str:
    """Return a text for others: at most ``most`` characters, a space in place of each that is not printable."""
    return "".join(character if character.isprintable() else " " for character in text[:most]).strip()


def key_of(peer_id: str) -> bytes:
    """Return the bytes that stand for a peer's id."""
    return hashlib.sha256(peer_id.encode()).digest()[:KEY_BYTES]

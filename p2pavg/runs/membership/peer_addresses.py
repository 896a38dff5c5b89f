"""Addresses of peers in run files and invitation links, as texts. No I/O, no clock, no random source.

It imports little: a damaged link is told from a whole one before libraries are loaded that take seconds.
"""

from __future__ import annotations

from p2pavg_dht.identity import PeerIdError, public_key_of

MAX_ADDRESS_CHARS = 256


def is_peer_address(text: str) -> bool:
    """Return whether a text looks like an address of a peer. Dialling it checks the rest."""
    start, _, peer_id = text.rpartition("/p2p/")
    try:
        public_key_of(peer_id)
    except PeerIdError:
        return False
    return start.startswith("/") and start.isascii() and start.isprintable()

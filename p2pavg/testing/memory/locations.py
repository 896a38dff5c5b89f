"""The addresses of the peers of a simulated network."""

from __future__ import annotations

from p2pavg.net.transport import PeerId


class Locations:
    """Gives each peer one address, at the first question about it, and keeps it."""

    def __init__(self) -> None:
        self._known: dict[PeerId, str] = {}

    def of(self, peer_id: PeerId) -> str:
        """Return the address of a peer, without its id."""
        if peer_id not in self._known:
            number = len(self._known) + 1
            self._known[peer_id] = f"/ip4/10.{number >> 16}.{number >> 8 & 255}.{number & 255}/tcp/4001"
        return self._known[peer_id]

    def host_of(self, peer_id: PeerId) -> str:
        """Return the IP address from which a peer's connections come."""
        return self.of(peer_id).split("/")[2]

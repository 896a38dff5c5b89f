"""The addresses of the peers of a simulated network. No I/O, no clock."""

from __future__ import annotations

from p2pavg.net.transport import PeerId


class Locations:
    """Gives each peer one address, at the first question about it, and keeps it."""

    def __init__(self) -> None:
        self._known: dict[PeerId, str] = {}
        self._peers: dict[str, PeerId] = {}

    def of(self, peer_id: PeerId) -> str:
        """Return the address of a peer, without its id."""
        if peer_id not in self._known:
            number = len(self._known) + 1
            location = f"/ip4/10.{number >> 16}.{number >> 8 & 255}.{number & 255}/tcp/4001"
            self._known[peer_id], self._peers[location] = location, peer_id
        return self._known[peer_id]

    def peer_at(self, location: str) -> PeerId | None:
        """Return the peer to which an address was given; ``None`` if no peer has it."""
        return self._peers.get(location)

    def host_of(self, peer_id: PeerId) -> str:
        """Return the IP address from which a peer's connections come."""
        return self.of(peer_id).split("/")[2]

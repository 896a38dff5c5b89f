"""The interface of the network that this package needs."""

from typing import Protocol

from p2pavg_dht.contact import Contact

# The timeout of dialling, the handshake and the answer together.
RPC_TIMEOUT = 5.0


class RpcError(Exception):
    """A call brought no valid answer; the text says why."""


class Rpc(Protocol):
    """Calls to other peers, each on its own stream."""

    async def call(self, contact: Contact, request: bytes) -> bytes:
        """Send `request` to `contact.peer_id`, whose identity the transport proves, and return the answer.

        Addresses are hints: an existing connection is used instead. The answer is at most MAX_MESSAGE_BYTES
        long. Raises RpcError if the call fails. It may be cancelled at any time, and is cancelled after
        RPC_TIMEOUT.
        """

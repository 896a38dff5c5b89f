"""The one thing this package needs from a network."""

from typing import Protocol

from p2pavg_dht.contact import Contact

# For dialling, the handshake and the answer together.
RPC_TIMEOUT = 5.0


class RpcError(Exception):
    """A call that brought no answer, for whatever reason; its text says which."""


class Rpc(Protocol):
    """Calls to other peers, each on a stream of its own."""

    async def call(self, contact: Contact, request: bytes) -> bytes:
        """The answer of `contact.peer_id`, whose identity the transport has proved, to `request`.

        Addresses are hints: a connection that exists already will do. The answer is at most
        MAX_MESSAGE_BYTES long. RpcError for anything that went wrong. It may be cancelled at any time, and
        is after RPC_TIMEOUT.
        """

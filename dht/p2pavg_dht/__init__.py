"""A distributed hash table without a server: signed, expiring records on the peers nearest to their key.

`RecordNode` is the entry point; it needs a `Signer` and an `Rpc`. The package knows nothing of the purpose of
the records.
"""

from p2pavg_dht.contact import Contact, ContactError
from p2pavg_dht.identity import Ed25519Signer, PeerIdError, Signer, public_key_of
from p2pavg_dht.limits import Limits
from p2pavg_dht.messages import PROTOCOL, MessageError
from p2pavg_dht.node import Published, RecordNode
from p2pavg_dht.record import MAX_VALUE_BYTES, Record, RecordError, sign_record, verify
from p2pavg_dht.rpc import RPC_TIMEOUT, Rpc, RpcError
from p2pavg_dht.storage import Refusal
from p2pavg_dht.wire import MAX_MESSAGE_BYTES

__all__ = [
    "MAX_MESSAGE_BYTES",
    "MAX_VALUE_BYTES",
    "PROTOCOL",
    "RPC_TIMEOUT",
    "Contact",
    "ContactError",
    "Ed25519Signer",
    "Limits",
    "MessageError",
    "PeerIdError",
    "Published",
    "Record",
    "RecordError",
    "RecordNode",
    "Refusal",
    "Rpc",
    "RpcError",
    "Signer",
    "public_key_of",
    "sign_record",
    "verify",
]

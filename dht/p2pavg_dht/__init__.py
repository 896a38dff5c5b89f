"""A distributed hash table without a server: signed, expiring records on the peers nearest to their key.

`RecordNode` is the entry point; it needs a `Signer` and an `Rpc`. The package knows nothing of the purpose of
the records.

A program that only reads identities and records, such as a command in a terminal, does not load trio for the node.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from p2pavg_dht.identity import (
    RPC_TIMEOUT,
    Contact,
    ContactError,
    Ed25519Signer,
    PeerIdError,
    Rpc,
    RpcError,
    Signer,
    public_key_of,
)
from p2pavg_dht.messages import MAX_MESSAGE_BYTES, PROTOCOL, MessageError
from p2pavg_dht.record import MAX_VALUE_BYTES, Record, RecordError, sign_record, verify
from p2pavg_dht.storage import Limits, Refusal

if TYPE_CHECKING:
    from p2pavg_dht.node import Published, RecordNode

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

_LATER = {"Published": "node", "RecordNode": "node"}


def __getattr__(name: str) -> object:
    """Load the module of a name that needs trio, and return the name's object (PEP 562)."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)

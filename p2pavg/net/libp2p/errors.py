"""The errors of libp2p: which of them a peer or the network has caused, and their texts."""

from __future__ import annotations

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey

from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError

# Errors that a peer or the network causes. UnicodeDecodeError: a protocol name that is not text.
_OF_THE_NETWORK = (
    StreamBrokenError,
    RemoteProtocolError,
    UnreachableError,
    ClosedError,
    BaseLibp2pError,
    UnicodeDecodeError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    ConnectionError,
)

ANOTHER_PEER = "another peer is there: "
"""The beginning of the error of a dial that met a peer with another id, which follows."""


def is_of_the_network(error: BaseException) -> bool:
    """Return whether a peer or the network has caused an error. Any other error is a bug of this process."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_of_the_network, error.exceptions))
    return isinstance(error, _OF_THE_NETWORK)


def is_refusal(error: BaseException) -> bool:
    """Return whether the operating system at the other end refused the connection: no process listens there."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ExceptionGroup):
        return all(is_refusal(inner) for inner in error.exceptions)
    return isinstance(error, ConnectionRefusedError)


def error_text(error: BaseException) -> str:
    """Return the text of an error's root cause, or its type's name: many errors of libp2p have no text."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ExceptionGroup):  # trio's, with one error for each address of a host
        return "; ".join(error_text(inner) for inner in error.exceptions)
    if isinstance(error, PeerIDMismatchesPubkey):
        return f"{ANOTHER_PEER}{str(error).rpartition('=')[2]}"
    return str(error) or type(error).__name__

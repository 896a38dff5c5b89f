"""Every exception that the library raises on purpose.

Three kinds, after trio's: *Closed* (you did it), *Broken* (the world did), *misuse* (a caller's argument). What the
network does to a round is never an exception: it is a :class:`~p2pavg.result.Failed`.
"""

from __future__ import annotations


class P2PAvgError(Exception):
    """Base of every exception of this library."""


class ClosedError(P2PAvgError, RuntimeError):
    """The averager, peer or stream was closed by this process and was then used."""


class BusyError(P2PAvgError, RuntimeError):
    """Two users of one peer are in each other's way, such as two averagers of the same run and tensors."""


class ConfigError(P2PAvgError, ValueError):
    """An argument of :class:`~p2pavg.AveragingConfig` is out of range; the message names it."""


class AccumulateError(P2PAvgError, ValueError):
    """Tensors or a weight that cannot be averaged; the message names the tensor and what is wrong with it."""


class AddressError(P2PAvgError, ValueError):
    """Text that is no usable multiaddress."""


class IdentityError(P2PAvgError, ValueError):
    """A key file that cannot be read, has the wrong owner's rights, or holds no Ed25519 key."""


class ListenError(P2PAvgError, OSError):
    """A listen address that cannot be listened on, e.g. because its port is taken."""


class BootstrapError(P2PAvgError, OSError):
    """None of the bootstrap addresses could be reached."""


class UnreachableError(P2PAvgError):
    """No connection or no stream to a peer came about in time."""


class RefusedError(UnreachableError):
    """Nobody listens any more where this process has met the peer: its process has ended, or is another one."""


class StreamBrokenError(P2PAvgError):
    """The other side, or the way to it, ended the stream before the message did."""


class RemoteProtocolError(P2PAvgError):
    """A peer sent bytes that break the protocol. It costs that peer its stream, and nobody else anything."""

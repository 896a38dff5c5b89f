"""The exceptions that this library raises on purpose.

There are three kinds, as in trio: *Closed* (this process closed the object), *Broken* (a peer or the network ended it)
and *misuse* (an argument of the caller is wrong). A round that fails because of the network raises no exception. It
returns a :class:`~p2pavg.result.Failed`.
"""

from __future__ import annotations


class P2PAvgError(Exception):
    """Base of every exception of this library."""


class ClosedError(P2PAvgError, RuntimeError):
    """The averager, peer or stream was used after this process had closed it."""


class BusyError(P2PAvgError, RuntimeError):
    """Two users of one peer conflict, such as two averagers of the same run and tensors."""


class ConfigError(P2PAvgError, ValueError):
    """An argument of :class:`~p2pavg.AveragingConfig`, or a file of a run, is malformed; the message names it."""


class AccumulateError(P2PAvgError, ValueError):
    """Tensors or a weight that cannot be averaged; the message names the tensor and what is wrong with it."""


class AddressError(P2PAvgError, ValueError):
    """Text that is not a usable multiaddress."""


class IdentityError(P2PAvgError, ValueError):
    """A key file that cannot be read, has the wrong owner's rights, or holds no Ed25519 key."""


class ListenError(P2PAvgError, OSError):
    """A listen address that cannot be listened on, e.g. because its port is taken."""


class BootstrapError(P2PAvgError, OSError):
    """None of the bootstrap addresses could be reached."""


class InvitationError(P2PAvgError):
    """A delegate did not admit this peer with an invitation link; the message says why."""


class CertificateError(P2PAvgError, ValueError):
    """Bytes that are no certificate of a commit, or one that is not genuine; the message says which check failed."""


class UnreachableError(P2PAvgError):
    """No connection or no stream to a peer could be made in time."""


class RefusedError(UnreachableError):
    """The connection was refused at a host where this process has met the peer, whose process has probably ended."""


class StreamBrokenError(P2PAvgError):
    """The other side or the network ended the stream before the message was complete."""


class RemoteProtocolError(P2PAvgError):
    """A peer sent bytes that break the protocol. That peer loses its stream; no other peer is affected."""


class StateError(P2PAvgError):
    """A state that cannot be used or had. The message says why."""
